// Forward of the gated RMS normalisation of channel groups (norm/group_rms_norm_gate.cuh).
#include "norm/group_rms_norm_gate.cuh"

namespace rtk {

// Forward with the row in registers: thread k of a RowGroup owns the 16-byte vectors k, k + threads, ... (CHUNKS of
// them), so cols <= CHUNKS * VEC * threads_per_row. Grid: over the rows. All three inputs are requested before the
// reduction.
template <typename T, typename W, int CHUNKS>
__global__ void __launch_bounds__(512)
    group_rms_norm_gate_fwd(const T* x, const T* gate, const W* weight, T* y, i64 tokens, i64 inner_size, i64 groups,
                            i64 cols, i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner,
                            i64 y_outer, i64 y_inner, i64 weight_group, i64 threads_per_row, i64 by_groups,
                            i64 by_inner, i64 form, double eps) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const u32 row = blockIdx.x * group.count + group.index;
    const u32 token = divided(row, by_groups);
    const u32 g = row - token * static_cast<u32>(groups);
    const u32 o = divided(token, by_inner);
    const u32 i = token - o * static_cast<u32>(inner_size);
    const int end = token < static_cast<u32>(tokens) ? static_cast<int>(cols) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const i64 channel = g * cols + column;
    x += o * x_outer + i * x_inner + g * x_group + column;
    gate += o * gate_outer + i * gate_inner + channel;

    // One predicate per load: loads behind a branch would wait for the first one of x.
    const int weight_end = weight != nullptr ? end : 0;
    Raw<16> raw[CHUNKS], gates[CHUNKS];
    RawParts<W, VEC> weights[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        if (column + c * pitch < end) raw[c] = load_raw<T, VEC>(x + c * pitch);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(gates[c]);
        if (column + c * pitch < end) gates[c] = load_raw<T, VEC>(gate + c * pitch);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(weights[c]);
        if (column + c * pitch < weight_end)
            weights[c] = load_keep_raw<W, VEC>(weight + g * weight_group + column + c * pitch);
    }
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        float v[VEC];
        unpack<T, VEC>(raw[c], v);
        if (form & kGateFirst) {
            float t[VEC];
            unpack<T, VEC>(gates[c], t);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] *= gate_slope<T>(t[i], form).value;
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) square += v[i] * v[i];
    }
    square = group_reduce<Sum, false>(square, group, scratch, 0);
    const float rstd = inverse_rms(square, cols, eps);
    y += o * y_outer + i * y_inner + channel;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            float v[VEC], t[VEC], w[VEC];
            unpack<T, VEC>(raw[c], v);
            unpack<T, VEC>(gates[c], t);
            unpack_parts<W, VEC>(weights[c], w);
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                v[i] *= (weight != nullptr ? rstd * w[i] : rstd) * gate_slope<T>(t[i], form).value;
            store<T, VEC>(y + c * pitch, v);
        }
    }
}

template <typename T, typename W, int VEC>
RTK_DEVICE void long_groups(const T* x, const T* gate, const void* weights, T* y, i64 tokens, i64 inner_size, i64 groups,
                            i64 cols, i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner, i64 y_outer,
                            i64 y_inner, i64 weight_group, i64 threads_per_row, i64 form, double eps, GroupScratch<1>& scratch) {
    const W* const weight = static_cast<const W*>(weights);
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
        const T* x_row = x + o * x_outer + i * x_inner + g * x_group;
        const T* gate_row = gate + o * gate_outer + i * gate_inner + g * cols;
        T* y_row = y + o * y_outer + i * y_inner + g * cols;
        float square = 0.0f;
#pragma unroll 4
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float v[VEC];
            load_stream<T, VEC>(x_row + column, v);
            if (form & kGateFirst) {
                float t[VEC];
                load_stream<T, VEC>(gate_row + column, t);
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[k] *= gate_slope<T>(t[k], form).value;
            }
#pragma unroll
            for (int k = 0; k < VEC; ++k) square += v[k] * v[k];
        }
        square = group_reduce<Sum, false>(square, group, scratch, phase);
        const float rstd = inverse_rms(square, cols, eps);
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float v[VEC], t[VEC], w[VEC];
            load_stream<T, VEC>(x_row + column, v);
            load_stream<T, VEC>(gate_row + column, t);
            load_gain<W, VEC>(weight, g * weight_group + column, 0.0f, w);
#pragma unroll
            for (int k = 0; k < VEC; ++k) v[k] *= rstd * w[k] * gate_slope<T>(t[k], form).value;
            store<T, VEC>(y_row + column, v);
        }
    }
}

// Forward for groups that do not fit in registers or, without `aligned16`, whose addresses allow only narrow accesses, and
// for any number of tokens: reads x twice. The weight is of T, or fp32.
template <typename T>
__global__ void __launch_bounds__(512, 1)
    group_rms_norm_gate_fwd_long(const T* x, const T* gate, const void* weight, T* y, i64 tokens, i64 inner_size,
                                 i64 groups, i64 cols, i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer,
                                 i64 gate_inner, i64 y_outer, i64 y_inner, i64 weight_group, i64 threads_per_row,
                                 i64 weight_fp32, i64 aligned16, i64 form, double eps) {
    constexpr int N = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
#define RTK_LONG_GROUPS(W, VEC)                                                                                        \
    long_groups<T, W, VEC>(x, gate, weight, y, tokens, inner_size, groups, cols, x_outer, x_inner, x_group, gate_outer, \
                           gate_inner, y_outer, y_inner, weight_group, threads_per_row, form, eps, scratch)
    if (weight_fp32) {
        aligned16 ? RTK_LONG_GROUPS(float, N) : RTK_LONG_GROUPS(float, 1);
    } else {
        aligned16 ? RTK_LONG_GROUPS(T, N) : RTK_LONG_GROUPS(T, 1);
    }
#undef RTK_LONG_GROUPS
}

}  // namespace rtk
