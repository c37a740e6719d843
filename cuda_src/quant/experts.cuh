// Rows sorted by expert, cut into blocks of 128 that never hold rows of two experts. How many rows each expert has is
// known on the device only; every block of a persistent grid works out where they begin.
#pragma once
#include "quant/tile.cuh"

namespace rtk {

// Where one block of rows lies.
struct ExpertRows {
    u32 first_row;   // of the expert
    u32 rows;        // of the expert
    u32 above;       // rows of the expert above this block
};

struct ExpertTable {
    u32* first_row;    // [experts + 1]
    u32* first_block;  // [experts + 1]
    int experts;

    // `memory`: (2 * experts + 2) words of shared memory. `counts`: rows of each expert, of `width` bytes each. Negative
    // ones count as 0, and experts end at row `rows` at the latest. The whole block calls; two barriers.
    RTK_DEVICE ExpertTable(u32* memory, const void* counts, i64 width, i64 count, i64 rows) {
        experts = static_cast<int>(count);
        first_row = memory;
        first_block = memory + experts + 1;
        const u32 limit = static_cast<u32>(rows);
        for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
            const i64 wanted = width == 8 ? static_cast<const i64*>(counts)[e] : static_cast<const i32*>(counts)[e];
            first_row[e + 1] = static_cast<u32>(min(max(wanted, 0ll), rows));
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
            const int lane = static_cast<int>(threadIdx.x);
            u32 row = 0, block = 0;
            for (int base = 0; base < experts; base += kWarp) {
                const int e = base + lane;
                // Saturating sums: with rows below 2^31 none of them wraps around.
                const u32 end = prefix(e < experts ? first_row[e + 1] : 0u, row, limit);
                const u32 own = end - max(row, shifted(end, row));
                const u32 block_end = prefix((own + (kTileSide - 1)) / kTileSide, block, 0xffffffffu);
                if (e < experts) {
                    first_row[e + 1] = end;
                    first_block[e + 1] = block_end;
                }
                row = __shfl_sync(0xffffffffu, end, kWarp - 1);
                block = __shfl_sync(0xffffffffu, block_end, kWarp - 1);
            }
            if (lane == 0) first_row[0] = first_block[0] = 0;
        }
        __syncthreads();
    }

    RTK_DEVICE u32 blocks() const { return first_block[experts]; }

    // `block` must be less than blocks().
    RTK_DEVICE ExpertRows find(u32 block) const {
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_block[middle] <= block) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const u32 begin = first_row[low];
        return {uniform(begin), uniform(first_row[low + 1] - begin), uniform((block - first_block[low]) * kTileSide)};
    }

   private:
    // Tells the compiler that all lanes have the same value, so that it takes no register of each.
    RTK_DEVICE static u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }
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
    // What the lane below has; `first` in the lowest.
    RTK_DEVICE static u32 shifted(u32 v, u32 first) {
        const u32 lower = __shfl_up_sync(0xffffffffu, v, 1);
        return threadIdx.x % kWarp == 0 ? first : lower;
    }
};

}  // namespace rtk
