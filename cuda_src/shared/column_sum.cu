// out[c] = sum over r of partial[r, c]: the last step of weight gradients. partial is dense fp32 [rows, cols], rows in
// the hundreds at most.
//
// A block owns 32 columns, or 64 if `pairs`; its 8 warps each add every 8th row, then the first warp adds the 8 results
// in order. The blocks are small, and there should be no more of them than SMs, so that all of them can be resident and
// wait while the kernel that writes `partial` still runs. Shared memory: a float for each thread and column of a lane.
#include "common/vec.cuh"
#include "ptx/forget.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kColumnSumWarps = 8;

// Neighbouring columns of a lane.
template <int COLUMNS>
struct alignas(4 * COLUMNS) LaneSums {
    float of[COLUMNS];
};

// Fewer than 2^32 numbers in all.
template <typename T, int COLUMNS>
RTK_DEVICE void add_columns(const float* partial, T* out, u32 rows, u32 cols, u8* memory) {
    using Sums = LaneSums<COLUMNS>;
    constexpr int kInFlight = COLUMNS == 1 ? 17 : 9;  // rows a warp loads at once: all of its 132 / 8, or half
    Sums* const of_warps = reinterpret_cast<Sums*>(memory);
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u32 column = (blockIdx.x * kWarp + lane) * COLUMNS;
    const u32 own_rows = column < cols ? (rows + kColumnSumWarps - 1 - warp) / kColumnSumWarps : 0;
    // First a pass without any row, so that the instructions are already cached when the rows are ready.
    u32 left = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        ptx::forget(left);
        u32 next = warp * cols + column;
        Sums total;
#pragma unroll
        for (float& sum : total.of) sum = 0.0f;
        do {
            Sums part[kInFlight];
#pragma unroll
            for (u32 i = 0; i < kInFlight; ++i) {
#pragma unroll
                for (float& sum : part[i].of) sum = 0.0f;
                if (i < left) part[i] = *reinterpret_cast<const Sums*>(partial + next);
                next += kColumnSumWarps * cols;
            }
            left -= min(left, static_cast<u32>(kInFlight));
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) total.of[c] += part[i].of[c];
            }
        } while (left != 0);
        of_warps[threadIdx.x] = total;
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int w = 1; w < kColumnSumWarps; ++w) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) total.of[c] += of_warps[w * kWarp + lane].of[c];
            }
            if (pass != 0 && column < cols) store<T, COLUMNS>(out + column, total.of);
        }
        if (pass != 0) break;
        __syncthreads();
        left = own_rows;
        ptx::wait_for_previous();
    }
}

template <typename T>
__global__ void __launch_bounds__(kColumnSumWarps* kWarp, 8)
    column_sum(const float* partial, T* out, i64 rows, i64 cols, i64 pairs) {
    extern __shared__ __align__(8) u8 memory[];
    if (pairs) {
        add_columns<T, 2>(partial, out, static_cast<u32>(rows), static_cast<u32>(cols), memory);
    } else {
        add_columns<T, 1>(partial, out, static_cast<u32>(rows), static_cast<u32>(cols), memory);
    }
}

}  // namespace rtk
