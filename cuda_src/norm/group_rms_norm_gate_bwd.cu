// Backward of the gated normalisation of groups of channels (norm/group_rms_norm_gate.cuh).
#include "common/block_sums.cuh"
#include "common/row_ring.cuh"
#include "norm/group_rms_norm_gate.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Backward. With a = dy * w * s, the gradient of n:
//     dx = rstd * a - x * rstd^3 * mean(a * x),  dgate = n * a * (1 - s),  dweight = sum over tokens of dy * s * n.
// rstd is recomputed: x is read anyway, and the two row sums share one reduction.
//
// Persistent, for groups of at most CHUNKS * VEC * blockDim channels. A block works on groups_per_block groups of several
// tokens at once: RowGroup u has token lane u / groups_per_block and always the same group, so weights and their
// gradients stay in registers. Rows arrive through a RowRing. Grid: x over tokens, y over slices of the groups. Weight
// gradients are summed over the block in shared memory and written as one fp32 row per block (`partial`; null when not
// wanted) for column_sum to add up: [gridDim.x, groups * cols], or [gridDim.y * gridDim.x, cols] for a shared weight. The
// order is fixed by the grid, never by timing.
//
// Pointers walk along with the tokens: by *_step for the next token of a RowGroup, and by *_wrap more when its inner
// index, which grows by inner_step, passes inner_size.
template <typename T, typename W, int CHUNKS, int STAGES>
__global__ void __launch_bounds__(512, 1)
    group_rms_norm_gate_bwd(const T* dy, const T* x, const T* gate, const W* weight, T* dx, T* dgate, float* partial,
                            i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner, i64 dy_step,
                            i64 dy_wrap, i64 x_outer, i64 x_inner, i64 x_step, i64 x_wrap, i64 x_group, i64 gate_outer,
                            i64 gate_inner, i64 gate_step, i64 gate_wrap, i64 dgate_outer, i64 dgate_inner,
                            i64 dgate_step, i64 dgate_wrap, i64 dx_outer, i64 dx_inner, i64 dx_step, i64 dx_wrap,
                            i64 inner_step, i64 weight_group, i64 groups_per_block, i64 tokens_at_once, i64 threads_per_row,
                            i64 by_inner, i64 by_slice, double eps) {
    constexpr int VEC = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    RowRing<3, CHUNKS, STAGES> ring(memory);
    ptx::launch_dependents();
    const u32 slice = static_cast<u32>(groups_per_block);
    const u32 lanes = static_cast<u32>(tokens_at_once);
    const u32 lane = divided(group.index, by_slice);
    const u32 g = blockIdx.y * slice + (group.index - lane * slice);
    const u32 last = static_cast<u32>(tokens), inner = static_cast<u32>(inner_size);
    const u32 step = gridDim.x * lanes;
    // RowGroups without a group or a lane of their own stand past the last token.
    const u32 first = lane < lanes && g < groups ? blockIdx.x * lanes + lane : last;
    const float epsilon = static_cast<float>(eps);
    const float inverse = 1.0f / static_cast<float>(cols);
    const int pitch = group.threads * VEC;
    const int end = static_cast<int>(cols);
    const int column = group.thread * VEC;

    // This thread's first channel of the next row to fetch, and to store.
    const i64 channel = g * cols + column;
    const u32 o = divided(first, by_inner);
    u32 fetched_i = first - o * inner, stored_i = fetched_i;
    dy += o * dy_outer + fetched_i * dy_inner + channel;
    x += o * x_outer + fetched_i * x_inner + g * x_group + column;
    gate += o * gate_outer + fetched_i * gate_inner + channel;
    dgate += o * dgate_outer + fetched_i * dgate_inner + channel;
    dx += o * dx_outer + fetched_i * dx_inner + channel;
    auto wraps = [&](u32& i) {
        i += static_cast<u32>(inner_step);
        const bool over = i >= inner;
        if (over) i -= inner;
        return over;
    };
    u32 fetched = first;
    auto fetch = [&] {
        if (fetched < last) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (column + c * pitch < end) {
                    ring.copy(0, c, dy + c * pitch);
                    ring.copy(1, c, x + c * pitch);
                    ring.copy(2, c, gate + c * pitch);
                }
            }
        }
        ring.commit();
        fetched += step;
        const bool over = wraps(fetched_i);
        dy += over ? dy_step + dy_wrap : dy_step;
        x += over ? x_step + x_wrap : x_step;
        gate += over ? gate_step + gate_wrap : gate_step;
    };

    // RowGroups that run out of rows go on reading their slots while others of the warp work: all must hold something.
    const bool few = first + (STAGES - 1) * step >= last;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (few || column + c * pitch >= end) ring.zero(memory, c);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch();
    float w[CHUNKS][VEC], dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) w[c][i] = dweight[c][i] = 0.0f;
        if (g < groups && column + c * pitch < end)
            load_gain<W, VEC>(weight, g * weight_group + column + c * pitch, 0.0f, w[c]);
    }

    int phase = 0;
    u32 token = first;
    for (u32 base = blockIdx.x * lanes; base < last; base += step, token += step, phase ^= 1) {
        fetch();
        ring.wait();
        float opened[CHUNKS][VEC], closed[CHUNKS][VEC];  // dy * s, 1 - s
        float square = 0.0f, product = 0.0f;             // sums of x^2 and a * x
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float v[VEC];
            ring.template read<T>(0, c, opened[c]);
            ring.template read<T>(1, c, v);
            ring.template read<T>(2, c, closed[c]);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const Gate s = gate_at<T>(closed[c][i]);
                opened[c][i] *= s.open;
                closed[c][i] = s.closed;
                square += v[i] * v[i];
                product += opened[c][i] * w[c][i] * v[i];
            }
        }
        group_reduce_pair<Sum, true>(square, product, group, scratch, phase);
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        if (token < last) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float v[VEC], to_gate[VEC];
                ring.template read<T>(1, c, v);  // again: to keep it would cost the registers of the weights
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float n = v[i] * rstd;
                    const float a = opened[c][i] * w[c][i];
                    dweight[c][i] += opened[c][i] * n;
                    to_gate[i] = a * n * closed[c][i];
                    v[i] = a * rstd - v[i] * pull;
                }
                if (column + c * pitch < end) {
                    store<T, VEC>(dx + c * pitch, v);
                    store<T, VEC>(dgate + c * pitch, to_gate);
                }
            }
        }
        const bool over = wraps(stored_i);
        dx += over ? dx_step + dx_wrap : dx_step;
        dgate += over ? dgate_step + dgate_wrap : dgate_step;
        ring.next_row();
    }

    if (partial == nullptr) return;
    const bool shared = weight_group == 0;
    if (lanes == 1 && !shared) {  // nothing to add
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (first < last && column + c * pitch < end)
                store<float, VEC>(partial + blockIdx.x * (groups * cols) + channel + c * pitch, dweight[c]);
        return;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);  // [RowGroups, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (column + c * pitch < end) put_sums(sums + group.index * end + column + c * pitch, dweight[c]);
    __syncthreads();
    const u32 first_group = blockIdx.y * slice;
    const u32 own_groups = min(slice, static_cast<u32>(groups) - first_group);
    const int width = shared ? end : own_groups * end;
    const int terms = shared ? lanes * slice : lanes, apart = shared ? end : slice * end;
    partial += shared ? (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * cols
                      : blockIdx.x * (groups * cols) + first_group * cols;
    add_rows(sums, terms, apart, width, partial);
}

