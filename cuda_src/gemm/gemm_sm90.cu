// Matrix products on sm_90a: out[m, n] = sum over k of a[m, k] b[n, k], times scales, plus bias, and so on
// (gemm/epilogue_sm90.cuh); a [m, k] and b [n, k] of 16 or 8 bits, those of 16 bits in either order. Dense or in groups
// (gemm/schedule_sm90.cuh).
//
// Grid: persistent, one block per SM. A block has CONSUMERS warpgroups, each with 64 rows of a tile of COLS columns, or,
// with WAVES, a tile of its own of as many times 64 rows, in ping-pong; and a producer warpgroup: one thread issues TMA loads
// of a and b, 128 bytes of k per stage; scales of the loop are loaded the same way, or by two more warps in any layout.
// TMA stores boxes of results while the next tile is multiplied.
//
// Where plain results leave SMs without a tile, blocks share tiles along k (TileShare): `shared_sums` holds the sums of
// one part of each block, `arrived` counts the parts that are complete. Both are null where no tile is shared. Without
// groups, the upper half of `groups` says how many blocks share.
//
// Numerics: sums are fp32 in the tensor cores over all of k; for fp8 products these keep about 14 bits as they
// accumulate. int32 sums are exact. With SCALES each 128 bytes of k are accumulated from zero, and the result, times
// its scales, is added in fp32 registers:
//   kNoScales        none in the loop
//   kRowScales       a factor per row (of a) and one per tile (of b), both 1 if absent: 1x128 with 128x128, 128x128 with
//                    128x128, or promotion alone
//   kColumnScales    a factor per row and one per column: 1x128 with 1x128, or 16-bit numbers with scales of b
// SHIFTED: rows of operands are odd multiples of 8 bytes apart (gemm/shifted_rows_sm90.cuh). Then there are no groups, and
// `starts` and `ends` are the last rows of a and b if they have no pair.
// SPLIT: rows of b are odd multiples of 16 bytes apart (gemm/split_rows_sm90.cuh). Then there are no groups; `b_map` has the
// even rows and `scale_b_map` the odd ones, `starts` is a, `a_group_pitch` the bytes between its rows, `depth` is 16 bytes more.
// With flags.starts(), sums begin with the fp32 result so far instead of 0, and the result is stored, not added.
// FINISH says where results are finished: in boxes (gemm/epilogue_sm90.cuh), or in registers (gemm/quantize_sm90.cuh),
// quantised or gated; b then has 2 n rows, and a tile half as many columns of the result.
#include "common/pipeline.cuh"
#include "gemm/loop_scales_sm90.cuh"
#include "gemm/operand_sm90.cuh"
#include "gemm/quantize_sm90.cuh"
#include "gemm/shifted_rows_sm90.cuh"
#include "gemm/split_rows_sm90.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace rtk {

inline constexpr int kPlainFinish = 0, kQuantizedFinish = 1, kGatedFinish = 2;

