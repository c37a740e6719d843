// Gated linear units and their gradients as fp8 codes, by rows (1 x 128), transposed by columns (128 x 1), or both, of
// all rows or of each expert's. y = act(gate) * up * weight is computed in fp32 and quantised without another rounding.
// Recipe: common/fp8_scale.cuh. Layouts and tiles: act/glu_tile.cuh.
//
// Inputs are 16-byte aligned and have `pitch` readable columns, a multiple of 8, of which `cols` count; the others must
// be 0. Codes by rows and dx have the pitch too.
//
// A block works on tiles blockIdx.x, blockIdx.x + gridDim.x, ..., numbered along the columns first.
#include "act/activations.cuh"
#include "act/glu_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Columns of a thread: fp32 gradients leave no registers for more than 4.
template <typename T>
inline constexpr int kWidth = 16 / sizeof(T);

// Resident forward blocks, where shared memory has room: one stores while another computes.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
template <typename T>
inline constexpr int kForwardBlocks = sizeof(T) == 2 ? 2 : 1;
#else
template <typename T>
inline constexpr int kForwardBlocks = 1;
#endif

template <typename T, typename Act>
__global__ void __launch_bounds__(Tile<kWidth<T>>::kThreads, kForwardBlocks<T>)
    glu_fp8_fwd(const T* gate, const T* up, const void* weight, const void* counts, e4m3* q, float* scale, e4m3* q_t,
                float* scale_t, i64 rows, i64 cols, i64 pitch, i64 gate_stride, i64 up_stride, i64 up_offset,
                i64 weight_wide, i64 experts, i64 count_width, i64 row_blocks, i64 by_group, i64 slots, i64 table_bytes,
                i64 pow2) {
    constexpr int N = kWidth<T>;
    __shared__ TileScratch<N> scratch;
    __shared__ TilePlace kept[Tile<N>::kWarps][2];
    extern __shared__ __align__(16) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, cols, pitch, cols, by_group != 0, pow2 != 0};
    const StagedTiles<T, N, 2> in = {
        {gate, up + up_offset}, {gate_stride, up_stride}, memory + table_bytes, static_cast<int>(slots)};
    const TilePlaces places(memory, counts, count_width, experts, rows, cols);
    const KeptPlaces at = {kept[threadIdx.x / kWarp]};
    const u32 tiles = places.count();
    u32 index = blockIdx.x;
    int turn = 0;
    float weights = 1.0f;  // one per lane

    auto tile_at = [&](const TilePlace& place) {
        return Tile<N>(place.rows, pitch - place.column, unknown(static_cast<int>(threadIdx.x)));
    };
    auto fetch = [&] {
        const TilePlace place = places.find(index);
        at.keep(turn, place);
        const Tile<N> tile = tile_at(place);
        weights = lane_weight<T>(tile, weight, weight_wide, place.row);
        in.fetch(tile, place);
    };
    if (index < tiles) fetch();
#pragma unroll 1
    while (index < tiles) {
        const int now = turn;
        const TilePlace place = at[now];
        const Tile<N> tile = tile_at(place);
        const float w = weights;
        float y[kTileRows][N];
        auto advance = [&] {
            index += gridDim.x;
            turn ^= 1;
            __syncwarp();
            if (index < tiles) fetch();
        };
        if constexpr (sizeof(T) == 2) {
            // Packed, all inputs fit into registers: the next tile can be copied while this one is worked on.
            Raw<sizeof(T) * N> gate_raw[kTileRows], up_raw[kTileRows];
            in.read_all(tile, 0, place, gate_raw);
            in.read_all(tile, 1, place, up_raw);
            advance();
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                const float row_w = row_weight(tile, w, r);
                float u[N];
                ptx::forget(gate_raw[r]), ptx::forget(up_raw[r]);
                unpack<T, N>(gate_raw[r], y[r]);
                unpack<T, N>(up_raw[r], u);
#pragma unroll
                for (int i = 0; i < N; ++i)
                    y[r][i] = Act::template at<true>(y[r][i]).value * row_w * partner<Act>(u[i]).value;
            }
        } else {
            in.wait(tile, 0, place);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                const float row_w = row_weight(tile, w, r);
                in.read(tile, 0, r, y[r]);
#pragma unroll
                for (int i = 0; i < N; ++i) y[r][i] = Act::template at<false>(y[r][i]).value * row_w;
            }
            in.wait(tile, 1, place);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                float u[N];
                in.read(tile, 1, r, u);
