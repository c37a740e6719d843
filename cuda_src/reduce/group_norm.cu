// group_norm: y = act((x - mean) * rstd * weight[c] + bias[c]), act the identity or silu. x is dense, (batch, channels,
// spatial); a row is a group of neighbouring channels of one batch entry, `cols` = channels of a group * spatial
// elements. Statistics come from a row reduction, in fp32 (mean and variance), and are kept as S: fp32, or T as aten keeps
// them. W: type of weight and bias.
//
// group_norm_apply, group_norm_bwd: a block owns a slice of a row. plane_sums: a group of threads owns one channel of
// one batch entry and writes the sums of g * z and g to `partial` [batch][2][channels], z = (x - mean) * rstd and g = dy
// times the slope of act; dx takes its row's sums from there, and a reduction over the batch, in order, gives the
// gradients of weight and bias. Arithmetic: fp32, rounded once.
#include "common/math.cuh"
#include "reduce/group_state.cuh"

namespace rtk {

// A parameter for each of N elements from `at` on; `spatial` neighbours share one.
template <typename T, int N>
RTK_DEVICE void channel_values(const T* p, u32 at, u32 spatial, float otherwise, float (&v)[N]) {
    u32 channel = at / spatial, rest = at - channel * spatial;
    float shared[1] = {otherwise};
    if (rest + N <= spatial) {  // as a rule
        if (p != nullptr) load_keep<T, 1>(p + channel, shared);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = shared[0];
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (p != nullptr && (i == 0 || rest == 0)) load_keep<T, 1>(p + channel, shared);
        v[i] = shared[0];
        if (++rest == spatial) rest = 0, ++channel;
    }
}

// silu(v), and its slope.
template <typename T>
RTK_DEVICE float silu(float v) {
    return sigmoid_gate<sizeof(T) == 2>(v, v).product;
}
template <typename T>
RTK_DEVICE float silu_slope(float v) {
    const SigmoidGate at = sigmoid_gate<sizeof(T) == 2>(v, v);
    return fmaf(at.product, 1.0f - at.sigmoid, at.sigmoid);
}

// COUNT vectors of N elements, at `at`, at + pitch, ...; zeros from `end` on. All are requested before any is used.
template <typename T, int N, int COUNT>
RTK_DEVICE void load_vectors(const T* p, i64 at, i64 pitch, i64 end, Raw<sizeof(T) * N> (&raw)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        clear(raw[k]);
        if (at + k * pitch < end) raw[k] = load_raw<T, N>(p + at + k * pitch);
    }
}

struct RowSlice {
    i64 row;
    i64 begin, end;
    RTK_DEVICE RowSlice(i64 cols, i64 slices, i64 per_slice) {
        row = blockIdx.x / slices;
        begin = (blockIdx.x - row * slices) * per_slice;
        end = min(begin + per_slice, cols);
    }
};

template <typename T, typename W, int N>
RTK_DEVICE void apply_slice(const T* x, const W* weight, const W* bias, T* y, float mean, float rstd, i64 cols, i64 spatial,
                            bool act, const RowSlice& slice) {
    constexpr int kInFlight = 4, kPitch = kReduceThreads * N;
    Raw<sizeof(T) * N> raw[kInFlight];
    for (i64 from = slice.begin + threadIdx.x * N; from < slice.end; from += kInFlight * kPitch) {
        load_vectors<T, N>(x + slice.row * cols, from, kPitch, slice.end, raw);
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = from + k * kPitch;
            if (at >= slice.end) break;
            float v[N], w[N], b[N];
            unpack<T, N>(raw[k], v);
            channel_values<W, N>(weight, static_cast<u32>(at), static_cast<u32>(spatial), 1.0f, w);
            channel_values<W, N>(bias, static_cast<u32>(at), static_cast<u32>(spatial), 0.0f, b);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = (v[i] - mean) * rstd * w[i] + b[i];
            if (act) {
#pragma unroll
                for (int i = 0; i < N; ++i) v[i] = silu<T>(v[i]);
            }
            store<T, N>(y + slice.row * cols + at, v);
        }
    }
}

template <typename T, typename W, typename S>
__global__ void __launch_bounds__(kReduceThreads, 4)
    group_norm_apply(const T* x, const float* variances, const float* means, const W* weight, const W* bias, T* y, S* mean,
                     S* rstd, i64 cols, i64 groups, i64 spatial, double eps, i64 act, i64 slices, i64 per_slice, i64 aligned) {
    const RowSlice slice(cols, slices, per_slice);
    const float center[1] = {means[slice.row]}, inverse[1] = {rsqrtf(variances[slice.row] + static_cast<float>(eps))};
    if (slice.begin == 0 && threadIdx.x == 0) store<S, 1>(mean + slice.row, center), store<S, 1>(rstd + slice.row, inverse);
    const i64 first = slice.row % groups * (cols / spatial);  // of the group's channels
    const W* w = weight == nullptr ? nullptr : weight + first;
    const W* b = bias == nullptr ? nullptr : bias + first;
    if (aligned) {
        apply_slice<T, W, 16 / sizeof(T)>(x, w, b, y, center[0], inverse[0], cols, spatial, act != 0, slice);
    } else {
        apply_slice<T, W, 1>(x, w, b, y, center[0], inverse[0], cols, spatial, act != 0, slice);
    }
}

template <typename T>
RTK_DEVICE float number_at(const T* p, i64 at) {
    float v[1];
    load_keep<T, 1>(p + at, v);
    return v[0];
}

