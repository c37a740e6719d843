// fp8 with one scale per 128 rows of a column and transposed codes: q [cols, rows], scale [ceil(rows/128), cols].
// Recipe: common/fp8_scale.cuh. x has any row stride.
#include "common/fp8_scale.cuh"
#include "quant/fp8_transposed.cuh"

namespace rtk {

constexpr int kQuantizeWarps = 4;
constexpr int kStageStride = kTileRows + 16;  // one column of codes; the 16 spread the columns over the banks

// Codes leave in 16-byte pieces when `whole_codes` (rows % 16 == 0). Otherwise columns begin at any byte, and each
// warp passes its tile through shared memory so that its lanes write neighbouring bytes.
template <typename T, typename F8>
__global__ void __launch_bounds__(kWarp* kQuantizeWarps)
    quantize_fp8_group_t(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 column_tiles,
                         i64 whole_input, i64 whole_codes, i64 pow2) {
    constexpr int N = 16 / sizeof(T);
    __shared__ __align__(16) u8 stage[kQuantizeWarps][4 * N * kStageStride];
    const TransposedTile<N> tile(rows, cols, column_tiles);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;

    Raw<16> raw[kStripRows];
#pragma unroll
    for (int r = 0; r < kStripRows; ++r)
        raw[r] = load_part<T, N>(x + (tile.row + r) * x_stride + tile.column,
                                 r < tile.rows_here ? tile.columns_here : 0, whole_input != 0);
    float amax[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float column[kStripRows];
#pragma unroll
        for (int r = 0; r < kStripRows; ++r) {
            float v[N];
            unpack<T, N>(raw[r], v);
            column[r] = v[i];
        }
        amax[i] = finite_amax(column);
    }
    const int mine = tile.strip % N;  // the column this lane works out the scale of
    const float own = fp8_scale<F8>(strips_max(amax, tile.strip), pow2 != 0);
    if (tile.strip < N && mine < tile.columns_here) scale[tile.tile_row * cols + tile.column + mine] = own;
    const float own_inverse = __frcp_rn(own);

    u8* warp_stage = stage[threadIdx.x / kWarp];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float inverse = __shfl_sync(0xffffffffu, own_inverse, i, kStrips);
        float column[kStripRows];
#pragma unroll
        for (int r = 0; r < kStripRows; ++r) {
            float v[N];
            unpack<T, N>(raw[r], v);
            column[r] = v[i];
        }
        const Raw<16> codes = quantized<F8>(column, inverse);
        if (whole_codes != 0) {
            if (i < tile.columns_here && tile.rows_here > 0)
                ptx::st<16>(q + (tile.column + i) * rows + tile.row, codes);
        } else {
            const int place = (lane / kStrips * N + i) * kStageStride + tile.strip * kStripRows;
            *reinterpret_cast<Raw<16>*>(warp_stage + place) = codes;
        }
    }
    if (whole_codes != 0) return;
    __syncwarp();
    const i64 first_column = tile.column - lane / kStrips * N, first_row = tile.tile_row * kTileRows;
    for (int c = 0; c < 4 * N && first_column + c < cols; ++c)
#pragma unroll
        for (int r = lane; r < kTileRows; r += kWarp)
            if (first_row + r < rows)
                q[(first_column + c) * rows + first_row + r].bits = warp_stage[c * kStageStride + r];
}

}  // namespace rtk
