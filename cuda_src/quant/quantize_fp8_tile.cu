// fp8 with one scale per 128 columns of a row, per 128 x 128 block, or per 128 rows of a column with transposed codes.
// Recipe: common/fp8_scale.cuh. x has any row stride; q is dense. Blocks are numbered along the columns first.
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/forget.cuh"

namespace rtk {

constexpr int kGroup = 128;

struct TileIndex {
    i64 row, column;  // in tiles

    RTK_DEVICE explicit TileIndex(i64 column_tiles) {
        const u32 across = static_cast<u32>(column_tiles), down = blockIdx.x / across;
        row = down;
        column = blockIdx.x - down * across;
    }
};

// 1 x 128. kLanes neighbouring lanes share a group and hold it for four rows. The teams of a block lie side by side in
// `across` (a power of two) groups, then below one another. The scale of row m, group j goes to
// scale[m * scale_row + j * scale_group].
template <typename T, typename F8, int VEC>
__global__ void __launch_bounds__(256)
    quantize_fp8_group(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 scale_row,
                       i64 scale_group, i64 across, i64 column_tiles, i64 pow2) {
    constexpr int kLanes = VEC == 1 ? kWarp : kGroup / VEC;
    constexpr int kPieces = kGroup / (kLanes * VEC);
    constexpr int kRows = 4;
    const TileIndex tile(column_tiles);
    const int team = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
    const int wide = static_cast<int>(across), teams = static_cast<int>(blockDim.x) / kLanes;
    const i64 group = tile.column * wide + (team & (wide - 1));
    const i64 first_row = (tile.row * (teams / wide) + team / wide) * kRows;

    auto column_of = [&](int p) { return group * kGroup + (p * kLanes + lane) * VEC; };
    Raw<sizeof(T) * VEC> raw[kRows][kPieces];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            raw[r][p] = {};
            if (first_row + r < rows && column_of(p) < cols)
                raw[r][p] = load_raw<T, VEC>(x + (first_row + r) * x_stride + column_of(p));
        }
    float scales[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float amax = 0.0f;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            float v[VEC];
            unpack<T, VEC>(raw[r][p], v);
            ptx::forget(raw[r][p]);
            amax = fmaxf(amax, finite_amax(v));
        }
        scales[r] = fp8_scale<F8>(warp_reduce<MaxNumber>(amax, kLanes), pow2 != 0);
    }
    // Lane r stores the scale of row r, so that four of them leave in one instruction.
    const float own = lane == 0 ? scales[0] : lane == 1 ? scales[1] : lane == 2 ? scales[2] : scales[3];
    if (lane < kRows && first_row + lane < rows && group * kGroup < cols)
        scale[(first_row + lane) * scale_row + group * scale_group] = own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float inverse = __frcp_rn(scales[r]);
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            if (first_row + r < rows && column_of(p) < cols) {
                float v[VEC];
                unpack<T, VEC>(raw[r][p], v);
                ptx::st<VEC>(q + (first_row + r) * cols + column_of(p), quantized<F8>(v, inverse));
            }
        }
    }
}

// 128 x 128, the tile in the registers of one block. Scale [ceil(rows/128), column_tiles].
template <int VEC>
constexpr int kBlockThreads = VEC == 1 ? 1024 : kGroup * kGroup / (8 * VEC);

template <typename T, typename F8, int VEC>
__global__ void __launch_bounds__(kBlockThreads<VEC>)
    quantize_fp8_block(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 column_tiles, i64 pow2) {
    constexpr int kLanes = kGroup / VEC, kStep = kBlockThreads<VEC> / kLanes, kPasses = kGroup / kStep;
    __shared__ GroupScratch<1> scratch;
    const TileIndex tile(column_tiles);
    const i64 column = tile.column * kGroup + static_cast<int>(threadIdx.x) % kLanes * VEC;
    const i64 first_row = tile.row * kGroup + static_cast<int>(threadIdx.x) / kLanes;
    const bool inside = column < cols;

    Raw<sizeof(T) * VEC> raw[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
        const i64 row = first_row + p * kStep;
        raw[p] = {};
        if (inside && row < rows) raw[p] = load_raw<T, VEC>(x + row * x_stride + column);
    }
    float amax[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
        float v[VEC];
        unpack<T, VEC>(raw[p], v);
        ptx::forget(raw[p]);
        amax[0] = fmaxf(amax[0], finite_amax(v));
    }
    amax[0] = group_reduce<MaxNumber, false>(amax[0], RowGroup(kBlockThreads<VEC>), scratch, 0);
    const float block_scale = fp8_scale<F8>(amax[0], pow2 != 0);
    const float inverse = __frcp_rn(block_scale);
    if (threadIdx.x == 0) scale[tile.row * column_tiles + tile.column] = block_scale;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
        const i64 row = first_row + p * kStep;
        if (inside && row < rows) {
            float v[VEC];
            unpack<T, VEC>(raw[p], v);
            ptx::st<VEC>(q + row * cols + column, quantized<F8>(v, inverse));
        }
    }
}

}  // namespace rtk
