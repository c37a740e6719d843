// Maps a block to its tile of a product (one block, one tile), with group sizes that only the device knows.
#pragma once
#include "common/tile_scheduler.cuh"

namespace rtk {

enum MmaGroupKind : int { kNoGroups, kGroupRows, kGroupSpans, kGroupMasked, kGroupDepth };

struct MmaTile {
    i64 row;               // of a and of out, inside the group's matrix if it has one of its own
    i64 n;                 // in tiles
    u32 group;
    int rows;              // that exist, at most the tile's; 0: nothing to do
    int k_first, k_last;
};

// kGroupRows: bounds[g] is the end of group g's rows. kGroupSpans: group g has rows bounds[g] ... bounds[count + g] -
// 1. kGroupMasked: bounds[g] is the number of rows of group g. kGroupDepth: bounds[g] is the end of group g's k.
// `table`: shared memory, GroupedTiles' bytes(count), for the first two. The whole block calls this.
template <int kTileM, int kTileN>
RTK_DEVICE MmaTile mma_tile(const i32* bounds, int kind, int count, i64 m, i64 columns, i64 k, void* table) {
    constexpr int kBand = 8;
    MmaTile tile{0, 0, 0u, 0, 0, static_cast<int>(k)};
    const u32 tiles_n = static_cast<u32>(ceil_div(columns, kTileN));
    if (kind == kGroupRows || kind == kGroupSpans) {
        using Entry = typename GroupedTiles<kTileM, kTileN, kBand>::Entry;
        Entry* entries = static_cast<Entry*>(table);
        const i32 all = static_cast<i32>(m);
        auto first_of = [&](int g) {
            if (kind == kGroupSpans) return min(max(bounds[g], 0), all);
            return g == 0 ? 0 : min(max(bounds[g - 1], 0), all);
        };
        auto rows_of = [&](int g) { return max(min(bounds[kind == kGroupSpans ? count + g : g], all) - first_of(g), 0); };
        auto blocks_of = [&](int g) { return static_cast<u32>(rows_of(g) + (kTileM - 1)) / kTileM; };
        exclusive_scan_up_to(count, 0x7fffffffu, blocks_of, [&](int g, u32 block, u32 next) {
            entries[g] = {static_cast<u32>(first_of(g)), static_cast<u32>(rows_of(g)), block};
            if (g + 1 == count) entries[g + 1].block = next;
        });
        __syncthreads();
        const u32 block = blockIdx.x / tiles_n;
        if (block >= entries[count].block) return tile;
        u32 low = 0, high = static_cast<u32>(count);  // the last group that starts at or before `block`
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (entries[middle].block <= block) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const Entry entry = entries[low];
        u32 tile_m, tile_n;
        place_in_bands<kBand>(blockIdx.x - entry.block * tiles_n, entries[low + 1].block - entry.block, tiles_n, tile_m,
                              tile_n);
        tile.row = static_cast<i64>(entry.row) + static_cast<i64>(tile_m) * kTileM;
        tile.rows = static_cast<int>(min(entry.rows - tile_m * kTileM, static_cast<u32>(kTileM)));
        tile.group = low;
        tile.n = tile_n;
        return tile;
    }
    const u32 tiles_m = static_cast<u32>(ceil_div(m, kTileM)), each = tiles_m * tiles_n;
    u32 tile_m, tile_n;
    tile.group = blockIdx.x / each;
    place_in_bands<kBand>(blockIdx.x - tile.group * each, tiles_m, tiles_n, tile_m, tile_n);
    tile.row = static_cast<i64>(tile_m) * kTileM;
    tile.n = tile_n;
    i64 rows = m;
    if (kind == kGroupMasked) rows = min(max(static_cast<i64>(bounds[tile.group]), static_cast<i64>(0)), m);
    if (kind == kGroupDepth) {
        const int all = tile.k_last;
        tile.k_first = tile.group == 0 ? 0 : min(max(bounds[tile.group - 1], 0), all);
        tile.k_last = min(max(bounds[tile.group], tile.k_first), all);
    }
    tile.rows = static_cast<int>(min(max(rows - tile.row, static_cast<i64>(0)), static_cast<i64>(kTileM)));
    return tile;
}

}  // namespace rtk
