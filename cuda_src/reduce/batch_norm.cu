// batch_norm: y = (x - mean[c]) * rstd[c] * weight[c] + bias[c], and its gradients. x is dense, (batch, channels, spatial);
// with spatial == 1 the channels are innermost. Statistics of a batch come from a reduction, in fp32. Arithmetic: fp32,
// rounded once.
//
// batch_norm_apply, batch_norm_bwd: a thread owns N consecutive elements, grid: any. The first block also writes the
// statistics that the backward pass needs, and updates the running ones. channel_sums: a block owns a slice of the batch
// and writes the sums of dy * z and dy, z = (x - mean) * rstd, to `partial` [slices][2][channels]; for one channel if
// spatial > 1, else for 32 neighbouring ones. A reduction over the slices, in order, gives the sums.
#include "reduce/group_state.cuh"

namespace rtk {

// The channel of an element, and of those after it.
struct ChannelWalk {
    u32 channel, rest, channels, spatial;
    RTK_DEVICE ChannelWalk(i64 at, i64 channels, i64 spatial)
        : channels(static_cast<u32>(channels)), spatial(static_cast<u32>(spatial)) {
        const i64 plane = at / spatial;
        rest = static_cast<u32>(at - plane * spatial);
        channel = static_cast<u32>(plane % channels);
    }
    RTK_DEVICE void next() {
        if (++rest < spatial) return;
        rest = 0;
        if (++channel == channels) channel = 0;
    }
};

template <typename T>
RTK_DEVICE float loaded(const T* p, i64 at, float otherwise) {
    float v[1] = {otherwise};
    if (p != nullptr) load_keep<T, 1>(p + at, v);
    return v[0];
}

template <typename T>
RTK_DEVICE void updated(T* running, i64 at, float value, float momentum) {
    float v[1];
    if (running == nullptr) return;
    load_keep<T, 1>(running + at, v);
    v[0] = (1.0f - momentum) * v[0] + momentum * value;
    store<T, 1>(running + at, v);
}

template <typename T, typename W, int N>
__global__ void __launch_bounds__(kReduceThreads)
    batch_norm_apply(const T* x, const float* means, const float* variances, const W* weight, const W* bias, W* running_mean,
                     W* running_var, T* y, float* mean, float* rstd, i64 vectors, i64 channels, i64 spatial, double eps,
                     double momentum, double unbiased) {
    const float floor = static_cast<float>(eps);
    if (blockIdx.x == 0 && mean != nullptr) {
        for (i64 c = threadIdx.x; c < channels; c += kReduceThreads) {
            mean[c] = means[c];
            rstd[c] = rsqrtf(variances[c] + floor);
            updated(running_mean, c, means[c], static_cast<float>(momentum));
            updated(running_var, c, variances[c] * static_cast<float>(unbiased), static_cast<float>(momentum));
        }
    }
    const i64 step = static_cast<i64>(gridDim.x) * kReduceThreads;
    for (i64 i = static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x; i < vectors; i += step) {
        float v[N], center = 0.0f, scale = 0.0f, shift = 0.0f;
        load_stream<T, N>(x + i * N, v);
        ChannelWalk walk(i * N, channels, spatial);
#pragma unroll
        for (int k = 0; k < N; ++k, walk.next()) {
            if (k == 0 || walk.rest == 0) {
                center = means[walk.channel];
                scale = rsqrtf(variances[walk.channel] + floor) * loaded(weight, walk.channel, 1.0f);
                shift = loaded(bias, walk.channel, 0.0f);
            }
            v[k] = (v[k] - center) * scale + shift;
        }
        store<T, N>(y + i * N, v);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    channel_sums(const T* dy, const T* x, const float* mean, const float* rstd, float* partial, i64 batch, i64 channels,
                 i64 spatial, i64 per_slice) {
    const i64 slice = blockIdx.y, begin = slice * per_slice, end = min(begin + per_slice, batch);
    PairSum::State s = PairSum::identity();
    const bool planar = spatial > 1;
    const i64 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const i64 channel = planar ? static_cast<i64>(blockIdx.x) : static_cast<i64>(blockIdx.x) * kWarp + lane;
    if (channel < channels) {
        const float center = mean[channel], inverse = rstd[channel];
        const i64 count = planar ? (end - begin) * spatial : end - begin;
        i64 entry = begin + (planar ? threadIdx.x / spatial : warp), at = planar ? threadIdx.x % spatial : 0;
        const i64 entries = planar ? kReduceThreads / spatial : kReduceThreads / kWarp;
        const i64 rest = planar ? kReduceThreads % spatial : 0;
        for (i64 i = planar ? threadIdx.x : warp; i < count; i += planar ? kReduceThreads : kReduceThreads / kWarp) {
            const i64 address = (entry * channels + channel) * spatial + at;
            const float g = loaded(dy, address, 0.0f), v = loaded(x, address, 0.0f);
            s.a += g * ((v - center) * inverse), s.b += g;
            entry += entries, at += rest;
            if (at >= spatial) at -= spatial, ++entry;
        }
    }
    if (planar) {
        s = combined<PairSum>(s, kReduceThreads);
        if (threadIdx.x != 0) return;
    } else {
        __shared__ PairSum::State sums[kReduceThreads];
        sums[threadIdx.x] = s;
        __syncthreads();
        if (warp != 0 || channel >= channels) return;
        for (int w = 1; w < kReduceThreads / kWarp; ++w) s = PairSum::combine(s, sums[w * kWarp + lane]);
    }
    partial[slice * 2 * channels + channel] = s.a;
    partial[(slice * 2 + 1) * channels + channel] = s.b;
}

// dx = weight * rstd * (dy - mean(dy) - z * mean(dy * z)); with fixed statistics (`over` = 0) the means are left out.
template <typename T, typename W, int N>
__global__ void __launch_bounds__(kReduceThreads)
    batch_norm_bwd(const T* dy, const T* x, const W* weight, const float* mean, const float* rstd, const float* sums, T* dx,
                   i64 vectors, i64 channels, i64 spatial, double over) {
    const float share = static_cast<float>(over);
    const i64 step = static_cast<i64>(gridDim.x) * kReduceThreads;
    for (i64 i = static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x; i < vectors; i += step) {
        float g[N], v[N], center = 0.0f, inverse = 0.0f, scale = 0.0f, first = 0.0f, second = 0.0f;
        load_stream<T, N>(dy + i * N, g);
        load_stream<T, N>(x + i * N, v);
        ChannelWalk walk(i * N, channels, spatial);
#pragma unroll
        for (int k = 0; k < N; ++k, walk.next()) {
            if (k == 0 || walk.rest == 0) {
                center = mean[walk.channel], inverse = rstd[walk.channel];
                scale = inverse * loaded(weight, walk.channel, 1.0f);
                if (share != 0.0f) second = sums[walk.channel] * share, first = sums[channels + walk.channel] * share;
            }
            g[k] = scale * (share == 0.0f ? g[k] : g[k] - first - (v[k] - center) * inverse * second);
        }
        store<T, N>(dx + i * N, g);
    }
}

}  // namespace rtk
