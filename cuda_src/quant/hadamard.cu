// Block-diagonal Walsh-Hadamard transforms along rows, y = (H x) * norm in fp32 and rounded once, and e4m3 codes of them
// with one scale per row (recipe: common/fp8_scale.cuh; values are not rounded in between).
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "quant/hadamard.cuh"

namespace rtk {

// Dense x and y of `vectors` * 8 elements, a multiple of the block of lanes * 8. Grid: any.
template <typename T, typename Result>
__global__ void __launch_bounds__(256) hadamard(const T* x, Result* y, i64 vectors, i64 lanes, double norm) {
    constexpr int N = kHadamardElements, kInFlight = sizeof(T) == 4 ? 2 : 4;
    const float times = static_cast<float>(norm);
    const i64 width = static_cast<i64>(blockDim.x) * kInFlight;
    for (i64 base = static_cast<i64>(blockIdx.x) * width; base < vectors; base += static_cast<i64>(gridDim.x) * width) {
        RawParts<T, N> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = base + k * static_cast<int>(blockDim.x) + threadIdx.x;
            clear(raw[k]);
            if (at < vectors) raw[k] = load_keep_raw<T, N>(x + at * N);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = base + k * static_cast<int>(blockDim.x) + threadIdx.x;
            float v[N];
            unpack_parts<T, N>(raw[k], v);
            hadamard_block(v, static_cast<int>(lanes));
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] *= times;
            if (at < vectors) store<Result, N>(y + at * N, v);
        }
    }
}

// Dense x [rows, cols], cols <= 32 * threads_per_row and a multiple of the block; threads_per_row is a multiple of
// `lanes`. Grid: any; blocks stride over the rows.
template <typename T>
__global__ void __launch_bounds__(512)
    quantize_fp8_hadamard(const T* x, e4m3* q, float* scale, i64 rows, i64 cols, i64 threads_per_row, i64 lanes,
                          i64 pow2, double norm) {
    constexpr int N = kHadamardElements, kChunks = 4;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const float times = static_cast<float>(norm);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const int end = row < rows ? static_cast<int>(cols) : 0;
        float v[kChunks][N];
        {
            RawParts<T, N> raw[kChunks];
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int column = (c * group.threads + group.thread) * N;
                clear(raw[c]);
                if (column < end) raw[c] = load_keep_raw<T, N>(x + row * cols + column);
            }
#pragma unroll
            for (int c = 0; c < kChunks; ++c) unpack_parts<T, N>(raw[c], v[c]);
        }
        float amax = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            hadamard_block(v[c], static_cast<int>(lanes));
#pragma unroll
            for (int i = 0; i < N; ++i) v[c][i] *= times;
            amax = fmaxf(amax, finite_amax(v[c]));
        }
        amax = group_reduce<MaxNumber, false>(amax, group, scratch, phase);
        const float row_scale = fp8_scale<e4m3>(amax, pow2 != 0);
        const float inverse = __frcp_rn(row_scale);
        if (row < rows && group.thread == 0) scale[row] = row_scale;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * group.threads + group.thread) * N;
            if (column < end) ptx::st<N>(q + row * cols + column, quantized<e4m3>(v[c], inverse));
        }
    }
}

}  // namespace rtk
