// SwiGLU of 16-bit tensors and its gradient as fp8 codes: y = silu(gate) * up * weight in fp32, quantised without
// another rounding. Recipe: common/fp8_scale.cuh. Layouts and tiles: act/glu_tile.cuh. Everything else a gated linear
// unit can be is in act/glu_quant_any.cu.
//
// Without `up`, it is what follows gate in each row. Rows of the inputs are 16-byte aligned, and cols is a multiple of
// 8. Each warp copies the eight rows that its own threads read into shared memory, ahead of their use, so that no
// barrier is needed for them: STAGES tiles (one or two) are on their way while the block works on another one, which is
// in registers.
#include "act/activations.cuh"
#include "act/glu_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// What a block copies ahead, from INPUTS matrices.
template <typename T, int INPUTS, int STAGES>
struct Ahead {
    static constexpr int kPer = 16 / sizeof(T), kAcross = kSide / kPer, kStep = kWarp / kAcross;
    static constexpr int kRowBytes = kSide * sizeof(T), kBytes = kSide * kRowBytes;  // of an input's tile

    struct alignas(8) Pair {
        u32 w[2];
    };
    struct alignas(16) Piece {
        u32 w[4];
    };

    const T* x[INPUTS];
    u32 stride[INPUTS];
    u8* memory;  // STAGES * INPUTS * kBytes, 16-byte aligned
    const float* weight;
    u32 cols;

    // Begins the copies of the turn-th tile, if there is one, and gives the weight of the warp's row lane % 8.
    RTK_DEVICE float fetch(const TileWalk& walk, u32 turn) const {
        if (!walk.has(turn)) {
            ptx::cp_async_commit();
            return 1.0f;
        }
        const TilePlace& place = walk[turn];
        const u32 thread = this_thread(), lane = thread % kWarp;
        const int piece = static_cast<int>(lane % kAcross);
        const int above = static_cast<int>(thread / kWarp * kHigh + lane / kAcross);
        const u32 row = place.row + above, column = place.column + piece * kPer;
        const int rows = column < cols ? static_cast<int>(place.rows) - above : 0;
        u8* to = stage(turn) + above * kRowBytes + piece * 16;
        const bool whole = place.rows == kSide && place.column + kSide <= cols;
#pragma unroll
        for (int k = 0; k < INPUTS; ++k, to += kBytes) {
            const T* from = settled(x[k] + product(row, stride[k]) + column);
            const u64 step = product(kStep, stride[k]);
            const ptx::SharedAddress address = ptx::shared_address(to);
            if (whole) {
#pragma unroll
                for (int r = 0; r < kHigh; r += kStep, from += step) ptx::cp_async_16(address + r * kRowBytes, from);
            } else {
#pragma unroll 1
                for (int r = 0; r < kHigh; r += kStep, from += step) {
                    if (r < rows) {
                        ptx::cp_async_16(address + r * kRowBytes, from);
                    } else {
                        *reinterpret_cast<Piece*>(to + r * kRowBytes) = Piece{{0, 0, 0, 0}};
                    }
                }
            }
        }
        ptx::cp_async_commit();
        if (weight == nullptr) return 1.0f;
        // Rows that do not exist are 0 with any weight. Nothing follows the load here: that would wait for it.
        const u32 last = place.rows - 1, own = thread / kWarp * kHigh + lane % kHigh;
        return __uint_as_float(ptx::ld_keep<4>(weight + place.row + min(own, last)).w[0]);
    }

    // Waits for the turn-th tile and reads the thread's part of it. Its memory is free after the next __syncwarp.
    RTK_DEVICE void read(u32 turn, Pair (&raw)[INPUTS][kHigh]) const {
        ptx::cp_async_wait<STAGES - 1>();
        __syncwarp();
        const u32 thread = this_thread();
        const u8* from = stage(turn) + thread / kWarp * kHigh * kRowBytes + thread % kWarp * sizeof(Pair);
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
#pragma unroll
            for (int r = 0; r < kHigh; ++r)
                raw[k][r] = *reinterpret_cast<const Pair*>(from + k * kBytes + r * kRowBytes);
    }

   private:
    RTK_DEVICE u8* stage(u32 turn) const { return memory + turn % STAGES * (INPUTS * kBytes); }
};

template <typename T, typename Pair>
RTK_DEVICE void unpacked(const Pair& raw, float (&v)[kWide]) {
    Raw<8> bits = {raw.w[0], raw.w[1]};
    ptx::forget(bits);
    unpack<T, kWide>(bits, v);
}

// The columns from here on that belong to the tile.
RTK_DEVICE u32 columns_of(const TilePlace& place, u32 cols) { return min(cols - place.column, u32(kSide)); }

template <typename T, int STAGES>
__global__ void __launch_bounds__(kThreads, 2)
    glu_fp8_fwd(const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale, e4m3* q_t,
                float* scale_t, i64 rows, i64 cols, i64 gate_stride, i64 up_stride, i64 experts,
                i64 count_width, i64 row_blocks, i64 by_group, i64 pow2, i64 check, i64 table_bytes) {
    __shared__ TileScratch512 scratch;
    __shared__ TilePlace kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(cols), by_group != 0, pow2 != 0};
    const TilePlaces places(memory, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, kept);
    const Ahead<T, 2, STAGES> ahead = {{gate, up != nullptr ? up : gate + cols},
                               {static_cast<u32>(gate_stride), static_cast<u32>(up_stride)},
                               memory + table_bytes,
                               weight,
                               static_cast<u32>(cols)};
    u32 turn = 0;
    float weights[STAGES];  // of the tiles on their way
    auto fetch = [&](u32 later) {
#pragma unroll
        for (int i = 0; i + 1 < STAGES; ++i) weights[i] = weights[i + 1];
        weights[STAGES - 1] = ahead.fetch(walk, turn + later);
    };
