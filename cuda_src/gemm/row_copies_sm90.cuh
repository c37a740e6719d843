// Operands of bytes that TMA cannot load: rows that are multiples of 8 bytes and not of 16. A warp of gemm_sm90.cu copies
// them, 8 bytes each lane, to where TMA would put them: 128 bytes of every row, swizzled.
#pragma once
#include "gemm/operand.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

// Called by a warp: bytes `at` and the next 127 of COUNT rows from `first` on; zeros outside of the operand, which has
// `rows` rows of `depth` bytes, `pitch` apart. A lane has the same 8 bytes of every other row.
template <int COUNT>
RTK_DEVICE void copy_rows(ptx::SharedAddress to, const u8* memory, i64 pitch, i32 at, i32 first, i64 rows, i64 depth) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 16, part = lane % 16;
    const int bytes = static_cast<int>(min(max(depth - at - 8 * part, i64{0}), i64{8}));
    const int existing = static_cast<int>(min(rows - first, static_cast<i64>(COUNT))) - row;
    const u8* from = memory + static_cast<i64>(first + row) * pitch + at + 8 * part;
    const u32 step = 2 * static_cast<u32>(pitch);
    to += row * kTileRow + part % 2 * 8;
    const int vector = (part / 2 ^ row) << 4;
#pragma unroll 8
    for (int i = 0; i < COUNT; i += 2, from += step)
        ptx::cp_async_8_partial(to + i * kTileRow + (vector ^ (i & 6) << 4), from, i < existing ? bytes : 0);
}

}  // namespace rtk
