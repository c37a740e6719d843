// fp8 with transposed codes, alone or with those of the rows. Recipe: common/fp8_scale.cuh. x [rows, cols] has any row
// stride; q [rows, cols] and q_t [cols, rows] are dense. One block per tile, numbered along the columns first.
#include "quant/tile_quantize.cuh"

namespace rtk {

#define RTK_TILE_BOUNDS(T) __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, Tile<16 / sizeof(T)>::kBlocksPerSm)

struct TilePlace {
    i64 down, across;   // in tiles
    i64 row, column;

    RTK_DEVICE explicit TilePlace(i64 column_tiles) {
        const u32 tiles_across = static_cast<u32>(column_tiles), above = blockIdx.x / tiles_across;
        down = above;
        across = blockIdx.x - above * tiles_across;
        row = down * kTileSide;
        column = across * kTileSide;
    }
};

// One scale per 128 rows of a column: scale [ceil(rows/128), cols].
template <typename T, typename F8>
__global__ void RTK_TILE_BOUNDS(T)
    quantize_fp8_group_t(const T* x, F8* q_t, float* scale, i64 rows, i64 cols, i64 x_stride, i64 column_tiles,
                         i64 pow2) {
    __shared__ TileScratch<16 / sizeof(T)> scratch;
    const TilePlace at(column_tiles);
    TileOutput<F8> out;
    out.transposed = q_t + at.column * rows + at.row;
    out.pitch = rows;
    out.column_scale = scale + at.down * cols + at.column;
    quantize_tile<T, F8, true, false, true>({rows - at.row, cols - at.column}, x + at.row * x_stride + at.column, x_stride,
                                            out, scratch, pow2 != 0);
}

// The same plus one scale per 128 columns of a row; the scale of row m, group j at scale[m * scale_row + j *
// scale_group]. A block has two tiles of 16-bit numbers side by side, and writes the scales of their rows together:
// separately they would be 6 % of all requests to L2.
template <typename T>
constexpr int kTilesPerBlock = sizeof(T) == 2 ? 2 : 1;

template <typename T, typename F8>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads* kTilesPerBlock<T>, 2)
    quantize_fp8_group_both(const T* x, F8* q, float* scale, F8* q_t, float* scale_t, i64 rows, i64 cols, i64 x_stride,
                            i64 scale_row, i64 scale_group, i64 pow2) {
    constexpr int kTiles = kTilesPerBlock<T>, kThreads = Tile<16 / sizeof(T)>::kThreads;
    using TileThreads = PartOfBlock<kThreads>;
    __shared__ TileScratch<16 / sizeof(T)> scratch[kTiles];
    __shared__ float scales[kTileSide * kTiles];
    const u32 down = blockIdx.y + blockIdx.z * gridDim.y, first = blockIdx.x * kTiles, across = first + TileThreads::index();
    const i64 row = static_cast<i64>(down) * kTileSide, column = static_cast<i64>(across) * kTileSide;
    if (row < rows && column < cols) {
        const TileOutput<F8> out = {q + row * cols + column,
                                    cols,
                                    scales + TileThreads::index(),
                                    kTiles,
                                    q_t + column * rows + row,
                                    rows,
                                    scale_t + down * cols + column};
        quantize_tile<T, F8, true, true, true, false, TileThreads>({rows - row, cols - column}, x + row * x_stride + column,
                                                            x_stride, out, scratch[TileThreads::index()], pow2 != 0);
    }
    __syncthreads();
    const bool side_by_side = scale_group == 1;
    const u32 thread = threadIdx.x, m = side_by_side ? thread / kTiles : thread % kTileSide;
    const u32 j = side_by_side ? thread % kTiles : thread / kTileSide;
    if (thread < kTileSide * kTiles && row + m < rows && (first + j) * static_cast<i64>(kTileSide) < cols)
        ptx::st_last<4>(scale + (row + m) * scale_row + (first + j) * scale_group,
                        Raw<4>{__float_as_uint(scales[m * kTiles + j])});
}

// One scale per 128 x 128 for both: scale [ceil(rows/128), column_tiles].
template <typename T, typename F8>
__global__ void RTK_TILE_BOUNDS(T)
    quantize_fp8_block_both(const T* x, F8* q, float* scale, F8* q_t, i64 rows, i64 cols, i64 x_stride,
                            i64 column_tiles, i64 pow2) {
    __shared__ TileScratch<16 / sizeof(T)> scratch;
    __shared__ GroupScratch<1> maxima;
    const TilePlace at(column_tiles);
    const Tile<16 / sizeof(T)> tile(rows - at.row, cols - at.column);
    const TileOutput<F8> out = {q + at.row * cols + at.column, cols, scale + blockIdx.x,    0,
                                q_t + at.column * rows + at.row, rows, nullptr};
    quantize_tile_block<T, F8, true, true>(tile, x + at.row * x_stride + at.column, x_stride, out, scratch, maxima, 0,
                                           pow2 != 0);
}

#undef RTK_TILE_BOUNDS

}  // namespace rtk
