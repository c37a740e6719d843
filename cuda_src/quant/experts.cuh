// Rows sorted by expert, cut into blocks of 128 that never span two experts. The number of rows per expert is known on
// the device only; every block of a persistent grid computes where they begin.
#pragma once
#include "quant/tile.cuh"

namespace rtk {

// Position of one block of rows.
struct ExpertRows {
    u32 first_row;   // of the expert
    u32 rows;        // of the expert
    u32 above;       // rows of the expert above this block
};

struct ExpertTable {
    struct Entry {
        u32 row, block;  // first of this expert
    };
    Entry* entry;  // [experts + 1]
    int experts;

    ExpertTable() = default;

    // `memory`: (experts + 1) entries of shared memory. `counts`: rows of each expert, of `width` bytes each; with
    // width 0, the first row of each expert and the last one's end, 4 bytes each. Negative counts count as 0, and
    // experts end at row `rows` at the latest. The whole block calls this; two barriers.
    RTK_DEVICE ExpertTable(void* memory, const void* counts, i64 width, i64 count, i64 rows)
        : entry(static_cast<Entry*>(memory)), experts(static_cast<int>(count)) {
        const u32 limit = static_cast<u32>(rows);
        for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
            const i32* narrow = static_cast<const i32*>(counts);
            i64 wanted = width == 8 ? static_cast<const i64*>(counts)[e] : narrow[e];
            if (width == 0) wanted = narrow[e + 1] - wanted;
            entry[e + 1].row = static_cast<u32>(min(max(wanted, 0ll), rows));
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
            const int lane = static_cast<int>(threadIdx.x);
            Entry last = {0, 0};
            if (lane == 0) entry[0] = last;
#pragma unroll 1
            for (int base = 0; base < experts; base += kWarp) {
                const int e = base + lane;
                // Saturating sums: with rows below 2^31 none of them wraps around.
                const u32 end = prefix(e < experts ? entry[e + 1].row : 0u, last.row, limit);
                const u32 below = __shfl_up_sync(0xffffffffu, end, 1);
                const u32 own = end - (lane == 0 ? last.row : below);
                const u32 block_end = prefix((own + (kTileSide - 1)) / kTileSide, last.block, 0xffffffffu);
                if (e < experts) entry[e + 1] = {end, block_end};
                last.row = __shfl_sync(0xffffffffu, end, kWarp - 1);
                last.block = __shfl_sync(0xffffffffu, block_end, kWarp - 1);
            }
        }
        __syncthreads();
    }

    RTK_DEVICE u32 blocks() const { return entry[experts].block; }

    // `block` must be less than blocks().
    RTK_DEVICE ExpertRows find(u32 block) const {
        const int expert = last([&](int e) { return entry[e].block <= block; });
        const Entry found = entry[expert];
        return {found.row, entry[expert + 1].row - found.row, (block - found.block) * kTileSide};
    }

    // The rows of the expert that owns `row`, and how many of them precede it; `row` must be below the last expert's end.
    RTK_DEVICE ExpertRows of_row(u32 row) const {
        const int expert = last([&](int e) { return entry[e].row <= row; });
        const u32 first = entry[expert].row;
        return {first, entry[expert + 1].row - first, row - first};
    }

   private:
    // The last expert that satisfies the predicate, or 0. The predicate must be monotonic: once false, it stays false.
    template <typename Condition>
    RTK_DEVICE int last(const Condition& condition) const {
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (condition(middle)) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }

    // Sum of the lanes up to this one and of `before`, at most `limit`.
    RTK_DEVICE static u32 prefix(u32 v, u32 before, u32 limit) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const u32 lower = __shfl_up_sync(0xffffffffu, v, offset);
            if (lane >= offset) v = min(v + lower, limit);
        }
        return min(v + before, limit);
    }
};

}  // namespace rtk
