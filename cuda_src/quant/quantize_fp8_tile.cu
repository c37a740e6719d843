// fp8 with one scale per 128 columns of a row or per 128 x 128 block.
// Recipe: common/fp8_scale.cuh. x has any row stride; q is dense. Blocks are numbered along the columns first.
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "common/amax.cuh"
#include "quant/tile.cuh"

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

// 1 x 128. kLanes neighbouring lanes (a lane team) share a scale group. A warp has kSets groups per lane team: kAcross
// times those of its lane teams side by side, in each of kSets / kAcross rows; so it stores the scales of neighbouring
// groups. The warps of a block are stacked along the rows. The scale of row m, group j goes to scale[m * scale_row + j *
// scale_group].
template <typename T, typename F8, int VEC>
__global__ void __launch_bounds__(256, 4)
    quantize_fp8_group(const T* x, F8* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 scale_row,
                       i64 scale_group, i64 column_tiles, i64 pow2) {
    constexpr int kLanes = kGroup / VEC, kLaneTeams = kWarp / kLanes;
    constexpr int kVectors = kGroup / (kLanes * VEC);
    constexpr int kSets = 8, kAcross = 32 / VEC, kDown = kSets / kAcross;
    constexpr int kAside = kLaneTeams * kGroup;
    const TileIndex tile(column_tiles);
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane_team = static_cast<int>(threadIdx.x) % kWarp / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const i64 first_group = tile.column * (kAcross * kLaneTeams) + lane_team, first_column = first_group * kGroup + lane * VEC;
    const i64 first_row = (tile.row * (static_cast<int>(blockDim.x) / kWarp) + warp) * kDown;
    const int rows_here = static_cast<int>(min(rows - first_row, static_cast<i64>(kDown)));
    const int columns_here = static_cast<int>(min(cols - first_column, static_cast<i64>(kAcross * kAside)));

    auto inside = [&](int k, int p) {
        return k / kAcross < rows_here && k % kAcross * kAside + p * kLanes * VEC < columns_here;
    };
    Raw<sizeof(T) * VEC> raw[kSets][kVectors];
    const T* from = x + first_row * x_stride + first_column;
#pragma unroll
    for (int k = 0; k < kSets; ++k) {
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            clear(raw[k][p]);
            if (inside(k, p)) raw[k][p] = load_raw<T, VEC>(from + k % kAcross * kAside + p * kLanes * VEC);
        }
        if (k % kAcross == kAcross - 1) from += x_stride;
    }
    float max_abs[kSets];
#pragma unroll
    for (int k = 0; k < kSets; ++k) {
        u32 word = 0;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) word = with_larger<T>(word, raw[k][p]);
        max_abs[k] = WordMax<T>::largest(word);
    }
    // Lane k computes and stores the scale of set k.
    const float own = fp8_scale<F8>(scattered_max<kSets, kLanes>(max_abs), pow2 != 0);
    const float own_inverse = __frcp_rn(own);
    const int own_row = lane / kAcross, own_group = lane % kAcross * kLaneTeams;
    if (lane < kSets && own_row < rows_here && own_group * kGroup < columns_here + lane * VEC)
        scale[(first_row + own_row) * scale_row + (first_group + own_group) * scale_group] = own;
    F8* to = q + first_row * cols + first_column;
#pragma unroll
    for (int k = 0; k < kSets; ++k) {
        const float inverse = __shfl_sync(0xffffffffu, own_inverse, k, kLanes);
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            if (inside(k, p)) {
                float v[VEC];
                unpack<T, VEC>(raw[k][p], v);
                ptx::st<VEC>(to + k % kAcross * kAside + p * kLanes * VEC, quantized<F8>(v, inverse));
            }
        }
        if (k % kAcross == kAcross - 1) to += cols;
    }
}

// 128 x 128, the tile in the registers of one block. Scale [ceil(rows/128), column_tiles].
template <int VEC>
constexpr int kBlockThreads = kGroup * kGroup / (8 * VEC);

template <typename T, typename F8, int VEC>
__global__ void __launch_bounds__(kBlockThreads<VEC>, 1024 / kBlockThreads<VEC>)
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
        clear(raw[p]);
        if (inside && row < rows) raw[p] = load_raw<T, VEC>(x + row * x_stride + column);
    }
    u32 max_abs = 0;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) max_abs = with_larger<T>(max_abs, raw[p]);
    const float amax =
        group_reduce<MaxNumber, false>(WordMax<T>::largest(max_abs), RowGroup(kBlockThreads<VEC>), scratch, 0);
    const float block_scale = fp8_scale<F8>(amax, pow2 != 0);
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