// Backward for groups that do not fit in registers or allow only narrow accesses, and for any number of tokens: reads
// its inputs twice and leaves rstd of every row (fp32, [tokens, groups]; null when not wanted) for
// group_rms_norm_gate_bwd_weight.
template <typename T, typename W, int VEC>
__global__ void __launch_bounds__(512, 1)
    group_rms_norm_gate_bwd_long(const T* dy, const T* x, const T* gate, const W* weight, T* dx, T* dgate,
                                 float* rstd_out, i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer,
                                 i64 dy_inner, i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner,
                                 i64 dgate_outer, i64 dgate_inner, i64 dx_outer, i64 dx_inner, i64 weight_group,
                                 i64 threads_per_row, double eps) {
    __shared__ GroupScratch<1> scratch, product_scratch;
    const RowGroup group(threads_per_row);
    const i64 rows = tokens * groups;
    const i64 pitch = group.threads * VEC;
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 token = row / groups, g = row % groups;
        const i64 o = token / inner_size, i = token % inner_size;
        const T* dy_row = dy + o * dy_outer + i * dy_inner + g * cols;
        const T* x_row = x + o * x_outer + i * x_inner + g * x_group;
        const T* gate_row = gate + o * gate_outer + i * gate_inner + g * cols;
        T* dgate_row = dgate + o * dgate_outer + i * dgate_inner + g * cols;
        T* dx_row = dx + o * dx_outer + i * dx_inner + g * cols;
        float square = 0.0f, product = 0.0f;  // x^2, a * x
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float d[VEC], v[VEC], t[VEC], w[VEC];
            load_stream<T, VEC>(dy_row + column, d);
            load_stream<T, VEC>(x_row + column, v);
            load_stream<T, VEC>(gate_row + column, t);
            load_gain<W, VEC>(weight, g * weight_group + column, 0.0f, w);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                square += v[k] * v[k];
                product += d[k] * gate_at<T>(t[k]).open * w[k] * v[k];
            }
        }
        square = group_reduce<Sum, false>(square, group, scratch, phase);
        product = group_reduce<Sum, false>(product, group, product_scratch, phase);
        const float rstd = inverse_rms(square, cols, eps);
        const float pull = product / static_cast<float>(cols) * rstd * rstd * rstd;
        if (rstd_out != nullptr && row < rows && group.thread == 0) rstd_out[row] = rstd;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float d[VEC], v[VEC], t[VEC], w[VEC];
            load_stream<T, VEC>(dy_row + column, d);
            load_stream<T, VEC>(x_row + column, v);
            load_stream<T, VEC>(gate_row + column, t);
            load_gain<W, VEC>(weight, g * weight_group + column, 0.0f, w);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const Gate s = gate_at<T>(t[k]);
                const float a = d[k] * s.open * w[k];
                t[k] = a * (v[k] * rstd) * s.closed;
                v[k] = a * rstd - v[k] * pull;
            }
            store<T, VEC>(dx_row + column, v);
            store<T, VEC>(dgate_row + column, t);
        }
    }
}

