// SwiGLU of 16-bit tensors as fp8 codes, and its gradient: y = silu(gate) * up * weight in fp32, quantised without an
// intermediate rounding, while inputs of the next tile are copied to shared memory. Recipe: common/fp8_scale.cuh.
// Layouts: act/glu_tile.cuh. act/glu_fp8_generic.cu serves all other gated linear units.
//
// Without `up`, up follows gate in each row. Rows of the inputs are 16-byte aligned, and cols is a multiple of 8. Two
// blocks per SM. A block works on tiles blockIdx.x, blockIdx.x + gridDim.x, ..., numbered along the columns first.
#include "act/activations.cuh"
#include "act/glu_fp8_double_buffered.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(kBlock, 2)
    glu_fp8_fwd(const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale,
                e4m3* q_t, float* scale_t, i64 rows, i64 cols, i64 gate_stride, i64 up_stride, i64 experts,
                i64 count_width, i64 row_blocks, i64 by_group, i64 pow2, i64 check) {
    __shared__ SquareScratch scratch;
    __shared__ TilePlace places_kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(cols), by_group != 0, pow2 != 0};
    const SquareSlots gates = {memory}, ups = {memory + kSquare * kLayer};
    const TilePlaces places(memory + 2 * kSquare * kLayer, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, places_kept);
    float weights = 1.0f;
    auto first_up = [&] { return up != nullptr ? up : gate + cols; };
    const u32 strides[2] = {static_cast<u32>(gate_stride), static_cast<u32>(up_stride)};
    auto fetch_tile = [&](u32 nth) {
        if (walk.has(nth)) {
            fetch<kSquare>(gates, walk[nth], out.cols, gate, strides[0]);
            fetch<kSquare>(ups, walk[nth], out.cols, first_up(), strides[1]);
            if (weight != nullptr) weights = lane_weights(walk[nth], weight);
        }
        ptx::cp_async_commit();
    };
    fetch_tile(0);
