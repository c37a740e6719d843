// The work of moe/permute_fp8_runs.cu in units, and how warps that do different things with it find each other.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "quant/experts.cuh"

namespace rtk {

inline constexpr u32 kRunRows = 320;     // the most of a unit
inline constexpr u32 kPieceRows = 256;   // of a unit, if its expert has more rows than that
inline constexpr u32 kUnitBlocks = 3;    // of 128 rows: the most of a unit
inline constexpr u32 kSlots = 4;         // of blocks of rows on their way
inline constexpr u32 kKeptUnits = 8;
inline constexpr u32 kRowBytes = kTileSide * 2, kSlotBytes = kTileSide * kRowBytes;
inline constexpr u32 kStageBytes = kTileSide * kRunRows;
inline constexpr u32 kRunMemory = kSlots * kSlotBytes + 2 * kStageBytes;

inline constexpr int kRowWarps = 8, kColumnWarps = 2 * static_cast<int>(kSlots), kStoreWarps = 4;
inline constexpr int kFetchWarps = kTileSide / kWarp;
inline constexpr int kRunThreads = (kRowWarps + kColumnWarps + kStoreWarps + kFetchWarps) * kWarp;

// 128 columns of an expert's rows, or of some of its rows.
struct Unit {
    u32 start, count;  // the expert's first row, and its rows
    u32 above, rows;   // of the expert: above this unit, and in it; no rows: there is no such unit
    u32 block;         // number of its first block of 128 rows
    u32 strip;         // its columns

    RTK_DEVICE bool whole() const { return rows == count; }
    // From column to column of staged codes.
    RTK_DEVICE u32 pitch() const { return (rows + 15) / 16 * 16; }
    RTK_DEVICE u32 blocks() const { return (rows + (kTileSide - 1)) / kTileSide; }
};

// Up to 128 rows of a unit.
struct RowBlock {
    Unit unit;
    u32 turn;       // of the unit
    u32 down;       // rows of the unit above
    u32 rows;       // no rows: there are no more blocks
    u32 arrivals;   // at `staged`, of each warp
};

// All units, numbered by expert and then along the rows, strip after strip: the part of x that a strip reads stays in L2.
struct Units {
    ExpertTable table;
    u32* first;  // unit of each expert, and their number

    // `memory`: 12 * (experts + 1) bytes. The whole block calls.
    RTK_DEVICE Units(u8* memory, const i32* offsets, i64 experts, i64 rows)
        : table(memory, offsets, 0, experts, rows), first(reinterpret_cast<u32*>(memory + 8 * (experts + 1))) {
        if (threadIdx.x < kWarp) {
            const int lane = static_cast<int>(threadIdx.x);
            u32 before = 0;
            if (lane == 0) first[0] = 0;
#pragma unroll 1
            for (int base = 0; base < table.experts; base += kWarp) {
                const int e = base + lane;
                u32 end = e < table.experts ? units_of(table.entry[e + 1].row - table.entry[e].row) : 0;
#pragma unroll
                for (int offset = 1; offset < kWarp; offset *= 2) {
                    const u32 lower = __shfl_up_sync(0xffffffffu, end, offset);
                    if (lane >= offset) end += lower;
                }
                end += before;
                if (e < table.experts) first[e + 1] = end;
                before = __shfl_sync(0xffffffffu, end, kWarp - 1);
            }
        }
        __syncthreads();
    }

    RTK_DEVICE static u32 units_of(u32 rows) {
        return rows <= kRunRows ? min(rows, 1u) : (rows + (kPieceRows - 1)) / kPieceRows;
    }
    RTK_DEVICE u32 per_strip() const { return first[table.experts]; }

    RTK_DEVICE Unit find(u32 number, u32 strips) const {
        Unit unit = {};
        const u32 all = per_strip();
        if (all == 0 || number / all >= strips) return unit;
        unit.strip = number / all;
        const u32 inside = number - unit.strip * all;
        int low = 0, high = table.experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first[middle] <= inside) {
                low = middle;
            } else {
                high = middle;
            }
        }
        unit.start = table.entry[low].row;
        unit.count = table.entry[low + 1].row - unit.start;
        unit.above = (inside - first[low]) * kPieceRows;
        unit.rows = unit.count <= kRunRows ? unit.count : min(unit.count - unit.above, kPieceRows);
        unit.block = table.entry[low].block + unit.above / kTileSide;
        return unit;
    }
};

// What the warps share.
struct RunShared {
    RowBlock blocks[kSlots];
    Unit units[kKeptUnits];
    u64 full[kSlots], empty[kSlots];  // a phase for each block in the slot
    u64 staged[2], freed[2];          // a phase for each unit in the buffer
    u64 drawn[kKeptUnits];            // a phase for each number there
    u32 numbers[kKeptUnits];          // of the units

    // The whole block calls, and then meets.
    RTK_DEVICE void init(u32 arrivals_of_block) {
        if (threadIdx.x != 0) return;
        for (u32 s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(ptx::shared_address(&full[s]), arrivals_of_block);
            ptx::mbarrier_init(ptx::shared_address(&empty[s]), kRowWarps + 2);
        }
        for (u32 b = 0; b < 2; ++b) {
            ptx::mbarrier_init(ptx::shared_address(&staged[b]), 2 * kUnitBlocks);
            ptx::mbarrier_init(ptx::shared_address(&freed[b]), kStoreWarps);
        }
        for (u32 u = 0; u < kKeptUnits; ++u) ptx::mbarrier_init(ptx::shared_address(&drawn[u]), 1);
        ptx::mbarrier_fence_init();
    }

    RTK_DEVICE const RowBlock& wait_full(u32 turn) {
        ptx::mbarrier_wait(ptx::shared_address(&full[turn % kSlots]), turn / kSlots & 1);
        return blocks[turn % kSlots];
    }
    // The whole warp calls.
    RTK_DEVICE void release(u32 turn) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[turn % kSlots]));
    }
};

}  // namespace rtk