template <typename T, int N>
RTK_DEVICE PairSum::State plane_sum(const T* dy, const T* x, float mean, float rstd, float weight, float bias, bool act,
                                    i64 spatial, const RowGroup& group) {
    PairSum::State s = PairSum::identity();
    constexpr int kInFlight = 2;
    const i64 pitch = group.threads * N;
    Raw<sizeof(T) * N> gradients[kInFlight], values[kInFlight];
    for (i64 from = group.thread * N; from < spatial; from += kInFlight * pitch) {
        load_vectors<T, N>(dy, from, pitch, spatial, gradients);
        load_vectors<T, N>(x, from, pitch, spatial, values);
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (from + k * pitch >= spatial) break;
            float g[N], v[N];
            unpack<T, N>(gradients[k], g), unpack<T, N>(values[k], v);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = (v[i] - mean) * rstd;
            if (act) {
#pragma unroll
                for (int i = 0; i < N; ++i) g[i] *= silu_slope<T>(v[i] * weight + bias);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) s.a += g[i] * v[i], s.b += g[i];
        }
    }
    return s;
}

// weight and bias matter with act only.
template <typename T, typename W, typename S>
__global__ void __launch_bounds__(kReduceThreads, 4)
    plane_sums(const T* dy, const T* x, const W* weight, const W* bias, const S* mean, const S* rstd, float* partial,
               i64 planes, i64 channels, i64 group_channels, i64 spatial, i64 act, i64 threads_per_row, i64 aligned) {
    const RowGroup group(threads_per_row);
    const i64 plane = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 batch = plane / channels, channel = plane - batch * channels;
    PairSum::State s = PairSum::identity();
    if (plane < planes) {
        const i64 row = plane / group_channels, at = plane * spatial;
        const float center = number_at(mean, row), inverse = number_at(rstd, row);
        const float w = weight == nullptr ? 1.0f : number_at(weight, channel);
        const float b = bias == nullptr ? 0.0f : number_at(bias, channel);
        s = aligned ? plane_sum<T, 16 / sizeof(T)>(dy + at, x + at, center, inverse, w, b, act != 0, spatial, group)
                    : plane_sum<T, 1>(dy + at, x + at, center, inverse, w, b, act != 0, spatial, group);
    }
    s = combined<PairSum>(s, group.threads);
    if (plane >= planes || group.thread != 0) return;
    partial[batch * 2 * channels + channel] = s.a;
    partial[(batch * 2 + 1) * channels + channel] = s.b;
}

// dx = rstd * (g * weight - mean(g * weight) - z * mean(g * weight * z)).
template <typename T, typename W, int N>
RTK_DEVICE void bwd_slice(const T* dy, const T* x, const W* weight, const W* bias, T* dx, float mean, float rstd, float first,
                          float second, bool act, i64 cols, i64 spatial, const RowSlice& slice) {
    constexpr int kInFlight = 2, kPitch = kReduceThreads * N;
    Raw<sizeof(T) * N> gradients[kInFlight], values[kInFlight];
    for (i64 from = slice.begin + threadIdx.x * N; from < slice.end; from += kInFlight * kPitch) {
        load_vectors<T, N>(dy + slice.row * cols, from, kPitch, slice.end, gradients);
        load_vectors<T, N>(x + slice.row * cols, from, kPitch, slice.end, values);
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = from + k * kPitch;
            if (at >= slice.end) break;
            float g[N], v[N], w[N];
            unpack<T, N>(gradients[k], g), unpack<T, N>(values[k], v);
            channel_values<W, N>(weight, static_cast<u32>(at), static_cast<u32>(spatial), 1.0f, w);
            if (act) {
                float b[N];
                channel_values<W, N>(bias, static_cast<u32>(at), static_cast<u32>(spatial), 0.0f, b);
#pragma unroll
                for (int i = 0; i < N; ++i) g[i] *= silu_slope<T>((v[i] - mean) * rstd * w[i] + b[i]);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] = rstd * (g[i] * w[i] - first - (v[i] - mean) * rstd * second);
            store<T, N>(dx + slice.row * cols + at, g);
        }
    }
}

template <typename T, typename W, typename S>
__global__ void __launch_bounds__(kReduceThreads, 4)
    group_norm_bwd(const T* dy, const T* x, const W* weight, const W* bias, const S* mean, const S* rstd,
                   const float* partial, T* dx, i64 cols, i64 groups, i64 channels, i64 spatial, i64 act, i64 slices,
                   i64 per_slice, i64 aligned) {
    const RowSlice slice(cols, slices, per_slice);
    const i64 batch = slice.row / groups, group_channels = channels / groups;
    const i64 channel0 = (slice.row - batch * groups) * group_channels;
    const W* w = weight == nullptr ? nullptr : weight + channel0;
    const W* b = bias == nullptr ? nullptr : bias + channel0;
    PairSum::State s = PairSum::identity();
    for (i64 c = threadIdx.x; c < group_channels; c += kReduceThreads) {
        const float scale = w == nullptr ? 1.0f : number_at(w, c);
        s.a += scale * partial[(batch * 2 + 1) * channels + channel0 + c];
        s.b += scale * partial[batch * 2 * channels + channel0 + c];
    }
    s = combined<PairSum>(s, kReduceThreads);
    const float over = 1.0f / static_cast<float>(cols), center = number_at(mean, slice.row), inverse = number_at(rstd, slice.row);
    if (aligned) {
        bwd_slice<T, W, 16 / sizeof(T)>(dy, x, w, b, dx, center, inverse, s.a * over, s.b * over, act != 0, cols, spatial, slice);
    } else {
        bwd_slice<T, W, 1>(dy, x, w, b, dx, center, inverse, s.a * over, s.b * over, act != 0, cols, spatial, slice);
    }
}

}  // namespace rtk
