// Which tiles of a product, dense or grouped, a block of a persistent grid computes, and where they are. One type for
// all kinds of groups, chosen at run time: finding a tile costs a few divisions, and a tile takes thousands of cycles.
//
// Groups have a table in shared memory, which the whole block builds from numbers on the device at its start: the first
// row (or, where groups split k, the first k) of each, its length, and the number of row blocks of all groups before
// it. No tile spans two groups; empty groups have no tiles, unless groups split k: then their sums are 0. Bounds that
// are outside of the matrix or out of order are clamped, so that every group stays inside it.
#pragma once
#include "common/scan.cuh"
#include "ptx/barrier.cuh"
#include "ptx/words.cuh"

namespace rtk {

// Mirrored in rtkernels/ops/gemm/sm90_plan.py.
enum GroupKind : u32 { kNoGroups = 0, kRowGroups = 1, kMaskedGroups = 2, kDepthGroups = 3 };

struct ProductTile {
    i32 row, n;     // its first row and column; rows of a masked product are those of its group
    int rows;       // how many of its rows exist
    u32 group;
    i32 k, depth;   // the first of k, and how many
};

struct ProductGroup {
    u32 first, size, block;
};

template <int ROWS, int COLS>
struct ProductTiles {
    const ProductGroup* table;
    u32 kind, groups, rows, tiles_m, tiles_n, band;
    i32 depth;
    u32 last = 0;

    // `starts` may be null: each group then begins where the previous one ends. The whole block calls this; it contains
    // barriers.
    RTK_DEVICE ProductTiles(ProductGroup* memory, const i32* starts, const i32* ends, u32 group_kind, u32 group_count, i64 m,
                            i64 columns, i64 k, u32 band_rows)
        : table(memory), kind(group_kind), groups(group_count), rows(static_cast<u32>(m)),
          tiles_m(static_cast<u32>(ceil_div(m, ROWS))), tiles_n(static_cast<u32>(ceil_div(columns, COLS))), band(band_rows),
          depth(static_cast<i32>(k)) {
        if (kind == kNoGroups) return;
        const i32 all = kind == kDepthGroups ? depth : static_cast<i32>(rows);
        auto first_of = [&](int g) {
            if (kind == kMaskedGroups) return 0;
            const i32 first = starts != nullptr ? starts[g] : g == 0 ? 0 : ends[g - 1];
            return min(max(first, 0), all);
        };
        auto size_of = [&](int g) { return static_cast<u32>(max(min(ends[g], all) - first_of(g), 0)); };
        auto blocks_of = [&](int g) { return kind == kDepthGroups ? tiles_m : (size_of(g) + (ROWS - 1)) / ROWS; };
        exclusive_scan_up_to(static_cast<int>(groups), 0x7fffffffu, blocks_of, [&](int g, u32 block, u32 next) {
            memory[g] = {static_cast<u32>(first_of(g)), size_of(g), block};
            if (g + 1 == static_cast<int>(groups)) memory[g + 1].block = next;
        });
        __syncthreads();
    }

    RTK_DEVICE u32 count() const { return (kind == kNoGroups ? tiles_m : table[groups].block) * tiles_n; }

    // Tiles are numbered in bands of `band` rows of tiles, down the columns of a band first, so that blocks that run at
    // the same time read both operands from L2. `index` is less than count(), and not less than in the previous call.
    RTK_DEVICE ProductTile find(u32 index) {
        ProductGroup here = {0, rows, 0};
        u32 blocks = tiles_m;
        if (kind != kNoGroups) {
            const u32 block = index / tiles_n;
            u32 high = groups;  // the last group that starts at or before `block`; empty ones precede it
            while (high - last > 1) {
                const u32 middle = (last + high) / 2;
                if (table[middle].block <= block) {
                    last = middle;
                } else {
                    high = middle;
                }
            }
            here = table[last];
            blocks = table[last + 1].block - here.block;
        }
        const u32 inside = index - here.block * tiles_n, in_band = inside / (band * tiles_n) * band;
        const u32 height = min(blocks - in_band, band), rest = inside - in_band * tiles_n;
        const u32 n = rest / height, m = in_band + rest - n * height;
        ProductTile tile;
        tile.n = static_cast<i32>(n * COLS);
        tile.group = last;
        tile.k = 0, tile.depth = depth;
        tile.row = static_cast<i32>(m * ROWS);
        u32 size = here.size;
        if (kind == kDepthGroups) {
            tile.k = static_cast<i32>(here.first), tile.depth = static_cast<i32>(here.size);
            size = rows;
        }
        tile.rows = static_cast<int>(min(size - static_cast<u32>(tile.row), static_cast<u32>(ROWS)));
        if (kind == kRowGroups) tile.row += static_cast<i32>(here.first);
        return tile;
    }
};

// What a block computes, in order: every gridDim.x-th tile; and, where k is split, an equal share of the k blocks of
// the remaining tiles, if the number of tiles is no multiple of the grid and it is one of the first `sharing` blocks.
// Several blocks may then share a tile: the one that owns its first k block reaches it last, adds the others' sums in
// the order of k, and finishes it. Each of these blocks has a share: there are at least as many k blocks of such tiles.
//
// Why this cannot deadlock:
// 1. All blocks are resident: the launch is cooperative where tiles are shared.
// 2. A block waits only for blocks with larger numbers: those that own the rest of a tile whose first k block is its
//    own.
// 3. A block writes the part that others wait for, at the beginning of its share, before it waits for anybody.
template <bool SPLITS>
struct TileShare {
    u32 index, whole;                // of tiles that one block computes alone
    u32 steps = 1, at = 0, end = 0;  // of shared tiles: k blocks per tile; those of this block, counted over all shared tiles
    u32 sharing;                     // blocks, or more than there are