template <typename A, typename B, bool ACROSS_A, bool ACROSS_B, int CONSUMERS, int WAVES, int COLS, int STAGES, int SLOTS,
          bool SHIFTED, bool SPLIT, int SCALES, int FINISH>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    gemm_sm90(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map,
              const __grid_constant__ ptx::TensorMap out_map, const __grid_constant__ ptx::TensorMap scale_a_map,
              const __grid_constant__ ptx::TensorMap scale_b_map, const float* scale_a, const float* scale_b, const void* bias,
              const void* add, void* out, float* out_scale,
              const i32* starts, const i32* ends, void* shared_sums, u32* arrived, i64 rows, i64 columns, i64 depth,
              i64 a_row_pitch, i64 a_depth_pitch, i64 a_group_pitch, i64 b_row_pitch, i64 b_depth_pitch, i64 b_group_pitch,
              i64 scale_rows, i64 scale_shifts, i64 out_pitch, i64 out_group_pitch, i64 out_scale_pitch, i64 add_pitch,
              i64 groups, i64 flags_and_band) {
    // Warpgroups that multiply the same tile. With WAVES, each has its own: one multiplies while the other one finishes.
    constexpr bool kPingPong = WAVES > 1;
    static_assert(!kPingPong || (CONSUMERS == 2 && SCALES == kNoScales && FINISH == kPlainFinish), "two tiles, plain results");
    constexpr int kTogether = kPingPong ? 1 : CONSUMERS;
    using Operands = TypedOperands<A, B, ACROSS_A, ACROSS_B, kTogether, WAVES, COLS>;
    using Sum = typename Operands::Sum;
    // Two products of the same rows of a, which are read from shared memory once.
    constexpr bool kLeftInRegisters = !SPLIT && SCALES == kRowScales && COLS == 256 && !is_same<Sum, i32>::value;
    static_assert(!SPLIT || (!SHIFTED && !ACROSS_A && !ACROSS_B && WAVES == 1 && SCALES != kColumnScales), "two boxes of b");
    static_assert(!SHIFTED || (sizeof(A) == 1 && WAVES == 1 && SCALES != kColumnScales && FINISH == kPlainFinish), "8 bits, plain");
    using Shifted = ShiftedRows<Operands::kRows, COLS, STAGES>;
    constexpr int kRows = Operands::kRows, kDepth = Operands::kDepth, kConsumerWarps = 4 * CONSUMERS;
    constexpr int kScaleFloats = SCALES == kNoScales ? 0 : kRows + (SCALES == kColumnScales ? COLS : 32);
    constexpr int kCopies = SHIFTED ? kConsumerWarps + 1 : kConsumerWarps / 2 + 1, kCopyThreads = SHIFTED ? kWarp : 2 * kWarp;
    constexpr int kCutBarrier = 1 + CONSUMERS, kOrderBarriers = 2 + CONSUMERS;
    // With scales in the loop, one part of the products at a time has its own registers.
    constexpr int kHalves = (COLS + 127) / 128, kUnitCols = COLS / kHalves;
    // Two operands that lie across need more registers for their copies than the producer has left for a share, and
    // gated sums with scales more than consumers have.
    constexpr bool kSharesFinish = FINISH == kPlainFinish || (FINISH == kGatedFinish && SCALES == kNoScales);
    constexpr bool kSplits = kSharesFinish && WAVES == 1 && !(ACROSS_A && ACROSS_B && COLS == 256);
    using Share = TileShare<kSplits>;
    constexpr bool kGated = FINISH == kGatedFinish;
    using Split = SplitRows<A, B, kRows, COLS, kGated>;
    constexpr int kOutCols = kGated ? COLS / 2 : COLS;
    using Ring = BoxRing<SLOTS>;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const base = memory + (stages - ptx::shared_address(memory));
    u8* const boxes = base + STAGES * Operands::kStageBytes;
    float* const scales = reinterpret_cast<float*>(boxes + CONSUMERS * SLOTS * Ring::kBytes);
    float* const column_values = scales + STAGES * kScaleFloats;  // [CONSUMERS, 2, COLS]
    u8* const barriers = reinterpret_cast<u8*>(column_values + CONSUMERS * 2 * COLS);
    const Pipeline<STAGES> pipeline{ptx::shared_address(barriers)};
    Shifted shifted(ptx::shared_address(barriers) + Pipeline<STAGES>::kBytes);  // where groups would have their table
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const void* const a_rows = starts;
    const u64 places = reinterpret_cast<u64>(out) | reinterpret_cast<u64>(add);
    const bool aligned = places % 16 == 0 && (out_pitch | out_group_pitch | add_pitch) % 4 == 0;
    const EpilogueFlags flags{lower(flags_and_band) | static_cast<u32>(aligned) << 17};
    const u32 kind = lower(groups);
    const ScalePlace of_a{scale_a, a_row_pitch, a_depth_pitch, a_group_pitch, lower(scale_rows), lower(scale_shifts)};
    const ScalePlace of_b{scale_b, b_row_pitch, b_depth_pitch, b_group_pitch, upper(scale_rows), upper(scale_shifts)};

    // TMA loads scales of the loop if there is one per row and it can read their layout; otherwise two warps do.
    const bool copies_a = SCALES != kNoScales && flags.loop_scales_a() && !flags.engine_scales_a();
    const bool copies_b = SCALES != kNoScales && flags.loop_scales_b() && !flags.engine_scales_b();
    if (threadIdx.x == kConsumerWarps * kWarp) {
        ptx::tma_prefetch_map(a_map);
        ptx::tma_prefetch_map(b_map);
        ptx::tma_prefetch_map(scale_a_map);
        ptx::tma_prefetch_map(scale_b_map);
        ptx::tma_prefetch_map(out_map);
        if constexpr (SHIFTED) shifted.init();
        pipeline.init(copies_a || copies_b ? 1 + kCopyThreads : 1, 4 * kTogether);
    }
    ptx::wait_for_previous();
    ProductTiles<kRows, kOutCols> tiles(reinterpret_cast<ProductGroup*>(barriers + Pipeline<STAGES>::kBytes), starts, ends, kind,
                                    upper(groups), rows, columns, depth, upper(flags_and_band));
    __syncthreads();
    const u32 count = tiles.count();
    PipelineState<STAGES> state;
    // Computed where a role begins: earlier, it would occupy registers that the producer does not have.
    auto loaded_depth = [&](const ProductTile& tile) {
        return SHIFTED ? Shifted::loaded_depth(tile, static_cast<i32>(depth)) : tile.depth;
    };
    auto own_share = [&] { return Share(count, shared_sums != nullptr, kDepth, static_cast<i32>(depth), upper(groups)); };

    if (warp >= kConsumerWarps) {
        if constexpr (CONSUMERS >= 2) ptx::registers_give<SHIFTED ? 56 : 40>();
        if (SHIFTED && warp >= kConsumerWarps + 2) {
            shifted.begin();
            for (Share share = own_share(); share.exists(); share.next())
                shifted.move_tile(pipeline, state, stages, share.tile(tiles, kDepth), starts, ends, static_cast<i32>(rows),
                                  static_cast<i32>(columns), static_cast<i32>(depth), flags.shift_a(), flags.shift_b());
        } else if (threadIdx.x == kConsumerWarps * kWarp) {
            const bool rows_too = SCALES != kNoScales && flags.loop_scales_a() && flags.engine_scales_a();
            const bool columns_too = SCALES == kColumnScales && flags.loop_scales_b() && flags.engine_scales_b();
            const u32 bytes = Operands::kStageBytes + (rows_too ? 4 * kRows : 0) + (columns_too ? 4 * COLS : 0);
            for (Share share = own_share(); share.exists(); share.next()) {
                const ProductTile tile = share.tile(tiles, kDepth);
                const i32 group_a = kind == kMaskedGroups ? static_cast<i32>(tile.group) : 0;
                const i32 group_b = kind == kDepthGroups ? 0 : static_cast<i32>(tile.group);
#pragma unroll 1
                for (i32 k = 0; k < loaded_depth(tile); k += kDepth, state.advance()) {
                    pipeline.acquire(state);
                    const ptx::SharedAddress full = pipeline.expect(state, bytes);
                    if constexpr (SHIFTED) {
                        Shifted::fetch(a_map, b_map, stages + state.stage * Operands::kStageBytes, full, tile.k + k, tile.row, tile.n);
                    } else if constexpr (SPLIT) {
                        Split::fetch(a_map, b_map, scale_b_map, stages + state.stage * Operands::kStageBytes, full, tile.k + k, tile.row,
                                     tile.n, static_cast<i32>(columns));
                    } else {
                        Operands::fetch(a_map, b_map, stages + state.stage * Operands::kStageBytes, full, tile.k + k, tile.row, group_a,
                                        tile.n, group_b, kGated ? static_cast<i32>(columns) : 0);
                    }
                    const ptx::SharedAddress to = ptx::shared_address(scales) + 4 * kScaleFloats * state.stage;
                    const u32 block = static_cast<u32>(tile.k + k) / 64;
                    if (rows_too)
                        ptx::tma_load_3d(to, scale_a_map, full, tile.row, static_cast<i32>(block >> of_a.depth_shift), group_a);
                    if (columns_too)
                        ptx::tma_load_3d(to + 4 * kRows, scale_b_map, full, tile.n, static_cast<i32>(block >> of_b.depth_shift), group_b);
                }
            }
        } else if (SCALES != kNoScales && warp / (kCopyThreads / kWarp) == kCopies && (copies_a || copies_b)) {
            const int thread = static_cast<int>(threadIdx.x) % kCopyThreads;
            ScaleCopies<kRows, kRows + (SCALES == kColumnScales ? COLS : kHalves), kCopyThreads> copies;
            const int apart = SCALES == kColumnScales ? 1 : kGated ? static_cast<int>(columns) : 128;
            for (Share share = own_share(); share.exists(); share.next()) {
                const ProductTile tile = share.tile(tiles, kDepth);
                copies.place(of_a, of_b, tile, thread, copies_a ? tile.rows : 0, copies_b ? (kGated ? 2 : 1) * columns : 0, apart);
#pragma unroll 1
                for (i32 k = 0; k < loaded_depth(tile); k += kDepth, state.advance()) {
                    const u32 block = static_cast<u32>(tile.k + k) / 64;
                    pipeline.acquire(state);
                    copies.copy(ptx::shared_address(scales) + 4 * kScaleFloats * state.stage, scale_a + of_a.of_depth(block),
                                scale_b + of_b.of_depth(block), thread, copies_a, copies_b);
                    ptx::cp_async_arrive(pipeline.full(state));
                }
            }
        }
        return;
    }

    if constexpr (CONSUMERS == 2) ptx::registers_take<SHIFTED ? 224 : 232>();
    if constexpr (CONSUMERS == 3) ptx::registers_take<152>();
    const int consumer = warp / 4, thread = static_cast<int>(threadIdx.x) % 128;
    const int own_part = kPingPong ? 0 : consumer;  // of a tile, 64 rows per wave
    const int own_row = warp % 4 * 16 + lane / 4;  // of a part; + 8 is the other
    const bool speaks = lane == 0;
    float* const own_columns = column_values + consumer * 2 * COLS;
    Ring ring{boxes + consumer * SLOTS * Ring::kBytes, 1 + consumer};
    const ResultPlace place{out_map, out, add, out_pitch, out_group_pitch, add_pitch, static_cast<i32>(columns), flags};

    ProductTile next_tile = {};
    Share share = own_share();
    // In ping-pong, the next tile is the other warpgroup's: its stages are skipped. There are no groups, so all tiles have
    // as many.
    auto skip_tile = [&] {
        share.next();
        state.advance(static_cast<int>(ceil_div(static_cast<i32>(depth), kDepth)));
    };
    if (kPingPong && consumer == 1) skip_tile();
    if (SCALES != kNoScales && share.exists()) next_tile = share.tile(tiles, kDepth);
    auto wait_for = [&](const PipelineState<STAGES>& at) {
        pipeline.wait(at);
        if constexpr (SHIFTED) shifted.wait(at);
    };
    for (; share.exists(); share.next()) {
        const ProductTile tile = SCALES == kNoScales ? share.tile(tiles, kDepth) : next_tile;
        Share after = share;
        after.next();
        const int blocks = (tile.depth + kDepth - 1) / kDepth;
        const int tail = kind == kDepthGroups ? tile.depth % kDepth : 0;  // of the last block; others continue its k
        // Row and column operands of the epilogue, loaded before the products where registers allow.
        constexpr int kColumnsEach = (COLS + 127) / 128;
        u32 row_bits[WAVES][2] = {}, factor_bits[kColumnsEach], bias_bits[kColumnsEach];
        auto load_factors = [&] {  // without branches, which cost seconds of compile time
            const bool of_rows = scale_a != nullptr && !flags.loop_scales_a();
            const bool of_columns = scale_b != nullptr && !flags.loop_scales_b();
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = (w * kTogether + own_part) * 64 + own_row + 8 * r;
                    row_bits[w][r] = 0x3f800000u;  // 1
                    ptx::ld_keep_if<4>(of_rows && row < tile.rows, row_bits[w][r],
                                       scale_a + of_a.of_single_row(static_cast<u32>(tile.row + row), tile.group));
                }
#pragma unroll
            for (int i = 0; i < kColumnsEach; ++i) {
                const int at = thread + 128 * i, place_in = at % kOutCols;
                const int column = tile.n + (SPLIT ? split_column<kOutCols>(place_in) : place_in);
                const bool exists = column < columns && at < COLS;
                const u32 n = static_cast<u32>(column) + (kGated && at >= kOutCols ? static_cast<u32>(columns) : 0u);  // row of b
                factor_bits[i] = 0x3f800000u, bias_bits[i] = 0;
                ptx::ld_keep_if<4>(of_columns && exists, factor_bits[i], scale_b + of_b.of_single_row(n, tile.group));
                ptx::ld_keep_if<4>(bias != nullptr && exists && flags.bias() == kFp32, bias_bits[i],
                                   static_cast<const float*>(bias) + n);
                ptx::ld_keep_if<2>(bias != nullptr && exists && flags.bias() != kFp32, bias_bits[i],
                                   static_cast<const bf16*>(bias) + n);
            }
        };
        if (SCALES == kNoScales) load_factors();

        auto part_in = [&](const ProductTile& of, int wave) {
            const int first = (wave * kTogether + own_part) * 64, existing = of.rows - first;
            const bool whole = existing >= 64 || kind == kNoGroups || kind == kDepthGroups;
            const i32 group_out = kind == kMaskedGroups || kind == kDepthGroups ? static_cast<i32>(of.group) : 0;
            return ResultPart{of.row + first, of.n, existing, group_out, flags.copy_engine() && whole};
        };
        auto part_of = [&](int wave) { return part_in(tile, wave); };

        typename Totals<Sum, SCALES>::Type sums[WAVES][COLS / 2];
        constexpr bool kFloatSums = !is_same<typename Totals<Sum, SCALES>::Type, i32>::value;
        // Where registers allow; rtkernels/ops/gemm/sm90_plan.py chooses a smaller tile for the others.
        constexpr bool kStartScaled = sizeof(A) == 1 && !(SCALES == kRowScales && COLS == 256);
        constexpr bool kStarts =
            FINISH == kPlainFinish && !SPLIT && kFloatSums && COLS != 224 && (SCALES == kNoScales || kStartScaled);
        const bool starts = kStarts && flags.starts();
        if constexpr (kStarts) {
            if (starts) {
#pragma unroll
                for (int w = 0; w < WAVES; ++w) load_sums<COLS>(sums[w], place, part_of(w));
                if (after.exists()) {
                    const ProductTile later = after.tile(tiles, kDepth);
#pragma unroll 1
                    for (int w = 0; w < WAVES; ++w) prefetch_sums<COLS>(place, part_in(later, w));
                }
            }
        }
        Split split;
        if constexpr (SPLIT) split.begin(a_rows, a_group_pitch, tile, own_part * 64 + own_row);
        if constexpr (SPLIT && SCALES == kNoScales) {
            auto& of_boxes = reinterpret_cast<float(&)[Split::kBoxes][Split::kHalf / 2]>(sums[0]);
            for (int i = 0; i < blocks; ++i, state.advance()) {
                wait_for(state);
                split.begin_stage(base + state.stage * Operands::kStageBytes, static_cast<u32>(own_part));
                ptx::wgmma_pin(sums[0]);  // here and below, because of the conversions between products
                ptx::wgmma_fence();
                split.template multiply<0>(of_boxes, stages + state.stage * Operands::kStageBytes, static_cast<u32>(own_part), i != 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::wgmma_pin(sums[0]);
                pipeline.release_warp(state);
            }
        } else if constexpr (SCALES == kNoScales) {
            if (blocks == 0 && !starts) clear(sums);
            PipelineState<STAGES> last = state;
            // A wait for a stage names one bit of its phase, so that all earlier stages must have arrived.
            if (kPingPong && share.index != blockIdx.x) ptx::named_barrier_sync(kOrderBarriers + consumer, 256);
            for (int i = 0; i < blocks; ++i, state.advance()) {
                wait_for(state);
                if (!kPingPong && tail != 0 && i == blocks - 1)
                    Operands::cut(base + state.stage * Operands::kStageBytes, tail, kCutBarrier);
                ptx::wgmma_fence();
#pragma unroll
                for (int w = 0; w < WAVES; ++w)
                    Operands::multiply(sums[w], stages + state.stage * Operands::kStageBytes,
                                       static_cast<u32>(w * kTogether + own_part), 0, i != 0 || starts);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if (i != 0 && speaks) pipeline.release(last);
                last = state;
            }
            ptx::wgmma_wait<0>();
            if (blocks != 0 && speaks) pipeline.release(last);
            if (kPingPong && after.exists()) ptx::named_barrier_arrive(kOrderBarriers + 1 - consumer, 256);
        } else {
            if (!starts) clear(sums);
            if (blocks == 0 && after.exists()) next_tile = after.tile(tiles, kDepth);
            Sum part[kUnitCols / 2];
            u32 left[4][4];
            // Prepares a stage for its products: done for the next stage while the last part of this one is promoted.
            auto begin_stage = [&](const PipelineState<STAGES>& at, bool is_last) {
                if (tail != 0 && is_last) Operands::cut(base + at.stage * Operands::kStageBytes, tail, kCutBarrier);
                if constexpr (SPLIT) split.begin_stage(base + at.stage * Operands::kStageBytes, static_cast<u32>(own_part));
                if constexpr (kLeftInRegisters)
                    Operands::load_left(left, base + at.stage * Operands::kStageBytes, static_cast<u32>(consumer));
            };
            if (blocks != 0) {
                wait_for(state);
                begin_stage(state, blocks == 1);
            }
            for (int i = 0; i < blocks; ++i) {
                const PipelineState<STAGES> here = state;
                state.advance();
                const float* of_stage = scales + kScaleFloats * here.stage;
                float of_row[WAVES][2], of_tile[kHalves];
#pragma unroll
                for (int unit = 0; unit < WAVES * kHalves; ++unit) {
                    const int w = unit / kHalves, half = unit % kHalves;
                    constexpr int kLastUnit = WAVES * kHalves - 1;
                    ptx::wgmma_fence();
                    if constexpr (SPLIT) {
                        auto& of_boxes = reinterpret_cast<float(&)[Split::kBoxes / kHalves][Split::kHalf / 2]>(part);
                        const ptx::SharedAddress at = stages + here.stage * Operands::kStageBytes;
                        if (half == 0) split.template multiply<0>(of_boxes, at, static_cast<u32>(own_part), false);
                        if constexpr (kHalves == 2)
                            if (half == 1) split.template multiply<1>(of_boxes, at, static_cast<u32>(own_part), false);
                    } else if constexpr (kLeftInRegisters) {
                        static_assert(WAVES == 1, "one set of rows in registers");
                        Operands::multiply_left(part, left, stages + here.stage * Operands::kStageBytes, kUnitCols * half);
                    } else {
                        Operands::multiply(part, stages + here.stage * Operands::kStageBytes,
                                           static_cast<u32>(w * kTogether + own_part), kUnitCols * half, false);
                    }
                    ptx::wgmma_commit();
                    if (unit == 0) {  // here, while the products are in flight
                        if (i == 0 && after.exists()) next_tile = after.tile(tiles, kDepth);
#pragma unroll
                        for (int h = 0; h < kHalves; ++h)
                            of_tile[h] = SCALES == kRowScales && flags.loop_scales_b() ? of_stage[kRows + h] : 1.0f;
#pragma unroll
                        for (int v = 0; v < WAVES; ++v)
#pragma unroll
                            for (int r = 0; r < 2; ++r)
                                of_row[v][r] = flags.loop_scales_a()
                                                   ? of_stage[(v * kTogether + own_part) * 64 + own_row + 8 * r]
                                                   : 1.0f;
                    }
                    if (unit == kLastUnit && i + 1 < blocks) wait_for(state);
                    ptx::wgmma_wait<0>();
                    if (SCALES == kRowScales && unit == kLastUnit) pipeline.release_warp(here);
                    if (unit == kLastUnit && i + 1 < blocks) begin_stage(state, i + 2 == blocks);
                    const float times[2] = {of_row[w][0] * of_tile[half], of_row[w][1] * of_tile[half]};
                    promote<SCALES == kColumnScales>(sums[w] + kUnitCols / 2 * half, part, times,
                                                     of_stage + kRows + kUnitCols * half + lane % 4 * 2);
                }
                if (SCALES == kColumnScales) pipeline.release_warp(here);
            }
        }

        if (SHIFTED && tile.depth < loaded_depth(tile)) {
            wait_for(state);
            pipeline.release_warp(state);
            state.advance();
        }
        if constexpr (kSplits) {
            if (share.is_part()) {
                using Parts = SharedSums<typename Totals<Sum, SCALES>::Type, CONSUMERS, COLS / 8>;
                const Parts parts{static_cast<typename Parts::Four*>(shared_sums), arrived};
                if (share.first_step() != 0) {
                    parts.put(sums[0], consumer, ring.barrier);
                    continue;
                }
                // Others than these have no registers for two parts at a time.
                constexpr bool kTwo = COLS <= 128 && CONSUMERS <= 2 && SCALES != kColumnScales;
                parts.template add_others<kTwo, SCALES != kColumnScales>(sums[0], share, count, consumer);
            }
        }

        const bool has_factors = SCALES == kNoScales || FINISH != kPlainFinish || flags.factors();
        if (SCALES != kNoScales && has_factors) load_factors();
#pragma unroll
        for (int i = 0; i < kColumnsEach; ++i) {
            if (!has_factors || (COLS % 128 != 0 && thread + 128 * i >= COLS)) break;
            float plus[1] = {__uint_as_float(bias_bits[i])};
            if (flags.bias() == kBf16) unpack<bf16, 1>(Raw<2>{{bias_bits[i]}}, plus);
            if (flags.bias() == kFp16) unpack<fp16, 1>(Raw<2>{{bias_bits[i]}}, plus);
            own_columns[thread + 128 * i] = __uint_as_float(factor_bits[i]);
            own_columns[COLS + thread + 128 * i] = plus[0];
        }
        float row_factor[WAVES][2];
#pragma unroll
        for (int w = 0; w < WAVES; ++w)
#pragma unroll
            for (int r = 0; r < 2; ++r) row_factor[w][r] = __uint_as_float(row_bits[w][r]);
        if constexpr (FINISH == kPlainFinish) {
            finish_parts<COLS, true, SPLIT>(sums, row_factor, own_columns, ring, place, part_of);
        } else {
            static_assert(WAVES == 1 && (kOutCols % 128 == 0 || (kGated && SCALES == kNoScales)), "scales cover 128 columns");
            if (part_of(0).rows <= 0) continue;  // no barrier would follow before the next tile's columns are written
            const int existing = SPLIT ? kOutCols : static_cast<int>(min(columns - tile.n, static_cast<i64>(kOutCols)));
            ptx::named_barrier_sync(ring.barrier, 128);  // all columns are valid
            float results[1][kOutCols < 128 ? kOutCols / 2 : 64];
            finish_in_registers<kGated, COLS, 0>(sums[0], row_factor[0], own_columns, flags.register_act(), existing, results[0]);
            if (flags.out() < kE4m3) {
                if constexpr (kGated) finish_parts<kOutCols, false, SPLIT>(results, row_factor, own_columns, ring, place, part_of);
            } else if constexpr (kOutCols % 128 == 0) {
                const CodePlace codes{out_map, static_cast<u8*>(out), out_scale, out_pitch, out_scale_pitch,
                                      static_cast<i32>(columns), flags.out() == kE5m2, flags.aligned() && out_pitch % 16 == 0};
                store_codes(results[0], ring, codes, part_of(0));
                if constexpr (kOutCols == 256) {
                    if (tile.n + 128 >= columns) continue;
                    finish_in_registers<kGated, COLS, 128>(sums[0], row_factor[0], own_columns, flags.register_act(), existing,
                                                           results[0]);
                    ResultPart part = part_of(0);
                    part.n += 128;
                    store_codes(results[0], ring, codes, part);
                }
            }
        }
        if constexpr (kPingPong) skip_tile();
    }
    ring.close();
}

}  // namespace rtk
