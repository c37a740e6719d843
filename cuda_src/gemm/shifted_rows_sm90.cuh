// Operands of 8-bit elements whose rows are odd multiples of 8 bytes apart, which TMA does not read: in a tensor map of
// pairs of rows, the second one begins 8 bytes early. So odd rows of a stage begin with 8 bytes of the k before, and the
// consumers move them by 8 bytes to the left; the last 8 are the first ones of the next stage. Behind the last of k, even
// rows have 8 bytes of the next row, which become 0. A last row that has no pair is read from memory.
#pragma once
#include "common/pipeline.cuh"
#include "gemm/operand.cuh"
#include "gemm/schedule_sm90.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

template <int ROWS, int COLS, int THREADS>
struct ShiftedRows {
    static constexpr u32 kStageBytes = (ROWS + COLS) * kTileRow;
    static constexpr int kRowPairs = THREADS / 16;  // odd rows that threads move at a time, 8 bytes each

    bool shift_a, shift_b;
    u32 row, place, source;  // this thread's: the first of its even rows; offsets of its 8 bytes, and of what belongs there
    int half;  // of vectors of 16 bytes in a row
    const u8* last[2] = {nullptr, nullptr};  // its 8 bytes of the last row of a and of b, if it has no pair
    Raw<8> prefetched[2] = {};               // its 8 bytes of the next stage
    u32 last_place[2] = {0, 0};

    // Which operands have such rows.
    RTK_DEVICE ShiftedRows(bool a, bool b) : shift_a(a), shift_b(b) {
        const u32 thread = threadIdx.x % THREADS;
        row = thread / 16 * 2, half = static_cast<int>(thread % 16);
        place = (row + 1) * kTileRow + swizzled(row + 1, thread % 16);
        source = (row + 1) * kTileRow + swizzled(row + 1, (thread + 1) % 16);
    }

    // The rows of a thread are multiples of 8 apart, so that all have the same swizzle.
    RTK_DEVICE static u32 swizzled(u32 at_row, u32 at) { return ((at / 2 ^ (at_row & 7)) << 4) + at % 2 * 8; }

    // Called by one thread: loads 128 bytes from k on, of all rows of a tile.
    RTK_DEVICE static void fetch(const ptx::TensorMap& a, const ptx::TensorMap& b, ptx::SharedAddress to,
                                 ptx::SharedAddress full, i32 k, i32 row, i32 n) {
        ptx::tma_load_3d(to, a, full, k, 0, row / 2);
        ptx::tma_load_3d(to + ROWS * kTileRow, b, full, k, 0, n / 2);
    }

    // How much of k is loaded for a tile: a part that ends before the last of k needs 8 bytes of the next stage.
    RTK_DEVICE static i32 loaded_depth(const ProductTile& tile, i32 depth) {
        return tile.depth + (tile.k + tile.depth < depth ? static_cast<i32>(kTileRow) : 0);
    }

    // Called where a tile begins; `last_a`, `last_b`: the rows that have no pair, or null.
    RTK_DEVICE void begin(const ProductTile& tile, const void* last_a, const void* last_b, i32 rows, i32 columns, i32 depth) {
        auto of = [&](int i, const void* from, int at, int limit, u32 first) {
            const bool has = from != nullptr && at < limit && at / 2 % kRowPairs == static_cast<int>(row) / 2;
            last[i] = has ? static_cast<const u8*>(from) + tile.k + 8 * half : nullptr;
            last_place[i] = (first + static_cast<u32>(at)) * kTileRow + swizzled(row, static_cast<u32>(half));
        };
        of(0, last_a, rows - tile.row - 1, ROWS, 0);
        of(1, last_b, columns - tile.n - 1, COLS, ROWS);
        prefetch(0, depth - tile.k);
    }

    RTK_DEVICE void prefetch(i32 k, int valid) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            prefetched[i] = {};
            if (last[i] != nullptr && 8 * half < valid) {
                const uint2 two = *reinterpret_cast<const uint2*>(last[i] + k);
                prefetched[i] = {{two.x, two.y}};
            }
        }
    }

    // Called by all consumers when a stage has arrived, before they multiply it: waits for the next one, too. `k`: of the
    // tile, so far. Ends with a barrier.
    template <int STAGES>
    RTK_DEVICE void move(const Pipeline<STAGES>& pipeline, const PipelineState<STAGES>& at, ptx::SharedAddress stages,
                         const ProductTile& tile, i32 k, i32 depth, int barrier) {
        PipelineState<STAGES> next = at;
        next.advance();
        const bool has_next = k + static_cast<i32>(kTileRow) < loaded_depth(tile, depth);
        if (has_next) pipeline.wait(next);
        const ptx::SharedAddress stage = stages + at.stage * kStageBytes;
        const int valid = depth - tile.k - k;  // bytes of k that there are from here on
        const bool exists = half < 15 || has_next;
        const ptx::SharedAddress from = (half < 15 ? stage : stages + next.stage * kStageBytes) + source;
        if (shift_a) move_rows<ROWS>(stage, from, 0, exists);
        if (shift_b) move_rows<COLS>(stage, from, ROWS * kTileRow, exists);
        if (valid < static_cast<int>(kTileRow) && half == valid / 8) {
#pragma unroll 1
            for (int i = static_cast<int>(row); i < ROWS + COLS; i += 2 * kRowPairs)
                ptx::st_shared_8(stage + i * kTileRow + swizzled(row, static_cast<u32>(half)), Raw<8>{});
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (last[i] != nullptr) ptx::st_shared_8(stage + last_place[i], prefetched[i]);
        prefetch(k + static_cast<i32>(kTileRow), valid - static_cast<int>(kTileRow));
        ptx::fence_async_shared();
        ptx::named_barrier_sync(barrier, THREADS);
    }

   private:
    // The 16 threads of a row are neighbours in a warp.
    template <int COUNT>
    RTK_DEVICE void move_rows(ptx::SharedAddress stage, ptx::SharedAddress from, u32 first, bool exists) const {
        constexpr int kEach = COUNT / (2 * kRowPairs);
        constexpr u32 kStep = 2 * kRowPairs * kTileRow;
        Raw<8> v[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            v[i] = {};
            if (exists) v[i] = ptx::ld_shared_8(from + first + i * kStep);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kEach; ++i) ptx::st_shared_8(stage + place + first + i * kStep, v[i]);
    }
};

}  // namespace rtk
