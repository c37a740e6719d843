// total[c] += sum over rows r of dy[r, c], or of dy[r, c] (x[r, c] - mean[r]) rstd[r]: gradients of biases and of the
// weights of norms, in an order that does not depend on how the rows are cut into calls, if every cut is at a multiple
// of `block_rows` rows.
//
// Numerics: fp32. In a block of rows, each of 8 warps adds every 8th row, then their sums are added in order. Blocks
// are added to `total` one after the other. All orders depend on `block_rows` only, never on the number of columns that
// a thread has.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kBlockSumWarps = 8;

// mean[r] and rstd[r] of the rows of x; without `mean`, rstd is that of the mean square. One warp per row.
template <typename T>
__global__ void __launch_bounds__(kBlockSumWarps* kWarp)
    row_statistics(const T* x, float* mean, float* rstd, i64 rows, i64 cols, i64 x_stride, double eps) {
    const i64 row = static_cast<i64>(blockIdx.x) * kBlockSumWarps + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ptx::wait_for_previous();
    if (row >= rows) return;
    x += row * x_stride;
    float centre = 0.0f;
    if (mean != nullptr) {
        for (i64 c = lane; c < cols; c += kWarp) {
            float v[1];
            load_keep<T, 1>(x + c, v);
            centre += v[0];
        }
        centre = warp_reduce<Sum>(centre) / static_cast<float>(cols);
    }
    float squares = 0.0f;
    for (i64 c = lane; c < cols; c += kWarp) {
        float v[1];
        load_keep<T, 1>(x + c, v);
        squares += (v[0] - centre) * (v[0] - centre);
    }
    squares = warp_reduce<Sum>(squares) / static_cast<float>(cols);
    if (lane != 0) return;
    if (mean != nullptr) mean[row] = centre;
    rstd[row] = 1.0f / sqrtf(squares + static_cast<float>(eps));
}

// partial[b, c]: the sums of block b of the rows. A lane has VEC neighbouring columns. x, mean: null if absent.
template <typename T, int VEC>
__global__ void __launch_bounds__(kBlockSumWarps* kWarp)
    block_sum(const T* dy, const T* x, const float* mean, const float* rstd, float* partial, i64 rows, i64 cols,
              i64 dy_stride, i64 x_stride, i64 block_rows) {
    __shared__ float of_warps[kBlockSumWarps][kWarp * VEC];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 first_column = static_cast<i64>(blockIdx.x) * kWarp * VEC, column = first_column + lane * VEC;
    const i64 blocks = (rows + block_rows - 1) / block_rows;
    ptx::wait_for_previous();
    for (i64 block = blockIdx.y; block < blocks; block += gridDim.y) {
        float sum[VEC];
#pragma unroll
        for (float& one : sum) one = 0.0f;
        const i64 end = min((block + 1) * block_rows, rows);
        if (column < cols) {
#pragma unroll 4
            for (i64 row = block * block_rows + warp; row < end; row += kBlockSumWarps) {
                float g[VEC];
                load_keep<T, VEC>(dy + row * dy_stride + column, g);
                if (x != nullptr) {
                    float h[VEC];
                    load_keep<T, VEC>(x + row * x_stride + column, h);
                    const float centre = mean != nullptr ? mean[row] : 0.0f, scale = rstd[row];
#pragma unroll
                    for (int i = 0; i < VEC; ++i) g[i] *= (h[i] - centre) * scale;
                }
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum[i] += g[i];
            }
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) of_warps[warp][lane * VEC + i] = sum[i];
        __syncthreads();
        const int own = static_cast<int>(threadIdx.x);
        if (own < kWarp * VEC && first_column + own < cols) {
            float all = of_warps[0][own];
#pragma unroll
            for (int w = 1; w < kBlockSumWarps; ++w) all += of_warps[w][own];
            partial[block * cols + first_column + own] = all;
        }
        __syncthreads();
    }
}

// total[c] = (total[c] + partial[0, c]) + partial[1, c] + ..., in this order.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) block_sum_add(const float* partial, float* total, i64 blocks, i64 cols) {
    constexpr int kInFlight = 16;
    const i64 column = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    ptx::wait_for_previous();
    if (column >= cols) return;
    float sum = total[column];
    for (i64 first = 0; first < blocks; first += kInFlight) {
        float part[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) part[i] = first + i < blocks ? partial[(first + i) * cols + column] : 0.0f;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i < blocks) sum += part[i];
    }
    total[column] = sum;
}

}  // namespace rtk
