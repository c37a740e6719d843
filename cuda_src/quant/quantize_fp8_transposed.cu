// fp8 with one scale per 128 rows of a column and transposed codes: q [cols, rows], scale [ceil(rows/128), cols].
// Recipe: common/fp8_scale.cuh. x has any row stride. One block per tile, numbered along the columns first.
#include "ptx/forget.cuh"
#include "quant/tile.cuh"

namespace rtk {

template <typename T, typename F8, bool WIDE>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, Tile<16 / sizeof(T)>::kBlocksPerSm)
    quantize_fp8_group_t(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 column_tiles,
                         i64 pow2) {
    constexpr int N = 16 / sizeof(T);
    __shared__ TileScratch<N> scratch;
    const u32 across = static_cast<u32>(column_tiles), down = blockIdx.x / across;
    const i64 row = static_cast<i64>(down) * kTileSide, column = static_cast<i64>(blockIdx.x - down * across) * kTileSide;
    const Tile<N> tile(rows - row, cols - column);

    Raw<16> raw[kTileRows];
    load_tile<T, WIDE>(tile, x + row * x_stride + column, x_stride, raw);
    float columns[N];
#pragma unroll
    for (int i = 0; i < N; ++i) columns[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
        float v[N];
        unpack<T, N>(raw[r], v);
        ptx::forget(raw[r]);
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = max_finite(columns[i], v[i]);
    }
    column_scales<F8>(tile, columns, scratch, scale + down * cols + column, pow2 != 0);
    stage_columns<F8>(tile, scratch, columns, [&](int r, int i) { return element<T>(raw[r], i); });
    __syncthreads();
    store_columns(tile, scratch, q + column * rows + row, rows);
}

}  // namespace rtk
