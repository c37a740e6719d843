// e4m3 codes of permuted rows with one scale per row: z[r] = x[t] * scale[t] * factor[e], where row r is token t's
// choice of expert e. Recipe: common/fp8_scale.cuh; every product is rounded. Optionally also the dot product of x[t] *
// scale[t] with row r of another matrix.
#include "common/reduce.cuh"
#include "moe/rows.cuh"
#include "common/amax.cuh"

namespace rtk {

// A RowGroup owns one row and keeps it in registers: a thread has accesses thread, thread + threads, ... (four of
// them); cols <= 4 * N * threads. x [tokens, cols], factor [experts, cols] and others [rows, cols] can be read 16 bytes
// (N elements, or 8 bytes of fp8) at a time. Rows that no choice fills are zeros. scales: number of scales per token,
// each for cols / scales columns, a multiple of N; 0: none. Grid: rows / groups per block.
template <typename T>
__global__ void __launch_bounds__(512)
    moe_permute_smooth(const T* x, const i32* slots, const i32* experts, const float* scale, const float* factor,
                       const T* others, e4m3* q, float* scale_out, float* dots, i64 rows, i64 cols, i64 x_stride,
                       i64 choices, i64 divisor, i64 expert_count, i64 scales, i64 scale_cols, i64 threads_per_row,
                       i64 pow2) {
    constexpr int N = sizeof(T) == 4 ? 4 : 8, kChunks = 4;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const int row = static_cast<int>(blockIdx.x) * group.count + group.index;
    i32 token = -1, expert = -1;
    if (row < rows) {
        const u32 slot = ptx::ld_keep<4>(slots + row).w[0];
        if (slot < static_cast<u32>(choices)) {
            expert = static_cast<i32>(ptx::ld_keep<4>(experts + slot).w[0]);
            if (static_cast<u32>(expert) < static_cast<u32>(expert_count)) token = static_cast<i32>(divided(slot, divisor));
        }
    }
    const int end = token >= 0 ? static_cast<int>(cols) : 0;
    const T* from = x + token * x_stride;
    Raw<sizeof(T) * N> raw[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * group.threads + group.thread) * N;
        clear(raw[c]);
        if (column < end) raw[c] = load_raw<T, N>(from + column);
    }
    const float only = scales == 1 && token >= 0 ? scale[token] : 1.0f;
    auto plain = [&](int c, int column, float (&v)[N]) {
        unpack<T, N>(raw[c], v);
        if (scales == 0) return;
        float times = only;
        if (scales > 1) times = scale[token * scales + column / static_cast<int>(scale_cols)];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= times;
    };
    auto smoothed = [&](int c, int column, float (&v)[N]) {
        float times[N];
        load_keep<float, N>(factor + expert * cols + column, times);
        plain(c, column, v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= times[i];
    };
    if (others != nullptr) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * group.threads + group.thread) * N;
            if (column < end) {
                float v[N], w[N];
                load_stream<T, N>(others + row * cols + column, w);
                plain(c, column, v);
#pragma unroll
                for (int i = 0; i < N; ++i) dot = fmaf(v[i], w[i], dot);
            }
        }
        dot = group_reduce<Sum, false>(dot, group, scratch, 1);
        if (row < rows && group.thread == 0) dots[row] = dot;
    }
    float amax = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * group.threads + group.thread) * N;
        if (column < end) {
            float v[N];
            smoothed(c, column, v);
            amax = fmaxf(amax, finite_amax(v));
        }
    }
    amax = group_reduce<MaxNumber, false>(amax, group, scratch, 0);
    const float own = fp8_scale<e4m3>(amax, pow2 != 0), inverse = __frcp_rn(own);
    if (row >= rows) return;
    if (group.thread == 0) scale_out[row] = own;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * group.threads + group.thread) * N;
        if (column >= cols) continue;
        Raw<N> codes;
        clear(codes);
        if (column < end) {
            float v[N];
            smoothed(c, column, v);
            codes = quantized<e4m3>(v, inverse);
        }
        ptx::st<N>(q + row * cols + column, codes);
    }
}

}  // namespace rtk
