// Gated linear units and their gradients as fp8 codes, for cases that act/glu_fp8_double_buffered.cu does not cover:
// every activation, fp32 tensors, rows of any alignment and length. The activation and the 16-bit type are run-time
// arguments. Each thread computes its part of a tile row by row, in a loop, and keeps it in shared memory until it is
// complete.
#include "act/glu_fp8_generic.cuh"
#include "act/glu_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// With dy, outputs are those of glu_fp8_bwd; without, those of glu_fp8_fwd. `words`: rows of the inputs can be read
// four elements at a time. MIXED is for gradients where a scale group of a row spans columns of gate and of up; the
// other variant processes the same columns of both in turn, which is faster (docs/decisions/act.md).
//
// With `factor`, each row is multiplied by its number there before it is quantised. With `max_abs`, the largest
// magnitudes [experts, columns of the result], all rows of an expert's column share a scale, and scale_t has the shape
// of `max_abs`; transposed rows of each expert are padded to a multiple of `pad_to`, and the padding is not written.
template <bool FP32, bool MIXED>
__global__ void __launch_bounds__(kThreads, FP32 ? 1 : 2)
    glu_fp8_any(const void* dy, const void* gate, const void* up, const void* weight, const void* counts, e4m3* q,
                float* scale, e4m3* q_t, float* scale_t, void* dx, float* partial,
                const float* factor, const float* max_abs, i64 rows, i64 cols, i64 dy_stride,
                i64 gate_stride, i64 up_stride, i64 weight_type, i64 experts, i64 count_width, i64 row_blocks,
                i64 by_group, i64 pow2, i64 check, i64 act, i64 type, i64 words, i64 pad_to) {
    __shared__ TileScratch512 scratch;
    __shared__ TilePlace kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    ptx::launch_dependents();
    const bool backward = dy != nullptr;
    const i64 out_cols = backward ? 2 * cols : cols;
    const i64 covered = MIXED ? out_cols : cols;  // by the tiles of one pass
    const int passes = !MIXED && backward ? 2 : 1;
    const void* other = up != nullptr ? up : gate;  // without up, it follows gate in each row
    const bool in_words = words != 0, out_words = covered % kThreadColumns == 0;
    Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(out_cols), by_group != 0, pow2 != 0, max_abs};
    const TilePlaces places(memory + sizeof(float) * kSide * kSide, counts, count_width, experts, rows, covered);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, kept);
#pragma unroll 1
    for (u32 nth = 0; walk.has(nth); ++nth) {
        walk.keep_up(nth);
        const TilePlace& place = walk[nth];
        if (max_abs != nullptr && places.by_expert) out.expert = static_cast<u32>(expert_of(places.table, place.row));
        if (max_abs != nullptr && pad_to > 1) {
            const u32 pad = static_cast<u32>(pad_to);
            out.start_t = places.by_expert ? padded_start(places.table, static_cast<int>(out.expert), pad) : 0u;
            out.pitch_t = (place.count + pad - 1) / pad * pad;
        }
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int columns = static_cast<int>(min(covered - place.column, static_cast<i64>(kSide)));
            const i64 tile_column = pass * cols + place.column;
            {
                const Part part(place.rows);
                const int here = columns - part.column;
                const i64 first = static_cast<i64>(place.row) + part.row, column = tile_column + part.column;
                Halves halves = {kFour, place.column + part.column, 0};
                if constexpr (MIXED) halves = Halves::of(column, cols);
                const i64 other_first = halves.first + (up != nullptr ? 0 : cols);
                const int kind_of_pass = backward ? kGateGradient + pass : kForward;
                auto kind = [&](int i) {
                    if constexpr (MIXED) return i < halves.split ? kGateGradient : kUpGradient;
                    return kind_of_pass;
                };
                float* to = reinterpret_cast<float*>(memory) + part.row * kSide + part.column;
                Four<FP32> next[3];
                auto fetch = [&](int r) {
                    const int wanted = r < part.rows ? here : 0;
                    auto four = [&](const void* x, i64 stride, i64 begin, int some) {
                        const i64 element = (first + r) * stride + begin;
                        return load_four<FP32>(x, element, in_words, some, halves.split, halves.back);
                    };
                    next[0] = four(gate, gate_stride, halves.first, wanted);
                    next[1] = four(other, up_stride, other_first, wanted);
                    next[2] = four(dy, dy_stride, halves.first, backward ? wanted : 0);
                };
                fetch(0);
#pragma unroll 1
                for (int r = 0; r < kThreadRows; ++r, to += kSide) {
                    float g[kThreadColumns], u[kThreadColumns], d[kThreadColumns];
                    convert_four<FP32>(next[0], static_cast<int>(type), g);
                    convert_four<FP32>(next[1], static_cast<int>(type), u);
                    convert_four<FP32>(next[2], static_cast<int>(type), d);
                    if (r + 1 < kThreadRows) fetch(r + 1);
                    const bool exists = r < part.rows;
                    const float w = exists ? load_weight(weight, static_cast<int>(weight_type), first + r) : 0.0f;
                    float sum = apply_any<!FP32>(static_cast<int>(act), kind, g, u, d, w);
#pragma unroll
                    for (int i = 0; i < kThreadColumns; ++i)
                        if (!exists || i >= here) g[i] = 0.0f;  // activations of 0 are not all 0
                    if (factor != nullptr && exists) {
                        const float by = factor[first + r];
#pragma unroll
                        for (int i = 0; i < kThreadColumns; ++i) g[i] *= by;
                    }
                    *reinterpret_cast<Raw<16>*>(to) = pack<float, kThreadColumns>(g);
                    if (dx != nullptr && exists) {
                        const i64 element = (first + r) * out_cols + column;
                        if constexpr (FP32) {
                            store_four(static_cast<float*>(dx) + element, out_words, here, g);
                        } else if (type == kBf16) {
                            store_four(static_cast<bf16*>(dx) + element, out_words, here, g);
                        } else {
                            store_four(static_cast<fp16*>(dx) + element, out_words, here, g);
                        }
                    }
                    if (partial == nullptr || tile_column >= cols) continue;  // up's columns add nothing
#pragma unroll
                    for (int offset = kWarp / 2; offset > 0; offset /= 2)
                        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                    if (exists && part.lane == 0) partial[place.column / kSide * rows + first + r] = sum;
                }
            }
            Values v;
            {
                const Part part(place.rows);
                const float* from = reinterpret_cast<float*>(memory) + part.row * kSide + part.column;
#pragma unroll
                for (int r = 0; r < kThreadRows; ++r)
                    unpack<float, kThreadColumns>(*reinterpret_cast<const Raw<16>*>(from + r * kSide), v[r]);
            }
            quantize_tile(v, place, static_cast<u32>(tile_column), static_cast<u32>(columns), out_words, out, scratch);
        }
    }
    if (max_abs == nullptr) clear_scales(places, row_blocks, out.cols, scale_t);
}

}  // namespace rtk
