// Operands of 8-bit elements whose rows are odd multiples of 8 bytes apart, which TMA does not read: in a tensor map of
// pairs of rows, the second one begins 8 bytes early. TMA copies 144 bytes of every row to a stage of the ring, rows in
// order; the consumers move the 128 of k to a buffer as wgmma reads it, and zeros behind the last of k, where bytes of the
// next row are. A last row that has no pair is read from memory.
#pragma once
#include "gemm/operand.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

template <int ROWS, int COLS, int THREADS>
struct ShiftedRows {
    static constexpr u32 kRow = kTileRow + 16, kRawBytes = (ROWS + COLS) * kRow, kBufferBytes = (ROWS + COLS) * kTileRow;
    // When a warp has passed the barrier of a stage, others may still multiply the one before: nobody writes to either.
    static constexpr int kBuffers = 3;
    static constexpr int kAtOnce = THREADS / 16;  // rows, of 16 pieces of 8 bytes

    ptx::SharedAddress buffers;
    u32 source_a, source_b, target;  // of this thread's pieces in the first rows
    int piece, buffer = 0;
    const u8* last[2] = {nullptr, nullptr};  // this thread's piece of the last row of a and of b, if it has no pair
    Raw<8> ahead[2] = {};                     // its 8 bytes of the next stage
    u32 last_target[2] = {0, 0};

    // Odd rows of the operands begin `shift_a` and `shift_b` bytes behind those of the tensor map.
    RTK_DEVICE ShiftedRows(ptx::SharedAddress memory, u32 shift_a, u32 shift_b) : buffers(memory) {
        const u32 thread = threadIdx.x % THREADS, row = thread / 16;
        piece = static_cast<int>(thread % 16);
        source_a = row * kRow + 8 * thread % 128 + (row % 2 != 0 ? shift_a : 0);
        source_b = row * kRow + 8 * thread % 128 + (row % 2 != 0 ? shift_b : 0);
        target = row * kTileRow + ((thread % 16 / 2 ^ (row & 7)) << 4) + thread % 2 * 8;
    }

    // Called by one thread: loads 144 bytes from k on, of all rows of a tile.
    RTK_DEVICE static void fetch(const ptx::TensorMap& a, const ptx::TensorMap& b, ptx::SharedAddress to,
                                 ptx::SharedAddress full, i32 k, i32 row, i32 n) {
        ptx::tma_load_3d(to, a, full, k, 0, row / 2);
        ptx::tma_load_3d(to + ROWS * kRow, b, full, k, 0, n / 2);
    }

    // Called where a tile begins, with its first k and the bytes that there are from there on; `last_a`, `last_b`: the rows
    // that have no pair, or null.
    RTK_DEVICE void place(const u8* last_a, const u8* last_b, int rows_left, int columns_left, i32 k, int valid) {
        const int own = static_cast<int>(threadIdx.x) % THREADS / 16;
        auto of = [&](int i, const u8* row, int at, int limit, u32 first) {
            const bool has = row != nullptr && at < limit && at % kAtOnce == own;
            last[i] = has ? row + k + 8 * piece : nullptr;
            last_target[i] = (first + static_cast<u32>(at - own)) * kTileRow;
        };
        of(0, last_a, rows_left - 1, ROWS, 0);
        of(1, last_b, columns_left - 1, COLS, ROWS);
        load_ahead(0, valid);
    }

    RTK_DEVICE void load_ahead(i32 k, int valid) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ahead[i] = {};
            if (last[i] != nullptr && 8 * piece < valid) {
                const uint2 two = *reinterpret_cast<const uint2*>(last[i] + k);
                ahead[i] = {{two.x, two.y}};
            }
        }
    }

    // Called by all consumers when a stage at `raw` has arrived: returns the buffer with its rows. `k`: of the tile, so far;
    // `valid`: bytes of k that there are from there on. Ends with a barrier.
    RTK_DEVICE ptx::SharedAddress move(ptx::SharedAddress raw, i32 k, int valid, int barrier) {
        buffer = buffer + 1 == kBuffers ? 0 : buffer + 1;
        const ptx::SharedAddress to = buffers + buffer * kBufferBytes;
        const bool exists = 8 * piece < valid;
        auto rows = [&](ptx::SharedAddress from, ptx::SharedAddress into) {
            Raw<8> v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = ptx::ld_shared_8(from + i * kAtOnce * kRow);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                ptx::st_shared_8(into + i * kAtOnce * kTileRow, exists ? v[i] : Raw<8>{});
        };
#pragma unroll
        for (int first = 0; first < ROWS; first += 8 * kAtOnce) rows(raw + source_a + first * kRow, to + target + first * kTileRow);
#pragma unroll
        for (int first = 0; first < COLS; first += 8 * kAtOnce)
            rows(raw + source_b + (ROWS + first) * kRow, to + target + (ROWS + first) * kTileRow);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (last[i] != nullptr) ptx::st_shared_8(to + target + last_target[i], ahead[i]);
        load_ahead(k + static_cast<i32>(kTileRow), valid - static_cast<int>(kTileRow));
        ptx::fence_async_shared();
        ptx::named_barrier_sync(barrier, THREADS);
        return to;
    }
};

}  // namespace rtk