    RTK_DEVICE TileShare(u32 count, bool split, i32 block_depth, i32 depth, u32 blocks)
        : index(blockIdx.x), whole(count), sharing(blocks) {
        if (!SPLITS || !split) return;
        whole = count / gridDim.x * gridDim.x;
        steps = static_cast<u32>(ceil_div(depth, block_depth));
        at = first_of(blockIdx.x, count), end = first_of(blockIdx.x + 1, count);
    }

    // The first step of a block, counted over the steps of all shared tiles. Fewer than 2^32 times the number of
    // blocks.
    RTK_DEVICE u32 first_of(u32 block, u32 count) const {
        return (count - whole) * steps * min(block, sharing) / sharing;
    }

    RTK_DEVICE bool has_any(u32 block, u32 count) const { return first_of(block, count) < first_of(block + 1, count); }

    // True for the blocks behind this one that have a part of its tile.
    RTK_DEVICE bool has_part(u32 block, u32 count) const { return block < gridDim.x && first_of(block, count) < tile_end(); }

    RTK_DEVICE bool exists() const { return index < whole || (SPLITS && at < end); }
    RTK_DEVICE bool is_part() const { return SPLITS && index >= whole; }
    RTK_DEVICE u32 first_step() const { return at % steps; }
    RTK_DEVICE u32 tile_end() const { return (at / steps + 1) * steps; }  // counted as `at` is

    RTK_DEVICE void next() {
        if (is_part()) {
            at = min(tile_end(), end);
        } else {
            index += gridDim.x;
        }
    }

    template <typename Tiles>
    RTK_DEVICE ProductTile tile(Tiles& tiles, i32 block_depth) const {
        ProductTile found = tiles.find(is_part() ? whole + at / steps : index);
        if (is_part()) {
            found.k = static_cast<i32>(first_step()) * block_depth;
            found.depth = min(found.depth - found.k, static_cast<i32>(min(tile_end(), end) - at) * block_depth);
        }
        return found;
    }
};

// Partial sums of shared tiles, one part per block, in the order of its threads: 16 bytes of each, then the next 16.
// `arrived` says which are complete, by block and warpgroup; zero before the launch.
template <typename Sum, int CONSUMERS, int VECTORS>
struct SharedSums {
    static constexpr u32 kThreads = 128 * CONSUMERS;
    struct __align__(16) Four {
        Sum of[4];
    };
    Four* sums;
    u32* arrived;

    // Called by a warpgroup, with a barrier of its own.
    RTK_DEVICE void put(const Sum (&own)[4 * VECTORS], int consumer, int barrier) const {
        Four* const to = place(blockIdx.x);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) to[i * kThreads] = {{own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]}};
        __threadfence();
        ptx::named_barrier_sync(barrier, 128);
        if (threadIdx.x % 128 == 0) atomicAdd(arrived + blockIdx.x * CONSUMERS + consumer, 1u);
    }

    // Called by all threads; a __threadfence follows the last of these.
    RTK_DEVICE void wait(u32 block, int consumer) const {
        while (ptx::ld_word_acquire(arrived + block * CONSUMERS + consumer) == 0u) {
        }
    }

    // Adds the sums of a block that were waited for.
    RTK_DEVICE void add(Sum (&own)[4 * VECTORS], u32 block) const {
        const Four* from = place(block);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Four v = from[i * kThreads];
#pragma unroll
            for (int j = 0; j < 4; ++j) own[4 * i + j] += v.of[j];
        }
    }

    // The same of two blocks, one after the other; what they wrote is loaded at the same time.
    RTK_DEVICE void add_two(Sum (&own)[4 * VECTORS], u32 first, u32 second) const {
        const Four *from = place(first), *then = place(second);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Four v = from[i * kThreads], w = then[i * kThreads];
#pragma unroll
            for (int j = 0; j < 4; ++j) own[4 * i + j] = own[4 * i + j] + v.of[j] + w.of[j];
        }
    }

    // Called by the block with the first part of a tile: waits for the others and adds them in order, TWO at a time. Every
    // block has a part; to ASK for it keeps the compiler from spilling registers in one of the loops.
    template <bool TWO, bool ASK, typename Share>
    RTK_DEVICE void add_others(Sum (&own)[4 * VECTORS], const Share& share, u32 count, int consumer) const {
        auto has_any = [&](u32 block) { return !ASK || share.has_any(block, count); };
        for (u32 block = blockIdx.x + 1; share.has_part(block, count); ++block)
            if (has_any(block)) wait(block, consumer);
        __threadfence();
        u32 block = blockIdx.x + 1;
        if constexpr (TWO) {
#pragma unroll 1
            for (; share.has_part(block + 1, count) && has_any(block) && has_any(block + 1); block += 2)
                add_two(own, block, block + 1);
        }
#pragma unroll 1
        for (; share.has_part(block, count); ++block)
            if (has_any(block)) add(own, block);
    }

   private:
    RTK_DEVICE Four* place(u32 block) const { return sums + block * (VECTORS * kThreads) + threadIdx.x; }
};

}  // namespace rtk
