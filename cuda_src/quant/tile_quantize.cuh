// Quantises one 128 x 128 tile of x, for kernels that find their tiles in different ways.
#pragma once
#include "common/reduce.cuh"
#include "ptx/forget.cuh"
#include "common/amax.cuh"
#include "quant/tile.cuh"

namespace rtk {

// Outputs of a tile: pointers to those of its first element.
template <typename F8>
struct TileOutput {
    F8* q;              // by rows
    i64 stride;
    float* scale;       // of row m at m * scale_step; one for the tile in quantize_tile_block
    i64 scale_step;
    F8* transposed;     // by columns
    i64 pitch;
    float* column_scale;  // one per column
};

// How much of the tile exists: the number of rows and columns from its first element on.
struct TileExtent {
    i64 rows, columns;
};

// 1 x 128 along rows (ROWS), 128 x 1 along columns (COLUMNS), or both. Three barriers with COLUMNS; the next tile may
// use the same scratch. CHOOSE: only outputs that are not null, uniformly across the block; extent and outputs are then
// in shared memory, and reread where they are used. `load(tile, raw)` reads what load_tile does. FEW_ROWS: tiles often
// have few rows, and a test for that pays off. STREAM: x is read repeatedly, so the cache should evict codes before it.
template <typename T, typename F8, bool ALIGNED16, bool ROWS, bool COLUMNS, bool CHOOSE, bool FEW_ROWS, bool STREAM,
          typename TileThreads = WholeBlock, typename Load>
RTK_DEVICE void quantize_loaded_tile(const TileExtent& extent, const Load& load, const TileOutput<F8>& out,
                                     TileScratch<16 / sizeof(T)>& scratch, bool pow2) {
    constexpr int N = 16 / sizeof(T);
    auto here = [&] {
        // Makes the compiler treat the thread index as new each time, so that values derived from it take no registers
        // in between.
        Raw<4> thread = {TileThreads::thread()};
        if constexpr (CHOOSE || !is_same<TileThreads, WholeBlock>::value) ptx::forget(thread);
        return Tile<N>(extent.rows, extent.columns, static_cast<int>(thread.w[0]));
    };
    // True if this warp has no row.
    auto idle = [&] {
        constexpr int kWarpRows = kWarp / Tile<N>::kLanes * kTileRows;
        return FEW_ROWS && static_cast<int>(TileThreads::thread()) / kWarp * kWarpRows >= static_cast<int>(extent.rows);
    };
    Raw<16> raw[kTileRows];
    load(here(), raw);
    using Max = WordMax<T>;
    u32 column_words[4] = {0, 0, 0, 0};
    float rows[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
        u32 row_word = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const u32 word = Max::finite(raw[r].w[w]);
            if constexpr (COLUMNS) column_words[w] = Max::larger(column_words[w], word);
            if constexpr (ROWS) row_word = Max::larger(row_word, word);
        }
        if constexpr (ROWS) rows[r] = Max::largest(row_word);
    }
    float columns[N];
    if constexpr (COLUMNS) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float v[Max::kPerWord];
            Max::unpacked(column_words[w], v);
#pragma unroll
            for (int i = 0; i < Max::kPerWord; ++i) columns[w * Max::kPerWord + i] = v[i];
        }
        if (!CHOOSE || out.transposed != nullptr) share_columns(here(), columns, scratch);
    }
    auto value = [&](int r, int i) { return element<T>(raw[r], i); };
    if (ROWS && (!CHOOSE || (out.q != nullptr && !idle()))) {
        const Tile<N> tile = here();
        const float inverse = row_scales<F8>(tile, rows, out.scale, out.scale_step, pow2);
        store_rows<ALIGNED16, STREAM>(tile, out.q, out.stride, inverse, value);
    }
    if (COLUMNS && (!CHOOSE || out.transposed != nullptr)) {
        if constexpr (ROWS) {
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) ptx::forget(raw[r]);
        }
        const Tile<N> tile = here();
        column_scales<F8, TileThreads>(tile, columns, scratch, out.column_scale, pow2);
        stage_columns<F8>(tile, scratch, columns, value);
        TileThreads::meet();
        store_columns<STREAM>(tile, scratch, out.transposed, out.pitch);
    }
}

template <typename T, typename F8, bool ALIGNED16, bool ROWS, bool COLUMNS, bool CHOOSE = false, typename TileThreads = WholeBlock>
RTK_DEVICE void quantize_tile(const TileExtent& extent, const T* x, i64 x_stride, const TileOutput<F8>& out,
                              TileScratch<16 / sizeof(T)>& scratch, bool pow2) {
    auto load = [&](const Tile<16 / sizeof(T)>& tile, Raw<16>(&raw)[kTileRows]) {
        load_tile<T, ALIGNED16>(tile, x, x_stride, raw);
    };
    quantize_loaded_tile<T, F8, ALIGNED16, ROWS, COLUMNS, CHOOSE, false, false, TileThreads>(extent, load, out, scratch, pow2);
}

// One scale for the tile, its codes by rows and, with COLUMNS, by columns too. `maxima` alternates between the
// halves of its scratch by `phase`.
template <typename T, typename F8, bool ALIGNED16, bool COLUMNS>
RTK_DEVICE void quantize_tile_block(const Tile<16 / sizeof(T)>& tile, const T* x, i64 x_stride,
                                    const TileOutput<F8>& out, TileScratch<16 / sizeof(T)>& scratch,
                                    GroupScratch<1>& maxima, int phase, bool pow2) {
    constexpr int N = 16 / sizeof(T);
    Raw<16> raw[kTileRows];
    load_tile<T, ALIGNED16>(tile, x, x_stride, raw);
    u32 amax_word = 0;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) amax_word = with_larger<T>(amax_word, raw[r]);
    const float max_abs = group_reduce<MaxNumber, false>(WordMax<T>::largest(amax_word), RowGroup(Tile<N>::kThreads),
                                                      maxima, phase);
    const float own = fp8_scale<F8>(max_abs, pow2);
    const float inverse = __frcp_rn(own);
    if (threadIdx.x == 0) *out.scale = own;
    Raw<N> codes[kTileRows];
    F8* place = out.q + tile.row * out.stride + tile.column;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r, place += out.stride) {
        float v[N];
        unpack<T, N>(raw[r], v);
        codes[r] = quantized<F8>(v, inverse);
        store_row<ALIGNED16>(tile, r, place, codes[r]);
    }
    if constexpr (COLUMNS) {
        stage_columns(tile, scratch, codes);
        __syncthreads();
        store_columns(tile, scratch, out.transposed, out.pitch);
    }
}

}  // namespace rtk
