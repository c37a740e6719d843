// Operands of 8-bit elements whose rows are odd multiples of 8 bytes apart, which TMA does not read: in a tensor map of
// pairs of rows, the second one begins 8 bytes early. So odd rows of a stage begin with 8 bytes of the k before, and two
// warps beside the producer move them by 8 bytes to the left before the consumers multiply; the last 8 are the first ones of
// the next stage. Behind the last of k, even rows have 8 bytes of the next row, which become 0. A last row that has no
// pair is copied from memory, by way of slots that belong to one thread each.
//
// A stage goes from the producer (`full`) to the movers, from them (`ready`) to the consumers, and back (`empty`). The
// movers pass `ready` on for every use of a stage, moved or not, and read the next stage before they pass on this one, so
// no stage is filled again while they read it.
#pragma once
#include "common/pipeline.cuh"
#include "gemm/operand.cuh"
#include "gemm/schedule_sm90.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

template <int ROWS, int COLS, int STAGES>
struct ShiftedRows {
    static constexpr u32 kStageBytes = (ROWS + COLS) * kTileRow;
    static constexpr int kThreads = 2 * kWarp, kRowPairs = kThreads / 16;  // odd rows that threads move at a time, 8 bytes each
    static constexpr int kPrefetched = 3;  // stages by which rows without a pair are asked for in advance
    static constexpr u32 kSlots = 8 * STAGES, kSlotBytes = 2 * kTileRow;  // behind the barriers
    using State = PipelineState<STAGES>;

    ptx::SharedAddress ready;  // barriers, one of each stage, then the slots
    u32 row = 0, place = 0, source = 0;  // this thread's: the first of its even rows; offsets of its 8 bytes, and of what belongs there
    int half = 0;                        // of vectors of 16 bytes in a row
    const u8* last[2] = {nullptr, nullptr};  // its 8 bytes of the last row of a and of b, if it has no pair
    u32 last_place[2] = {0, 0};

    RTK_DEVICE explicit ShiftedRows(ptx::SharedAddress barriers) : ready(barriers) {}

    // Called by one thread, before Pipeline::init.
    RTK_DEVICE void init() const {
        for (int stage = 0; stage < STAGES; ++stage) ptx::mbarrier_init(ready + 8 * stage, kThreads / kWarp);
    }

    // Called by the consumers, after they have waited for the producer.
    RTK_DEVICE void wait(const State& at) const { ptx::mbarrier_wait(ready + 8 * at.stage, at.phase); }

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

    // Called by the movers: which of the 16 places of a row, and which rows, a thread has.
    RTK_DEVICE void begin() {
        const u32 thread = threadIdx.x % kThreads;
        row = thread / 16 * 2, half = static_cast<int>(thread % 16);
        place = (row + 1) * kTileRow + swizzled(row + 1, thread % 16);
        source = (row + 1) * kTileRow + swizzled(row + 1, (thread + 1) % 16);
    }

    // Called by the movers for each tile: moves its stages and passes them on. `last_a`, `last_b`: the rows that have no
    // pair, or null; `shift_a`, `shift_b`: which operands have such rows.
    RTK_DEVICE void move_tile(const Pipeline<STAGES>& pipeline, State& state, ptx::SharedAddress stages, const ProductTile& tile,
                              const void* last_a, const void* last_b, i32 rows, i32 columns, i32 depth, bool shift_a,
                              bool shift_b) {
        begin_last(0, last_a, tile, rows - tile.row - 1, ROWS, 0);
        begin_last(1, last_b, tile, columns - tile.n - 1, COLS, ROWS);
        const i32 valid = depth - tile.k, loaded = loaded_depth(tile, depth);  // bytes of k: that there are, and that come
        for (int i = 0; i < kPrefetched; ++i) ask(i, valid);
        int step = 0;
#pragma unroll 1
        for (i32 k = 0; k < tile.depth; k += static_cast<i32>(kTileRow), ++step, state.advance()) {
            State next = state;
            next.advance();
            const bool has_next = k + static_cast<i32>(kTileRow) < loaded;
            pipeline.wait(state);
            if (has_next) pipeline.wait(next);
            const ptx::SharedAddress stage = stages + state.stage * kStageBytes;
            const ptx::SharedAddress from = (half < 15 ? stage : stages + next.stage * kStageBytes) + source;
            const bool exists = half < 15 || has_next;
            if (shift_a) move_rows<ROWS>(stage, from, 0, exists);
            if (shift_b) move_rows<COLS>(stage, from, ROWS * kTileRow, exists);
            if (valid - k < static_cast<i32>(kTileRow) && half == (valid - k) / 8) {
#pragma unroll 1
                for (int i = static_cast<int>(row); i < ROWS + COLS; i += 2 * kRowPairs)
                    ptx::st_shared_8(stage + i * kTileRow + swizzled(row, static_cast<u32>(half)), Raw<8>{});
            }
            ask(step + kPrefetched, valid);
            ptx::cp_async_wait<kPrefetched>();
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (last[i] != nullptr) ptx::st_shared_8(stage + last_place[i], ptx::ld_shared_8(slot(i, step)));
            ptx::fence_async_shared();
            pass_on(state);
        }
        ptx::cp_async_wait<0>();  // the next tile uses the same slots
        if (tile.depth < loaded) {
            pass_on(state);
            state.advance();
        }
    }

   private:
    RTK_DEVICE ptx::SharedAddress slot(int operand, int step) const {
        return ready + kSlots + static_cast<u32>(step % (kPrefetched + 1)) * kSlotBytes + operand * kTileRow + 8 * half;
    }

    RTK_DEVICE void begin_last(int i, const void* from, const ProductTile& tile, int at, int limit, u32 first) {
        const bool has = from != nullptr && at < limit && at / 2 % kRowPairs == static_cast<int>(row) / 2;
        last[i] = has ? static_cast<const u8*>(from) + tile.k : nullptr;
        last_place[i] = (first + static_cast<u32>(at)) * kTileRow + swizzled(row, static_cast<u32>(half));
    }

    // Starts copying a thread's 8 bytes of the rows that have no pair; one group of copies for each step.
    RTK_DEVICE void ask(int step, i32 valid) const {
        const i32 k = step * static_cast<i32>(kTileRow) + 8 * half;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (last[i] != nullptr) ptx::cp_async_8_partial(slot(i, step), last[i] + (k < valid ? k : 0), k < valid ? 8 : 0);
        ptx::cp_async_commit();
    }

    RTK_DEVICE void pass_on(const State& at) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(ready + 8 * at.stage);
    }

    // The 16 threads of a row are neighbours in a warp.
    template <int COUNT>
    RTK_DEVICE void move_rows(ptx::SharedAddress stage, ptx::SharedAddress from, u32 first, bool exists) const {
        constexpr int kAll = COUNT / (2 * kRowPairs), kEach = kAll % 8 == 0 ? 8 : 4;  // as registers allow
        constexpr u32 kStep = 2 * kRowPairs * kTileRow;
        static_assert(kAll % kEach == 0, "tiles have multiples of 64 rows");
#pragma unroll 1
        for (int group = 0; group < kAll / kEach; ++group, first += kEach * kStep) {
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
    }
};

}  // namespace rtk
