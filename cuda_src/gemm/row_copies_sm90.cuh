// Operands of bytes that TMA cannot load: rows that are multiples of 8 bytes and not of 16. Two warps of gemm_sm90.cu copy
// them, 8 bytes each thread, to where TMA would put them: 128 bytes of every row, swizzled.
#pragma once
#include "gemm/operand.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

struct RowCopies {
    static constexpr int kThreads = 2 * kWarp, kTogether = kThreads / 16;  // rows at a time
    const u8* memory;
    i64 pitch, rows, depth;  // bytes from row to row; of the whole operand

    // Bytes `at` and the next 127 of COUNT rows from `first` on; zeros outside of the operand. A thread has the same 8
    // bytes of every fourth row, and two places in the swizzle.
    template <int COUNT>
    RTK_DEVICE void copy(ptx::SharedAddress to, i32 at, i32 first, int thread) const {
        const int row = thread / 16, part = thread % 16;
        const int bytes = static_cast<int>(min(max(depth - at - 8 * part, i64{0}), i64{8}));
        const int existing = static_cast<int>(min(rows - first, static_cast<i64>(COUNT))) - row;
        const u8* from = memory + static_cast<i64>(first + row) * pitch + at + 8 * part;
        to += row * kTileRow + part % 2 * 8;
#pragma unroll 4
        for (int i = 0; i < COUNT / kTogether; ++i, from += kTogether * pitch)
            ptx::cp_async_8_partial(to + i * (kTogether * kTileRow) + ((part / 2 ^ row ^ i % 2 * kTogether) << 4), from,
                                    kTogether * i < existing ? bytes : 0);
    }
};

}  // namespace rtk
