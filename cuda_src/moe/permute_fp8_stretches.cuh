// The work of moe/permute_fp8_stretches.cu in units, and how warps with different roles synchronise.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "quant/tile.cuh"

namespace rtk {

inline constexpr u32 kMaxUnitRows = 320;
inline constexpr u32 kCutRows = 256;  // of a unit, if its expert has more than kMaxUnitRows rows
inline constexpr u32 kUnitBlocks = 3;  // blocks of 128 rows: at most so many per unit
inline constexpr u32 kSlots = 4;       // slots of blocks of rows in flight
inline constexpr u32 kKeptUnits = 8;
inline constexpr u32 kPlanned = 8;
inline constexpr u32 kRowBytes = kTileSide * 2;
inline constexpr u32 kSlotBytes = kTileSide * kRowBytes;
inline constexpr u32 kStageBytes = kTileSide * kMaxUnitRows;
inline constexpr u32 kStretchMemory = kSlots * kSlotBytes + 2 * kStageBytes;

// Roles of warps: consumers that quantise, one block of rows each at a time; those that store; those that load.
inline constexpr int kConsumers = 2;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kWorkWarps = kConsumers * kConsumerWarps;
inline constexpr int kStoreWarps = 3;
inline constexpr int kFetchWarps = kSlots;
inline constexpr int kStretchThreads = (kWorkWarps + kStoreWarps + kFetchWarps + 1) * kWarp;

// 128 columns of an expert's rows, or of some of its rows.
struct Unit {
    u32 start, count;  // the expert's first row, and its rows
    u32 above, rows;   // of the expert: above this unit, and in it; no rows: end marker
    u32 block;         // number of its first block of 128 rows
    u32 strip;         // its columns

    RTK_DEVICE bool whole() const { return rows == count; }
    // Column pitch of staged codes.
    RTK_DEVICE u32 pitch() const { return (rows + 15) / 16 * 16; }
    RTK_DEVICE u32 blocks() const { return (rows + (kTileSide - 1)) / kTileSide; }
};

// Up to 128 rows of a unit.
struct RowBlock {
    Unit unit;
    u32 unit_nth;  // number of the unit among those of the block
    u32 down;      // rows of the unit above

    // No rows: there are no more blocks.
    RTK_DEVICE u32 rows() const { return unit.rows == 0 ? 0 : min(unit.rows - down, static_cast<u32>(kTileSide)); }
    // How often each warp arrives at `staged`: the last block of a unit also arrives for missing ones.
    RTK_DEVICE u32 arrivals() const {
        return down + kTileSide < unit.rows ? 1 : kUnitBlocks + 1 - max(unit.blocks(), 1u);
    }
};

// All units, numbered by expert and then along the rows, strip after strip: the part of x that a strip reads stays in
// L2, although each token is read once per expert.
struct Units {
    struct Entry {
        u32 row, block, unit;  // first of this expert
    };
    Entry* entry;  // [experts + 1]
    int experts;
    u32 strips;

    // `memory`: that of the entries. Offsets are those of ExpertTable (quant/experts.cuh). The whole block calls this;
    // two barriers.
    RTK_DEVICE Units(u8* memory, const i32* offsets, i64 expert_count, i64 rows, u32 column_tiles)
        : entry(reinterpret_cast<Entry*>(memory)), experts(static_cast<int>(expert_count)), strips(column_tiles) {
        for (int e = static_cast<int>(threadIdx.x); e < experts; e += kStretchThreads) {
            const i64 wanted = static_cast<i64>(offsets[e + 1]) - offsets[e];
            entry[e + 1].row = static_cast<u32>(min(max(wanted, 0ll), rows));
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
            // A lane owns a stretch of experts.
            const int lane = static_cast<int>(threadIdx.x), each = (experts + (kWarp - 1)) / kWarp;
            const int begin = min(lane * each, experts), end = min(begin + each, experts);
            const u32 limit = static_cast<u32>(rows);
            u32 sum = 0;
#pragma unroll 4
            for (int e = begin; e < end; ++e) sum = min(sum + entry[e + 1].row, limit);
            const u32 first = before(sum, limit);
            Entry here = {first, 0, 0};
#pragma unroll 1
            for (int e = begin; e < end; ++e) add(here, entry[e + 1].row, limit);
            here = {first, before(here.block, ~0u), before(here.unit, ~0u)};
            if (lane == 0) entry[0] = here;
#pragma unroll 1
            for (int e = begin; e < end; ++e) {
                add(here, entry[e + 1].row, limit);
                entry[e + 1] = here;
            }
        }
        __syncthreads();
    }