#pragma unroll
                for (int i = 0; i < N; ++i) y[r][i] *= partner<Act>(u[i]).value;
            }
            advance();
        }
        TileMaxima<N> most(tile, y);
        // From here on, each part asks again where it is.
        const TilePlace here = at[now];
        quantize_values(tile_at(here), here, false, y, most, out, scratch);
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

// Sums of the thread's numbers over the lanes of a row, scattered: each lane gets that of its row lane % 8.
template <int N>
RTK_DEVICE float scattered_sum(const Tile<N>& tile, float (&v)[kTileRows]) {
#pragma unroll
    for (int half = kTileRows / 2; half > 0; half /= 2) {
        const bool upper = (tile.thread & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, given, half);
        }
    }
#pragma unroll
    for (int offset = kTileRows; offset < Tile<N>::kLanes; offset *= 2)
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    return v[0];
}

// Stores them; `place`: that of the tile's first row.
template <int N>
RTK_DEVICE void store_sums(const Tile<N>& tile, float* place, float sum) {
    const int row = tile.thread % kTileRows;
    if (tile.thread % Tile<N>::kLanes < kTileRows && row < tile.rows_here) place[tile.row + row] = sum;
}

// The thread's rows of a dense matrix of T; `place`: that of the tile's first element.
template <typename T, int N>
RTK_DEVICE void store_values(const Tile<N>& tile, T* place, i64 stride, const float (&v)[kTileRows][N]) {
    place += tile.row * stride + tile.column;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r, place += stride)
        if (r < tile.rows_here && tile.columns_here > 0) store<T, N>(place, v[r]);
}

// Gradients of N columns of a row, from the gate in `dgate`, the incoming gradient in `dup`, and up. Returns their part
// of the weight's gradient.
template <typename Act, bool kFast, int N>
RTK_DEVICE float gradients(float (&dgate)[N], float (&dup)[N], const float (&up)[N], float w) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const ValueSlope gated = Act::template at<kFast>(dgate[i]), other = partner<Act>(up[i]);
        const float g = dup[i], weighted = g * w;
        sum += g * gated.value * other.value;
        dgate[i] = weighted * other.value * gated.slope;
        dup[i] = weighted * gated.value * other.slope;
    }
    return sum;
}