#pragma unroll 1
    for (u32 later = 0; later < STAGES; ++later) fetch(later);
#pragma unroll 1
    for (; walk.has(turn); ++turn) {
        walk.keep_up(turn);
        const float w = weights[0];
        Values y;
        {
            typename Ahead<T, 2, STAGES>::Pair raw[2][kHigh];
            ahead.read(turn, raw);
            __syncwarp();
            fetch(STAGES);
#pragma unroll
            for (int r = 0; r < kHigh; ++r) {
                const float row_w = __shfl_sync(0xffffffffu, w, r);
                float u[kWide];
                unpacked<T>(raw[0][r], y[r]);
                unpacked<T>(raw[1][r], u);
#pragma unroll
                for (int i = 0; i < kWide; ++i) y[r][i] = Silu::at<true>(y[r][i]).value * row_w * u[i];
            }
        }
        const TilePlace& place = walk[turn];
        quantize_tile(y, place, place.column, columns_of(place, ahead.cols), true, out, scratch);
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

// The gradient of [gate | up], [rows, 2 * cols], from that of y: its codes, the gradient itself (dx, of T), or both;
// and what each 128 columns add to the gradient of the weight (partial [ceil(cols/128), rows]). Any of them may be
// null. For codes by rows cols must be a multiple of 128, or groups would reach from gate into up.
template <typename T, int STAGES>
__global__ void __launch_bounds__(kThreads, 1)
    glu_fp8_bwd(const T* dy, const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale,
                e4m3* q_t, float* scale_t, T* dx, float* partial, i64 rows, i64 cols, i64 dy_stride, i64 gate_stride,
                i64 up_stride, i64 experts, i64 count_width, i64 row_blocks, i64 by_group, i64 pow2,
                i64 check, i64 table_bytes) {
    __shared__ TileScratch512 scratch;
    __shared__ TilePlace kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    ptx::launch_dependents();
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(2 * cols), by_group != 0, pow2 != 0};
    const TilePlaces places(memory, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, kept);
    const Ahead<T, 3, STAGES> ahead = {{gate, dy, up != nullptr ? up : gate + cols},
                               {static_cast<u32>(gate_stride), static_cast<u32>(dy_stride),
                                static_cast<u32>(up_stride)},
                               memory + table_bytes,
                               weight,
                               static_cast<u32>(cols)};
    u32 turn = 0;
    float weights[STAGES];  // of the tiles on their way
    auto fetch = [&](u32 later) {
#pragma unroll
        for (int i = 0; i + 1 < STAGES; ++i) weights[i] = weights[i + 1];
        weights[STAGES - 1] = ahead.fetch(walk, turn + later);
    };
#pragma unroll 1
    for (u32 later = 0; later < STAGES; ++later) fetch(later);
#pragma unroll 1
    for (; walk.has(turn); ++turn) {
        walk.keep_up(turn);
        const float w = weights[0];
        const TilePlace& place = walk[turn];
        Values v, dup;  // first the gradient of the gate, then that of up
        {
            typename Ahead<T, 3, STAGES>::Pair raw[3][kHigh];
            ahead.read(turn, raw);
            __syncwarp();
            fetch(STAGES);
            float sums[kHigh];
#pragma unroll
            for (int r = 0; r < kHigh; ++r) {
                const float row_w = __shfl_sync(0xffffffffu, w, r);
                float u[kWide];
                unpacked<T>(raw[0][r], v[r]);
                unpacked<T>(raw[1][r], dup[r]);
                unpacked<T>(raw[2][r], u);
                sums[r] = 0.0f;
#pragma unroll
                for (int i = 0; i < kWide; ++i) {
                    const ValueSlope gated = Silu::at<true>(v[r][i]);
                    const float along = dup[r][i] * gated.value, weighted = dup[r][i] * row_w;
                    sums[r] += along * u[i];
                    v[r][i] = weighted * u[i] * gated.slope;
                    dup[r][i] = along * row_w;
                }
            }
            if (partial != nullptr) {
                const Part part(place.rows);
                const float sum = scattered(sums, part.lane, [](float a, float b) { return a + b; });
                if (part.lane < kHigh && part.lane < part.rows)
                    partial[product(place.column / kSide, static_cast<u32>(rows)) + place.row + part.row + part.lane] =
                        sum;
            }
        }
#pragma unroll 1
        for (u32 offset = 0;; offset += ahead.cols) {
            const u32 columns = columns_of(place, ahead.cols);
            if (dx != nullptr) {
                const Part part(place.rows);
                const u64 first = product(place.row + part.row, out.cols);
                T* to = settled(dx + first + (offset + place.column + part.column));
                const int rows_here = static_cast<u32>(part.column) < columns ? part.rows : 0;
#pragma unroll
                for (int r = 0; r < kHigh; ++r, to += out.cols)
                    if (r < rows_here) store<T, kWide>(to, v[r]);
            }
            quantize_tile(v, place, offset + place.column, columns, true, out, scratch);
            if (offset != 0) break;
#pragma unroll
            for (int r = 0; r < kHigh; ++r)
#pragma unroll
                for (int i = 0; i < kWide; ++i) v[r][i] = dup[r][i];
        }
    }
    clear_scales(places, row_blocks, 2 * cols, scale_t);
}

}  // namespace rtk