    RTK_DEVICE static u32 units_of(u32 rows) {
        return rows <= kMaxUnitRows ? min(rows, 1u) : (rows + (kCutRows - 1)) / kCutRows;
    }

    RTK_DEVICE Unit find(u32 number) const {
        Unit unit = {};
        const u32 all = entry[experts].unit;
        if (number >= all * strips) return unit;
        unit.strip = number / all;
        const u32 inside = number - unit.strip * all;
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (entry[middle].unit <= inside) {
                low = middle;
            } else {
                high = middle;
            }
        }
        unit.start = entry[low].row;
        unit.count = entry[low + 1].row - unit.start;
        unit.above = (inside - entry[low].unit) * kCutRows;
        unit.rows = unit.count <= kMaxUnitRows ? unit.count : min(unit.count - unit.above, kCutRows);
        unit.block = entry[low].block + unit.above / kTileSide;
        return unit;
    }

   private:
    // Continues after an expert with so many rows.
    RTK_DEVICE static void add(Entry& here, u32 rows, u32 limit) {
        const u32 end = min(here.row + rows, limit), own = end - here.row;
        here = {end, here.block + (own + (kTileSide - 1)) / kTileSide, here.unit + units_of(own)};
    }

    // Sum of the lanes before this one, at most `limit`.
    RTK_DEVICE static u32 before(u32 v, u32 limit) {
        const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const u32 lower = __shfl_up_sync(0xffffffffu, v, offset);
            if (lane >= offset) v = min(v + lower, limit);
        }
        const u32 lower = __shfl_up_sync(0xffffffffu, v, 1);
        return lane == 0 ? 0 : lower;
    }
};

// State that the warps share. Blocks of rows are numbered in order; a slot takes every kSlots'th.
struct StretchShared {
    RowBlock blocks[kSlots];
    Unit units[kKeptUnits];                             // that were loaded recently
    RowBlock plan[kPlanned];                            // upcoming blocks
    u32 max_abs[kConsumers][2][kConsumerWarps][kWarp];  // column maxima, two per word: this and the next block
    u64 full[kSlots], empty[kSlots];                    // barriers, a phase for each block in the slot
    u64 added[kConsumers];                              // a phase for each block of the consumer
    u64 staged[2], freed[2];                            // a phase for each unit in the buffer
    u64 planned[kPlanned], taken[kPlanned];             // a phase for each block in the plan

    // The whole block calls this, and synchronises afterwards.
    RTK_DEVICE void init() {
        if (threadIdx.x != 0) return;
        auto each = [](u64* barriers, u32 count, u32 arrivals) {
            for (u32 b = 0; b < count; ++b) ptx::mbarrier_init(ptx::shared_address(barriers + b), arrivals);
        };
        each(full, kSlots, kWarp + 1);
        each(empty, kSlots, kConsumerWarps);
        each(added, kConsumers, kConsumerWarps);
        each(staged, 2, kConsumerWarps * kUnitBlocks);
        each(freed, 2, kStoreWarps);
        each(planned, kPlanned, 1);
        each(taken, kPlanned, 1);
        ptx::mbarrier_fence_init();
    }
};

// The warp arrives, as often as said, with what its lanes have done so far.
RTK_DEVICE void warp_arrive(u64& barrier, u32 times = 1) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0)
        for (u32 i = 0; i < times; ++i) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}
RTK_DEVICE void wait_for(u64& barrier, u32 parity) { ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1); }

}  // namespace rtk
