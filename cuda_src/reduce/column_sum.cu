// out[c] = sum over r of partial[r, c]: the last step of weight gradients. partial is dense fp32 [rows, cols], rows in
// the hundreds at most.
//
// A block owns 32 columns; its 32 warps each add every 32nd row, then the first warp adds the 32 results in order.
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(1024) column_sum(const float* partial, T* out, i64 rows, i64 cols) {
    __shared__ float lane_sums[kWarp][kWarp + 1];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const i64 column = static_cast<i64>(blockIdx.x) * kWarp + lane;
    float total = 0.0f;
    ptx::wait_for_previous();
    if (column < cols) {
#pragma unroll 4
        for (i64 row = warp; row < rows; row += kWarp) total += partial[row * cols + column];
    }
    lane_sums[warp][lane] = total;
    __syncthreads();
    if (warp != 0 || column >= cols) return;
    float sum[1] = {0.0f};
#pragma unroll
    for (int w = 0; w < kWarp; ++w) sum[0] += lane_sums[w][lane];
    store<T, 1>(out + column, sum);
}

}  // namespace rtk
