// Quantises z = x * factor to e4m3 with one scale per row, with one factor per column ("smooth" quantisation). Recipe:
// common/fp8_scale.cuh. Optionally also the largest finite |x| of each column per thread group, for calibration.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "common/amax.cuh"

namespace rtk {

// Rows in registers: a thread owns accesses thread, thread + threads, ... (four of them); x_cols <= 4 * N * threads. x
// [rows, x_cols] can be read 16 bytes at a time, and so can factor [.., x_cols]; the first q_cols columns are
// quantised, the rest is zeros. With `expert`, row r uses the factors of line expert[r]. With CALIBRATE, `partial` gets
// a row of x_cols maxima per thread group of the grid. Grid: any, blocks stride over the rows; without CALIBRATE, one
// row per group.
template <typename T, bool CALIBRATE>
__global__ void __launch_bounds__(512, CALIBRATE ? 1 : 2)
    quantize_fp8_smooth(const T* x, const float* factor, const i32* expert, e4m3* q, float* scale, float* partial, i64 rows,
                        i64 x_cols, i64 x_stride, i64 q_cols, i64 threads_per_row, i64 pow2, i64 evict_first) {
    constexpr int N = 16 / sizeof(T), kChunks = 4;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const bool whole = q_cols == x_cols;
    const u64 policy = ptx::l2_policy(evict_first != 0);
    u32 words[kChunks][4];
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (u32& word : words[c]) word = 0;
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const int end = row < rows ? static_cast<int>(x_cols) : 0;
        const T* from = x + row * x_stride;
        const float* factors = factor + (expert != nullptr && row < rows ? expert[row] * x_cols : 0);
        Raw<16> raw[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * group.threads + group.thread) * N;
            clear(raw[c]);
            if (column < end) raw[c] = load_raw<T, N>(from + column, policy);
        }
        float amax = 0.0f, v[kChunks][N];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * group.threads + group.thread) * N;
#pragma unroll
            for (int i = 0; i < N; ++i) v[c][i] = 0.0f;
            if (column < end) {
                float times[N];
                load_keep<float, N>(factors + column, times);
                unpack<T, N>(raw[c], v[c]);
#pragma unroll
                for (int i = 0; i < N; ++i) v[c][i] *= times[i];
                amax = fmaxf(amax, finite_amax(v[c]));
            }
        }
        amax = group_reduce<MaxNumber, false>(amax, group, scratch, phase);
        const float row_scale = fp8_scale<e4m3>(amax, pow2 != 0);
        const float inverse = __frcp_rn(row_scale);
        if (row < rows && group.thread == 0) scale[row] = row_scale;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * group.threads + group.thread) * N;
            if (column < end) {
                const Raw<N> codes = quantized<e4m3>(v[c], inverse);
                e4m3* place = q + row * q_cols + column;
                if (whole) {
                    ptx::st<N>(place, codes);
                } else {
#pragma unroll
                    for (int i = 0; i < N; ++i)
                        if (column + i < q_cols) ptx::st<1>(place + i, Raw<1>{(codes.w[i / 4] >> (i % 4 * 8)) & 0xffu});
                }
            }
        }
        if constexpr (!CALIBRATE) return;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                words[c][w] = WordMax<T>::larger(words[c][w], WordMax<T>::finite(raw[c].w[w]));
    }
    float* to = partial + (static_cast<i64>(blockIdx.x) * group.count + group.index) * x_cols;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * group.threads + group.thread) * N;
        if (column >= x_cols) continue;
        float max_abs[N];
        unpack<T, N>(Raw<16>{words[c][0], words[c][1], words[c][2], words[c][3]}, max_abs);
        store<float, N>(to + column, max_abs);
    }
}

}  // namespace rtk
