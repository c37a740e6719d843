// Counts the tiles that the schedulers of common/tile_scheduler.cuh hand out, to test them alone. Each warp of a block
// goes through the block's tiles as a role of a warp-specialised kernel does, at its own pace unless numbers are handed
// over at a block-wide barrier. cover [warps, rows, tiles of 8 columns] counts the tiles that contain a row, owner
// [warps, rows] is its group, and log [tiles, 2], for a grid of one block, has (m, n) of tiles in order.
#include "common/tile_scheduler.cuh"

namespace rtk {

// Mirrored in tests/support/device_probe.py.
inline constexpr int kTileM = 16;
inline constexpr int kTileN = 8;
inline constexpr int kBand = 4;
inline constexpr int kStatic = 0, kDrawnByBlocks = 1, kDrawnByWarps = 2;

template <typename Scheduler>
RTK_DEVICE void walk(Scheduler scheduler, i32* cover, i32* owner, i32* log, i64 rows, i64 columns) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 tiles_n = ceil_div(columns, kTileN);
    Tile tile;
    for (i64 i = 0; scheduler.next(tile); ++i) {
        for (u32 r = static_cast<u32>(lane); r < tile.rows; r += kWarp) {
            const i64 row = warp * rows + tile.row + r;
            atomicAdd(cover + row * tiles_n + tile.n, 1);
            owner[row] = static_cast<i32>(tile.group);
        }
        if (log != nullptr && threadIdx.x == 0) {
            log[2 * i] = static_cast<i32>(tile.m);
            log[2 * i + 1] = static_cast<i32>(tile.n);
        }
    }
}

template <int SOURCE, typename Tiles>
RTK_DEVICE void walk_from(const Tiles& tiles, u32* counter, i32* cover, i32* owner, i32* log, i64 rows, i64 columns) {
    __shared__ __align__(8) u64 memory[8];
    if constexpr (SOURCE == kStatic) {
        walk(scheduled(tiles, StaticSource()), cover, owner, log, rows, columns);
    } else if constexpr (SOURCE == kDrawnByBlocks) {
        walk(scheduled(tiles, DrawnSource<BlockHandover>(counter, BlockHandover(memory))), cover, owner, log, rows, columns);
    } else {
#if RTK_HAS_TMA
        static_assert(sizeof(memory) >= WarpHandover::kBytes);
        const WarpHandover handover(memory, threadIdx.x / kWarp == 1);
        if (threadIdx.x == 0) handover.init(blockDim.x / kWarp);
        __syncthreads();
        walk(scheduled(tiles, DrawnSource<WarpHandover>(counter, handover)), cover, owner, log, rows, columns);
#endif
    }
}

template <int SOURCE, bool GROUPED>
__global__ void __launch_bounds__(128)
    probe_tiles(i32* cover, i32* owner, i32* log, const i32* ends, u32* counter, i64 groups, i64 rows, i64 columns) {
    if constexpr (GROUPED) {
        extern __shared__ u8 table[];
        walk_from<SOURCE>(GroupedTiles<kTileM, kTileN, kBand>(table, ends, groups, rows, columns), counter, cover, owner, log,
                          rows, columns);
    } else {
        walk_from<SOURCE>(MatrixTiles<kTileM, kTileN, kBand>(rows, columns), counter, cover, owner, log, rows, columns);
    }
}

}  // namespace rtk