// The gradient of [gate | up], [rows, 2 * cols], from that of y: its codes, the gradient itself (dx, of T), or both;
// and what each 128 columns add to the gradient of the weight (partial [ceil(cols/128), rows]). Any of them may be null.
// For codes by rows cols must be a multiple of 128, or groups would reach from gate into up.
template <typename T, typename Act>
__global__ void __launch_bounds__(Tile<kWidth<T>>::kThreads)
    glu_fp8_bwd(const T* dy, const T* gate, const T* up, const void* weight, const void* counts, e4m3* q, float* scale,
                e4m3* q_t, float* scale_t, T* dx, float* partial, i64 rows, i64 cols, i64 pitch, i64 dy_stride,
                i64 gate_stride, i64 up_stride, i64 up_offset, i64 weight_wide, i64 experts, i64 count_width,
                i64 row_blocks, i64 by_group, i64 slots, i64 table_bytes, i64 pow2) {
    constexpr int N = kWidth<T>;
    __shared__ TileScratch<N> scratch;
    __shared__ TilePlace kept[Tile<N>::kWarps][2];
    extern __shared__ __align__(16) u8 memory[];
    ptx::launch_dependents();
    const Quantized out = {q, scale, q_t, scale_t, 2 * cols, 2 * pitch, cols, by_group != 0, pow2 != 0};
    const StagedTiles<T, N, 3> in = {{gate, dy, up + up_offset},
                                     {gate_stride, dy_stride, up_stride},
                                     memory + table_bytes,
                                     static_cast<int>(slots)};
    const TilePlaces places(memory, counts, count_width, experts, rows, cols);
    const KeptPlaces at = {kept[threadIdx.x / kWarp]};
    u32 index = blockIdx.x;
    int turn = 0;
    float weights = 1.0f;  // one per lane

    auto tile_at = [&](const TilePlace& place) {
        return Tile<N>(place.rows, pitch - place.column, unknown(static_cast<int>(threadIdx.x)));
    };
    auto fetch = [&] {
        const TilePlace place = places.find(index);
        at.keep(turn, place);
        const Tile<N> tile = tile_at(place);
        weights = lane_weight<T>(tile, weight, weight_wide, place.row);
        in.fetch(tile, place);
    };
    if (index < places.count()) fetch();
#pragma unroll 1
    while (index < places.count()) {
        const int now = turn;
        const TilePlace place = at[now];
        const Tile<N> tile = tile_at(place);
        const float w = weights;
        float dgate[kTileRows][N], dup[kTileRows][N], sums[kTileRows];
        auto advance = [&] {
            index += gridDim.x;
            turn ^= 1;
            __syncwarp();
            if (index < places.count()) fetch();
        };
        if constexpr (sizeof(T) == 2) {
            Raw<sizeof(T) * N> gate_raw[kTileRows], dy_raw[kTileRows], up_raw[kTileRows];
            in.read_all(tile, 0, place, gate_raw);
            in.read_all(tile, 1, place, dy_raw);
            in.read_all(tile, 2, place, up_raw);
            advance();
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                float u[N];
                ptx::forget(gate_raw[r]), ptx::forget(dy_raw[r]), ptx::forget(up_raw[r]);
                unpack<T, N>(gate_raw[r], dgate[r]);
                unpack<T, N>(dy_raw[r], dup[r]);
                unpack<T, N>(up_raw[r], u);
                sums[r] = gradients<Act, true>(dgate[r], dup[r], u, row_weight(tile, w, r));
                settle(dgate[r]), settle(dup[r]);
            }
        } else {
            in.wait(tile, 0, place);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) in.read(tile, 0, r, dgate[r]);
            in.wait(tile, 1, place);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) in.read(tile, 1, r, dup[r]);
            in.wait(tile, 2, place);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                float u[N];
                in.read(tile, 2, r, u);
                sums[r] = gradients<Act, false>(dgate[r], dup[r], u, row_weight(tile, w, r));
                settle(dgate[r]), settle(dup[r]);
            }
        }
        const float sum = scattered_sum(tile, sums);
        TileMaxima<N> most_gate(tile, dgate), most_up(tile, dup);
        // From here on, each part asks again where it is.
        if (dx != nullptr) {
            const TilePlace here = at[now];
            const Tile<N> again = tile_at(here);
            const i64 stride = unknown(2 * pitch);
            T* first = dx + here.row * stride + here.column;
            store_values(again, first, stride, dgate);
            store_values(again, first + pitch, stride, dup);
        }
        if (partial != nullptr) {
            const TilePlace here = at[now];
            store_sums(tile_at(here), partial + here.column / kTileSide * rows + here.row, sum);
        }
        const TilePlace left = at[now];
        quantize_values(tile_at(left), left, false, dgate, most_gate, out, scratch);
        const TilePlace right = at[now];
        quantize_values(tile_at(right), right, true, dup, most_up, out, scratch);
        if constexpr (sizeof(T) != 2) advance();
    }
    clear_scales(places, row_blocks, 2 * cols, scale_t);
}

}  // namespace rtk
