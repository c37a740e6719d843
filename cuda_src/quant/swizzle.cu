// Rearranges one-byte scales [rows, blocks] into blocks of 128 x 4, as block-scaled tensor cores read them, with zeros
// past the last row and column. A thread owns four neighbouring bytes of the result: those of one row in one block of
// 512 bytes, where the four quarters of 32 rows alternate. Grid: words of the result / THREADS.
#include "common/abi.cuh"

namespace rtk {

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    swizzle_scales(const u8* scales, u32* swizzled, i64 rows, i64 blocks, i64 row_stride, i64 across, i64 words) {
    const i64 word = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (word >= words) return;
    const i64 tile = word / 128, down = tile / across;
    const int inside = static_cast<int>(word % 128);
    const i64 row = down * 128 + inside % 4 * 32 + inside / 4, column = (tile - down * across) * 4;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (row < rows && column + i < blocks) found |= static_cast<u32>(scales[row * row_stride + column + i]) << (8 * i);
    swizzled[word] = found;
}

}  // namespace rtk
