// RMS normalisation to e4m3 codes in both layouts with one read of x. A cluster of CLUSTER blocks owns 128 rows: block k
// holds their tiles k, k + CLUSTER, ... (at most TILES of 128 columns) in shared memory while the row sums pass between
// the blocks, then quantises each along rows and along columns.  v = x * rstd * (offset + weight) in fp32 (recipe:
// common/fp8_scale.cuh). x [rows, cols] has any row stride that keeps 16-byte accesses aligned.
#include "norm/gain.cuh"
#include "norm/norm_quant_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

// Sums of COUNT numbers over `LANES` neighbouring lanes, scattered: each lane gets that of number lane % COUNT.
template <int COUNT, int LANES>
RTK_DEVICE float scattered_sum(float (&v)[COUNT]) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2) {
        const bool upper = (lane & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, given, half);
        }
    }
#pragma unroll
    for (int offset = COUNT; offset < LANES; offset *= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    return v[0];
}

// Grid: CLUSTER blocks per 128 rows. Dynamic shared memory: TILES * 32 KB of x. Every thread copies, and later reads, the
// same 8 x 8 elements of each tile (quant/tile.cuh), so waiting for its own copies is enough.
template <typename T, int CLUSTER, int TILES>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(256, TILES <= 2 ? 2 : 1)
    rms_norm_fp8_cluster(const T* x, const void* weight, float* rstd_out, e4m3* q, float* scale, e4m3* q_t,
                         float* scale_t, T* y, i64 rows, i64 cols, i64 x_stride, i64 scale_row, i64 scale_group,
                         i64 column_tiles, i64 weight_wide, i64 pow2, double eps, double offset) {
    constexpr int N = 8, kThreads = Tile<N>::kThreads, kSlot = kThreads * 16;  // bytes between a thread's pieces
    extern __shared__ __align__(16) u8 memory[];
    __shared__ TileScratch<N> scratch;
    __shared__ float partial[CLUSTER][kTileSide];
    __shared__ __align__(16) float gains[TILES][kTileSide];
    const int thread = static_cast<int>(threadIdx.x), rank = ptx::cluster_rank();
    const u32 down = blockIdx.x / CLUSTER;
    const int own_tiles = (static_cast<int>(column_tiles) - rank + CLUSTER - 1) / CLUSTER;
    const i64 row = static_cast<i64>(down) * kTileSide;
    const ptx::SharedAddress slots = ptx::shared_address(memory) + thread * 16;
    ptx::cluster_arrive();

#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (t < own_tiles) {
            const i64 column = static_cast<i64>(rank + t * CLUSTER) * kTileSide;
            const Tile<N> tile(rows - row, cols - column);
            const T* p = x + (row + tile.row) * x_stride + column + tile.column;
#pragma unroll
            for (int r = 0; r < kTileRows; ++r, p += x_stride) {
                const int at = (t * kTileRows + r) * kSlot;
                if (r < tile.rows_here && tile.columns_here > 0) {
                    ptx::cp_async_16(slots + at, p);
                } else {
                    *reinterpret_cast<Raw<16>*>(memory + thread * 16 + at) = Raw<16>{0, 0, 0, 0};
                }
            }
        }
        ptx::cp_async_commit();
    }
    for (int i = thread; i < TILES * kTileSide; i += kThreads) {
        const i64 column = static_cast<i64>(rank + i / kTileSide * CLUSTER) * kTileSide + i % kTileSide;
        float gain[1] = {1.0f};
        if (column < cols) {
            if (weight_wide != 0) {
                load_gain<float, 1>(static_cast<const float*>(weight), column, static_cast<float>(offset), gain);
            } else {
                load_gain<T, 1>(static_cast<const T*>(weight), column, static_cast<float>(offset), gain);
            }
        }
        gains[i / kTileSide][i % kTileSide] = gain[0];
    }

    float squares[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) squares[r] = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (t == 0) ptx::cp_async_wait<TILES - 1>();
        if (t == 1) ptx::cp_async_wait<TILES >= 2 ? TILES - 2 : 0>();
        if (t == 2) ptx::cp_async_wait<TILES >= 3 ? TILES - 3 : 0>();
        if (t >= 3) ptx::cp_async_wait<0>();
        if (t < own_tiles) {
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                float h[N];
                unpack<T, N>(ptx::ld_shared_16(slots + (t * kTileRows + r) * kSlot), h);
#pragma unroll
                for (int i = 0; i < N; ++i) squares[r] += h[i] * h[i];
            }
        }
    }
    const float own_square = scattered_sum<kTileRows, Tile<N>::kLanes>(squares);

    // Lane l of a team has row l % 8; the lanes of each half tell half of the blocks.
    const int lane = thread % Tile<N>::kLanes, own_row = thread / Tile<N>::kLanes * kTileRows + lane % kTileRows;
    const ptx::SharedAddress place = ptx::shared_address(&partial[rank][own_row]);
    ptx::cluster_wait();
#pragma unroll
    for (int k = 0; k < CLUSTER; k += 2) ptx::st_cluster(place, k + lane / kTileRows, own_square);
    ptx::cluster_arrive();
    ptx::cluster_wait();  // from here on no block reaches into another
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < CLUSTER; ++k) square += partial[k][own_row];
    const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
    if (rank == 0 && lane < kTileRows && row + own_row < rows) rstd_out[row + own_row] = rstd;

    for (int t = 0; t < own_tiles; ++t) {
        const u32 across = static_cast<u32>(rank + t * CLUSTER);
        const NormTileOutput<T> out = {q, scale, q_t, scale_t, y, rows, cols, scale_row, scale_group, down, across};
        const Tile<N> tile(rows - row, cols - out.column());
        Raw<16> raw[kTileRows];
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) raw[r] = ptx::ld_shared_16(slots + (t * kTileRows + r) * kSlot);
        float gain[N];
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&gains[t][tile.column + i]);
            gain[i] = four.x, gain[i + 1] = four.y, gain[i + 2] = four.z, gain[i + 3] = four.w;
        }
        quantize_normalised<T, true, true, true>(tile, raw, gain, rstd, out, scratch, pow2 != 0);
    }
}

}  // namespace rtk
