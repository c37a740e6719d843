// Gated linear units and their gradients as fp8 codes, by rows (1 x 128), transposed by columns (128 x 1), or both, of
// all rows or of each expert's. y = act(gate) * up * weight is computed in fp32 and quantised without another rounding.
// Recipe: common/fp8_scale.cuh. Layouts and tiles: act/glu_tile.cuh.
//
// A block works on tiles blockIdx.x, blockIdx.x + gridDim.x, ..., numbered along the columns first.
#include "act/activations.cuh"
#include "act/glu_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
inline constexpr int kForwardWidth = 16 / sizeof(T);
// Resident at once: one stores while another computes.
template <typename T, bool WIDE>
inline constexpr int kForwardBlocks = WIDE && sizeof(T) == 2 ? 2 : 1;
inline constexpr int kBackwardWidth = 4;

template <typename T, typename Act, bool WIDE>
__global__ void __launch_bounds__(Tile<kForwardWidth<T>>::kThreads, kForwardBlocks<T, WIDE>)
    glu_fp8_fwd(const T* gate, const T* up, const void* weight, const void* counts, e4m3* q, float* scale, e4m3* q_t,
                float* scale_t, i64 rows, i64 cols, i64 gate_stride, i64 up_stride, i64 weight_wide, i64 experts,
                i64 counts_wide, i64 row_blocks, i64 by_group, i64 slots, i64 pow2) {
    constexpr int N = kForwardWidth<T>;
    __shared__ TileScratch<N> scratch;
    extern __shared__ __align__(16) u8 memory[];
    const u32 across = static_cast<u32>((cols + kTileSide - 1) / kTileSide);
    const u32 tiles = static_cast<u32>(row_blocks) * across;
    const Quantized out = {q, scale, q_t, scale_t, cols, by_group != 0, pow2 != 0};
    const StagedTiles<T, N, 2, WIDE> in = {
        {gate, up == nullptr ? gate + cols : up}, {gate_stride, up_stride}, memory, static_cast<int>(slots)};
    RowBlocks blocks(counts, counts_wide, experts, rows);
    float weights = 1.0f;  // one per lane

    auto fetch = [&](u32 index) {
        const u32 down = index / across, column = (index - down * across) * kTileSide;
        const RowBlock block = blocks.at(down);
        const Tile<N> tile(block.rows, cols - column);
        weights = lane_weight<T>(tile, weight, weight_wide, block.first);
        in.fetch(tile, block.first, column);
    };
    u32 index = blockIdx.x;
    if (index < tiles) fetch(index);
#pragma unroll 1
    while (index < tiles) {
        const u32 down = index / across, column = (index - down * across) * kTileSide;
        const RowBlock block = blocks.at(down);
        const Tile<N> tile(block.rows, cols - column);
        float y[kTileRows][N];
        in.wait(tile, 0, block.first, column);
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            const float w = row_weight(tile, weights, r);
            in.read(tile, 0, r, y[r]);
#pragma unroll
            for (int i = 0; i < N; ++i) y[r][i] = Act::template at<sizeof(T) == 2>(y[r][i]).value * w;
            if constexpr (sizeof(T) == 4) settle(y[r]);
        }
        in.wait(tile, 1, block.first, column);
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            float u[N];
            in.read(tile, 1, r, u);
#pragma unroll
            for (int i = 0; i < N; ++i) y[r][i] *= partner<Act>(u[i]).value;
        }
        index += gridDim.x;
        if (index < tiles) {
            __syncwarp();
            fetch(index);
        }
        if (block.rows > 0) {
            quantize_values<WIDE>(tile, block, down, column, y, out, scratch);
        } else {
            clear_scales(down, column, cols, scale_t);
        }
    }
}

}  // namespace rtk
