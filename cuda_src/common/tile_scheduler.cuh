// Which tiles of a matrix product a block of a persistent grid computes, one after the other:
//
//   TileScheduler<Tiles, Source> scheduler{tiles, source};
//   for (Tile tile; scheduler.next(tile);) ...
//
// `Tiles` says how many tiles there are and where tile i is: MatrixTiles (one matrix), GroupedTiles (rows sorted by
// group, with sizes known on the device only). `Source` says which numbers a block gets: StaticSource (every
// gridDim.x-th; producers and consumers enumerate them independently), DrawnSource (the next one that no block has
// claimed, from a counter in global memory; for tiles of unequal cost). Any of the former goes with any of the latter.
//
// Order: tiles are numbered in bands of BAND rows of tiles, down the columns of a band first. Blocks that run at the
// same time then cover about BAND rows and as many columns as they need, instead of one row and all columns, and read
// both operands from L2. Rows, columns and tiles are fewer than 2^31 each; the host checks that.
#pragma once
#include "common/pipeline.cuh"
#include "common/scan.cuh"

namespace rtk {

struct Tile {
    u32 m, n;       // how many tiles of its group lie above it, and left of it
    u32 group;      // 0 without groups
    u32 row, rows;  // the first row of the matrix, and how many rows of the tile exist (1 to TILE_M)
};

// Number `index` of the tiles [tiles_m, tiles_n].
template <int BAND>
RTK_DEVICE void place_in_bands(u32 index, u32 tiles_m, u32 tiles_n, u32& m, u32& n) {
    const u32 band = index / (BAND * tiles_n), first = band * BAND;
    const u32 height = min(tiles_m - first, static_cast<u32>(BAND)), inside = index - first * tiles_n;
    n = inside / height;
    m = first + inside - n * height;
}

// ---- positions of tiles
// ----------------------------------------------------------------------------------------------

template <int TILE_M, int TILE_N, int BAND>
struct MatrixTiles {
    u32 rows, tiles_m, tiles_n;

    RTK_DEVICE MatrixTiles(i64 row_count, i64 columns)
        : rows(static_cast<u32>(row_count)),
          tiles_m(static_cast<u32>(ceil_div(row_count, TILE_M))),
          tiles_n(static_cast<u32>(ceil_div(columns, TILE_N))) {}

    RTK_DEVICE u32 count() const { return tiles_m * tiles_n; }

    // `index` must be less than count().
    RTK_DEVICE Tile find(u32 index) {
        Tile tile;
        place_in_bands<BAND>(index, tiles_m, tiles_n, tile.m, tile.n);
        tile.group = 0;
        tile.row = tile.m * TILE_M;
        tile.rows = min(rows - tile.row, static_cast<u32>(TILE_M));
        return tile;
    }
};

// Rows of a matrix [rows, columns] in consecutive groups; ends[g] is the end of group g. No tile spans two groups, and
// empty groups have none. Ends that are out of order or outside of the matrix are clamped, so that groups stay inside.
//
// The constructor writes a table to shared memory; then every thread finds tiles by itself, with a binary search that
// begins at the last group it found, because a block's numbers rise.
template <int TILE_M, int TILE_N, int BAND>
struct GroupedTiles {
    struct Entry {
        u32 row, rows, block;  // of a group: its first row, how many, and the row blocks of all groups before it
    };
    const Entry* table;  // [groups + 1], the last for its `block`
    u32 groups, tiles_n;
    u32 last = 0;

    // Of shared memory, 4-byte aligned.
    RTK_DEVICE static constexpr u32 bytes(int group_count) { return (group_count + 1) * sizeof(Entry); }

    // The whole block calls this (whole warps); two barriers.
    RTK_DEVICE GroupedTiles(void* memory, const i32* ends, i64 group_count, i64 rows, i64 columns)
        : table(static_cast<Entry*>(memory)),
          groups(static_cast<u32>(group_count)),
          tiles_n(static_cast<u32>(ceil_div(columns, TILE_N))) {
        Entry* entries = static_cast<Entry*>(memory);
        const i32 all = static_cast<i32>(rows);
        auto first_of = [&](int g) { return g == 0 ? 0 : min(max(ends[g - 1], 0), all); };
        auto blocks_of = [&](int g) {
            const i32 first = first_of(g);
            return static_cast<u32>(max(min(ends[g], all) - first, 0) + (TILE_M - 1)) / TILE_M;
        };
        exclusive_scan_up_to(static_cast<int>(groups), 0x7fffffffu, blocks_of, [&](int g, u32 block, u32 next) {
            const i32 first = first_of(g);
            entries[g] = {static_cast<u32>(first), static_cast<u32>(max(min(ends[g], all) - first, 0)), block};
            if (g + 1 == static_cast<int>(groups)) entries[g + 1].block = next;
        });
        if (groups == 0 && threadIdx.x == 0) entries[0].block = 0;
        __syncthreads();
    }