#pragma unroll 1
    for (u32 nth = 0; walk.has(nth); ++nth) {
        walk.keep_up(nth);
        const TilePlace& place = walk[nth];
        Square y;
        ptx::cp_async_wait<0>();
#pragma unroll
        for (int r = 0; r < kSquare; ++r) {
            float u[8];
            unpack<T, 8>(gates.read(r), y[r]);
            unpack<T, 8>(ups.read(r), u);
#pragma unroll
            for (int i = 0; i < 8; ++i) y[r][i] = Silu::at<true>(y[r][i]).value * u[i];
        }
        if (weight != nullptr) {
#pragma unroll
            for (int r = 0; r < kSquare; ++r) {
                const float w = row_weight(weights, r);
#pragma unroll
                for (int i = 0; i < 8; ++i) y[r][i] *= w;
            }
        }
        fetch_tile(nth + 1);
        quantize_square(y, GluSquareOutput{out, place, out.cols, false}, scratch);
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

inline constexpr int kRegisterRows = 2;  // rows of up that do not fit into shared memory

// The thread's gradients. dup overwrites gate and dy in shared memory; dgate stays in registers.
template <typename T, bool WEIGHTED>
RTK_DEVICE void gradients(const SquareSlots& gates, const SquareSlots& dys, const SquareSlots& ups,
                          const Raw<16> (&register_ups)[kRegisterRows], float weights, Square& dgate, float (&sums)[kSquare]) {
#pragma unroll
    for (int r = 0; r < kSquare; ++r) {
        float d[8], u[8], w = 1.0f;
        if constexpr (WEIGHTED) w = row_weight(weights, r);
        unpack<T, 8>(gates.read(r), dgate[r]);
        unpack<T, 8>(dys.read(r), d);
        unpack<T, 8>(r < kSquare - kRegisterRows ? ups.read(r) : register_ups[r % kRegisterRows], u);
        sums[r] = 0.0f;
        float dup[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const ValueSlope value = Silu::at<true>(dgate[r][i]);
            const float along = d[i] * value.value, weighted = d[i] * w;
            if constexpr (WEIGHTED) sums[r] += along * u[i];
            dgate[r][i] = weighted * u[i] * value.slope;
            dup[i] = along * w;
        }
        gates.write(r, dup), dys.write(r, dup + 4);
    }
}

// The gradient of [gate | up], [rows, 2 * cols], from that of y: its codes, the gradient itself (dx, of T), or both;
// and the contribution of each 128 columns to the weight gradient (partial [ceil(cols/128), rows]). Any of them may be
// null. For codes by rows cols must be a multiple of 128, because otherwise a scale group would mix columns of gate and
// of up (glu_fp8_any handles these).
template <typename T>
__global__ void __launch_bounds__(kBlock, 2)
    glu_fp8_bwd(const T* dy, const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale,
                e4m3* q_t, float* scale_t, T* dx, float* partial, i64 rows, i64 cols, i64 dy_stride, i64 gate_stride,
                i64 up_stride, i64 experts, i64 count_width, i64 row_blocks, i64 by_group, i64 pow2,
                i64 check) {
    __shared__ SquareScratch scratch;
    __shared__ TilePlace places_kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    ptx::launch_dependents();
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(2 * cols), by_group != 0, pow2 != 0};
    const u32 width = static_cast<u32>(cols);
    const SquareSlots gates = {memory}, dys = {memory + kSquare * kLayer}, ups = {memory + 2 * kSquare * kLayer};
    const TilePlaces places(memory + (3 * kSquare - kRegisterRows) * kLayer, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, places_kept);
    float weights = 1.0f;
    Raw<16> register_ups[kRegisterRows];
    const u32 strides[3] = {static_cast<u32>(gate_stride), static_cast<u32>(dy_stride), static_cast<u32>(up_stride)};
    auto first_up = [&] { return up != nullptr ? up : gate + cols; };
    auto fetch_gate_dy = [&](u32 nth) {
        if (walk.has(nth)) {
            request<kSquare - kRegisterRows>(register_ups, walk[nth], width, first_up(), strides[2]);
            fetch<kSquare>(gates, walk[nth], width, gate, strides[0]);
            fetch<kSquare>(dys, walk[nth], width, dy, strides[1]);
        }
        ptx::cp_async_commit();
    };
    auto fetch_up = [&](u32 nth) {
        if (walk.has(nth)) {
            fetch<kSquare - kRegisterRows>(ups, walk[nth], width, first_up(), strides[2]);
            if (weight != nullptr) weights = lane_weights(walk[nth], weight);
        }
        ptx::cp_async_commit();
    };
    fetch_gate_dy(0), fetch_up(0);
#pragma unroll 1
    for (u32 nth = 0; walk.has(nth); ++nth) {
        walk.keep_up(nth);
        const TilePlace& place = walk[nth];
        Square v;  // first the gradient of the gate, then that of up
        ptx::cp_async_wait<0>();
        {
            float sums[kSquare];
            if (weight != nullptr) {
                gradients<T, true>(gates, dys, ups, register_ups, weights, v, sums);
                if (partial != nullptr) {
                    const SquareSpot spot(static_cast<int>(place.rows), 0);
                    const int own = spot.lane % 16;
                    const float sum = scattered_by_rows(sums, spot.lane, [](float a, float b) { return a + b; });
                    if (own < kSquare && own < spot.rows)
                        partial[product(place.column / kSide, places.rows) + place.row + spot.row + own] = sum;
                }
            } else {
                gradients<T, false>(gates, dys, ups, register_ups, weights, v, sums);
            }
        }
        fetch_up(nth + 1);
#pragma unroll 1
        for (bool right = false;; right = true) {
            if (dx != nullptr) {
                const GluSquareOutput to = {out, place, width, right};
                const SquareSpot spot(to.rows(), to.columns());
                const int rows_here = spot.columns > 0 ? spot.rows : 0;
                T* p = settled(dx + product(place.row + spot.row, out.cols) + (to.column() + spot.column));
#pragma unroll
                for (int r = 0; r < kSquare; ++r, p += out.cols)
                    if (r < rows_here) store<T, 8>(p, v[r]);
            }
            quantize_square(v, GluSquareOutput{out, place, width, right}, scratch);
            if (right) break;
#pragma unroll
            for (int r = 0; r < kSquare; ++r) {
                const Raw<16> left = gates.read(r), rest = dys.read(r);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[r][i] = __uint_as_float(left.w[i]), v[r][4 + i] = __uint_as_float(rest.w[i]);
            }
            fetch_gate_dy(nth + 1);
        }
    }
    clear_scales(places, row_blocks, 2 * cols, scale_t);
}

}  // namespace rtk