// Partial weight gradients to go with it: block (x, y) sums dy * s * n over every gridDim.y-th token for the
// blockDim.x * VEC channels it owns, into row y of `partial` [gridDim.y, groups * cols].
template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    group_rms_norm_gate_bwd_weight(const T* dy, const T* x, const T* gate, const float* rstd, float* partial,
                                   i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner,
                                   i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner) {
    const i64 channel = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (channel >= groups * cols) return;
    const i64 g = channel / cols;
    const i64 x_channel = g * x_group + channel % cols;
    float total[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) total[k] = 0.0f;
    for (i64 token = blockIdx.y; token < tokens; token += gridDim.y) {
        const i64 o = token / inner_size, i = token % inner_size;
        float d[VEC], v[VEC], t[VEC];
        load_stream<T, VEC>(dy + o * dy_outer + i * dy_inner + channel, d);
        load_stream<T, VEC>(x + o * x_outer + i * x_inner + x_channel, v);
        load_stream<T, VEC>(gate + o * gate_outer + i * gate_inner + channel, t);
        const float scale = rstd[token * groups + g];
#pragma unroll
        for (int k = 0; k < VEC; ++k) total[k] += d[k] * gate_at<T>(t[k]).open * (v[k] * scale);
    }
    store<float, VEC>(partial + blockIdx.y * (groups * cols) + channel, total);
}

}  // namespace rtk
