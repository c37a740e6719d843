// fp8 with one scale per 128 rows of a column and transposed codes: q [cols, rows], scale [ceil(rows/128), cols].
// Recipe: common/fp8_scale.cuh. x has any row stride.
#include "common/fp8_scale.cuh"
#include "ptx/forget.cuh"
#include "quant/fp8_transposed.cuh"

namespace rtk {

constexpr int kQuantizeWarps = 4;
constexpr int kStageStride = kTileRows + 16;  // one column of codes; the 16 spread the columns over the banks

// WHOLE: 16-byte accesses on both sides (rows % 16 == 0, columns of x as the addresses allow). Otherwise x is read by
// elements if `whole_input` is 0, and since columns of codes begin at any byte, each warp passes its tile through
// shared memory so that its lanes write neighbouring bytes.
template <typename T, typename F8, bool WHOLE>
__global__ void __launch_bounds__(kWarp* kQuantizeWarps, WHOLE ? 5 : 3)
    quantize_fp8_group_t(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 column_tiles,
                         i64 whole_input, i64 pow2) {
    constexpr int N = 16 / sizeof(T);
    __shared__ __align__(16) u8 stage[WHOLE ? 1 : kQuantizeWarps][4 * N * kStageStride];
    const TransposedTile<N> tile(rows, cols, column_tiles);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;

    Raw<16> raw[kStripRows];
#pragma unroll
    for (int r = 0; r < kStripRows; ++r)
        raw[r] = load_part<T, N>(x + (tile.row + r) * x_stride + tile.column,
                                 r < tile.rows_here ? tile.columns_here : 0, WHOLE || whole_input != 0);
    float amax[N];
#pragma unroll
    for (int i = 0; i < N; ++i) amax[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kStripRows; ++r) {
        float v[N];
        unpack<T, N>(raw[r], v);
        ptx::forget(raw[r]);
#pragma unroll
        for (int i = 0; i < N; ++i) amax[i] = max_finite(amax[i], v[i]);
    }
    const int mine = tile.strip % N;  // the column this lane works out the scale of
    const float own = fp8_scale<F8>(strips_max(amax, tile.strip), pow2 != 0);
    if (tile.strip < N && mine < tile.columns_here) scale[tile.tile_row * cols + tile.column + mine] = own;
    const float own_inverse = __frcp_rn(own);

    u8* warp_stage = stage[WHOLE ? 0 : threadIdx.x / kWarp];
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
        if constexpr (WHOLE) {
            if (i < tile.columns_here && tile.rows_here > 0)
                ptx::st<16>(q + (tile.column + i) * rows + tile.row, codes);
        } else {
            const int place = (lane / kStrips * N + i) * kStageStride + tile.strip * kStripRows;
            *reinterpret_cast<Raw<16>*>(warp_stage + place) = codes;
        }
    }
    if constexpr (!WHOLE) {
        __syncwarp();
        const i64 first_column = tile.column - lane / kStrips * N, first_row = tile.tile_row * kTileRows;
        for (int c = 0; c < 4 * N && first_column + c < cols; ++c)
#pragma unroll
            for (int r = lane; r < kTileRows; r += kWarp)
                if (first_row + r < rows)
                    q[(first_column + c) * rows + first_row + r].bits = warp_stage[c * kStageStride + r];
    }
}

}  // namespace rtk