    RTK_DEVICE u32 count() const { return table[groups].block * tiles_n; }

    // `index` must be less than count(), and not less than in the previous call.
    RTK_DEVICE Tile find(u32 index) {
        const u32 block = index / tiles_n;
        u32 low = last, high = groups;  // the last group that starts at or before `block`; empty ones precede it
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (table[middle].block <= block) {
                low = middle;
            } else {
                high = middle;
            }
        }
        last = low;
        const Entry entry = table[low];
        Tile tile;
        place_in_bands<BAND>(index - entry.block * tiles_n, table[low + 1].block - entry.block, tiles_n, tile.m, tile.n);
        tile.group = low;
        tile.row = entry.row + tile.m * TILE_M;
        tile.rows = min(entry.rows - tile.m * TILE_M, static_cast<u32>(TILE_M));
        return tile;
    }
};

// ---- assignment to blocks
// --------------------------------------------------------------------------------------------

struct StaticSource {
    u32 index;

    RTK_DEVICE StaticSource() : index(blockIdx.x) {}

    RTK_DEVICE u32 draw() {
        const u32 drawn = index;
        index += gridDim.x;
        return drawn;
    }
};

// Broadcasts one thread's number to all threads of a block that run in lockstep: all of them call give(...) equally
// often.
struct BlockHandover {
    u32* slots;  // two words of shared memory
    u32 slot = 0;

    RTK_DEVICE explicit BlockHandover(void* memory) : slots(static_cast<u32*>(memory)) {}

    // One barrier: before a slot gets its next number, all threads have passed the barrier of the call in between.
    template <typename Make>
    RTK_DEVICE u32 give(const Make& make) {
        if (threadIdx.x == 0) slots[slot] = make();
        __syncthreads();
        const u32 given = slots[slot];
        slot ^= 1u;
        return given;
    }
};

#if RTK_HAS_TMA
// The same for warps with roles, which run at their own pace (sm_90 and up): numbers pass through a pipeline of two
// stages. The warp that `makes` is one of `warps` that call; a warp may be up to two calls behind it. Whole warps call
// this.
struct WarpHandover {
    static constexpr int kStages = 2;
    static constexpr u32 kBytes = Pipeline<kStages>::kBytes + 4 * kStages;  // of shared memory, 8-byte aligned
    Pipeline<kStages> pipeline;
    u32* slots;
    PipelineState<kStages> state;
    bool makes;

    RTK_DEVICE WarpHandover(void* memory, bool this_warp_makes)
        : pipeline{ptx::shared_address(memory)},
          slots(reinterpret_cast<u32*>(static_cast<u8*>(memory) + Pipeline<kStages>::kBytes)),
          makes(this_warp_makes) {}

    // Called by one thread, before a block-wide barrier.
    RTK_DEVICE void init(u32 warps) const { pipeline.init(1, warps); }

    template <typename Make>
    RTK_DEVICE u32 give(const Make& make) {
        if (makes && threadIdx.x % kWarp == 0) {
            pipeline.acquire(state);
            slots[state.stage] = make();
            pipeline.commit(state);
        }
        __syncwarp();
        pipeline.wait(state);
        const u32 given = slots[state.stage];
        pipeline.release_warp(state);
        state.advance();
        return given;
    }
};
#endif

// Numbers from a counter that starts at 0 (runtime/launch/memory.py: fresh_zeros), and that the launch leaves above 0.
// A block's first tile is its own number, so nobody waits for the counter at the start; later ones are claimed one call
// before they are used. Where each block has one tile at most, the counter may be null.
template <typename Handover>
struct DrawnSource {
    u32* counter;
    Handover handover;
    u32 next;  // in the thread that claims

    RTK_DEVICE DrawnSource(u32* zero, const Handover& way) : counter(zero), handover(way), next(blockIdx.x) {}

    RTK_DEVICE u32 draw() {
        return handover.give([&] {
            const u32 drawn = next;
            next = gridDim.x + (counter == nullptr ? 0u : atomicAdd(counter, 1u));
            return drawn;
        });
    }
};

template <typename Tiles, typename Source>
struct TileScheduler {
    Tiles tiles;
    Source source;

    // False if there is none left; then this thread must not call it again.
    RTK_DEVICE bool next(Tile& tile) {
        const u32 index = source.draw();
        if (index >= tiles.count()) return false;
        tile = tiles.find(index);
        return true;
    }
};

template <typename Tiles, typename Source>
RTK_DEVICE TileScheduler<Tiles, Source> scheduled(const Tiles& tiles, const Source& source) {
    return {tiles, source};
}

}  // namespace rtk
