// out[c] = sum over r of partial[r, c]: the last step of weight gradients. partial is dense fp32 [rows, cols], rows in
// the hundreds at most.
//
// A block owns 32 columns; its 8 warps each add every 8th row, then the first warp adds the 8 results in order. The
// blocks are small so that they can wait on the multiprocessors while the kernel that makes `partial` still runs.
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kColumnSumWarps = 8;
inline constexpr int kColumnSumInFlight = 17;  // rows a warp asks for at once: all of its 132 / 8

template <typename T>
__global__ void __launch_bounds__(kColumnSumWarps* kWarp)
    column_sum(const float* partial, T* out, i64 rows, i64 cols) {
    __shared__ float lane_sums[kColumnSumWarps][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const i64 column = static_cast<i64>(blockIdx.x) * kWarp + lane;
    const float* next = partial + warp * cols + column;
    float total = 0.0f;
    ptx::wait_for_previous();
    if (column < cols) {
        for (i64 row = warp; row < rows; row += kColumnSumInFlight * kColumnSumWarps) {
            float part[kColumnSumInFlight];
#pragma unroll
            for (int i = 0; i < kColumnSumInFlight; ++i) {
                part[i] = 0.0f;
                if (row + i * kColumnSumWarps < rows) part[i] = next[i * kColumnSumWarps * cols];
            }
            next += kColumnSumInFlight * kColumnSumWarps * cols;
#pragma unroll
            for (int i = 0; i < kColumnSumInFlight; ++i) total += part[i];
        }
    }
    lane_sums[warp][lane] = total;
    __syncthreads();
    if (warp != 0 || column >= cols) return;
    float sum[1] = {0.0f};
#pragma unroll
    for (int w = 0; w < kColumnSumWarps; ++w) sum[0] += lane_sums[w][lane];
    store<T, 1>(out + column, sum);
}

}  // namespace rtk
