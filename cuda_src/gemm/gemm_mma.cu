// Matrix products with mma.sync, for every target and every pair of operands (rtkernels/ops/gemm/product.py):
// out[m, n] = act(sum over k of a[m, k] * scale_a * b[n, k] * scale_b + bias[n] + add[m, n]), dense or in groups.
//
// A block computes one tile of the result: 128x128 by 4 warps of 64x64 (kTile 0), 128x128 by 8 warps of 64x32 (1) or
// 64x64 by 4 warps of 32x32 (2). Both operands pass through a ring of stages in shared memory, filled by cp.async, 128
// bytes of k of the wider operand each (gemm_mma_operand.cuh). Lanes read their words one unit of k before the products
// that need them, and convert them to the type that the tensor core takes (gemm_mma_codes.cuh).
//
// Numerics. Sums stay in the accumulators of the tensor cores (fp32; int32 for integers; fp16 if Math says so). Kernels
// 1 and 2 also keep fp32 sums: every `sum_depth` of k the accumulators, times the scales of that stretch of k, are
// added to those. kBlockScales: scales of 16 or 32 elements of k multiply the operands as they are converted, which is
// exact in fp16 (e2m1 with ue4m3) and in bf16 (also with e8m0, and e4m3 with e8m0), or are passed to the MMA where the
// target supports it (sm_120a). Scales that span all of k multiply the sums at the end, with the other steps of
// gemm_mma_finish.cuh.
#include "gemm/gemm_mma_finish.cuh"
#include "gemm/gemm_mma_scales.cuh"
#include "gemm/gemm_mma_shape.cuh"
#include "gemm/gemm_mma_tiles.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

struct MmaArguments {
    const void *a, *b, *scale_a, *scale_b, *global_scale, *bias, *add;
    void *out, *out_scale;
    const void* bounds;
    i64 m, n, k, a_pitch, b_pitch, out_pitch, add_pitch, a_group, b_group, out_group, add_group, scale_a_rows,
        scale_a_depth, scale_a_row_pitch, scale_a_depth_pitch, scale_a_group, scale_b_rows, scale_b_depth,
        scale_b_row_pitch, scale_b_depth_pitch, scale_b_group, out_scale_pitch, out_scale_group, sum_depth, k_align,
        group_kind, group_count, stages, options;
};

template <typename A, typename B, typename Math, bool kBlockScales, int kLayout, int kTile>
__global__ void __launch_bounds__(kTile == 1 ? 256 : 128, kTile == 1 ? 1 : 2)
    gemm_mma(const __grid_constant__ MmaArguments args) {
    using Shape = MmaShape<A, B, Math, kBlockScales, kLayout, kTile>;
    using OperandA = typename Shape::OperandA;
    using OperandB = typename Shape::OperandB;
    using Sums = typename Math::Sums;
    constexpr int kBlocksM = Shape::kWarpM / 16, kBlocksN = Shape::kWarpN / 8, kDepth = Shape::kDepth;
    extern __shared__ __align__(128) u8 memory[];
    const auto option = [&](int place) { return static_cast<int>(args.options >> (4 * place)) & 15; };
    ptx::launch_dependents();
    ptx::wait_for_previous();

    // Position of the tile.
    const int gate = option(9), kind_a = option(1), kind_b = option(2);
    const MmaTile tile =
        mma_tile<Shape::kTileM, Shape::kTileN>(static_cast<const i32*>(args.bounds), static_cast<int>(args.group_kind),
                                               static_cast<int>(args.group_count), args.m, gate ? 2 * args.n : args.n,
                                               args.k, memory);
    if (tile.rows == 0) return;
    __shared__ MmaTile tile_for_later;  // dropped in between to save registers
    if (threadIdx.x == 0) tile_for_later = tile;
    const bool has_table = args.group_kind == kGroupRows || args.group_kind == kGroupSpans;
    if (has_table) __syncthreads();  // its memory is reused for stages
    const i64 group = tile.group, tile_columns = gate ? Shape::kTileN / 2 : Shape::kTileN, n0 = tile.n * tile_columns;
    const i64 of_a = group * args.a_group, of_b = group * args.b_group;
    const OperandA left{static_cast<const u8*>(args.a) + of_a * Shape::kBitsA / 8, args.a_pitch,
                        MmaRows{tile.row, tile.rows, 0}, (option(0) & 1) != 0, (option(0) & 4) != 0};
    const OperandB right{static_cast<const u8*>(args.b) + of_b * Shape::kBitsB / 8, args.b_pitch,
                         MmaRows{n0, static_cast<int>(min(args.n - n0, tile_columns)), gate ? args.n : 0},
                         (option(0) & 2) != 0, (option(0) & 8) != 0};
    const auto scales = [&](i64 of_group, const void* data, i64 rows, i64 depth, i64 row_pitch, i64 depth_pitch, i64 pitch,
                            int given) {
        const int token = given & 3;
        const i64 columns = depth == 0 ? 1 : static_cast<i64>(divided(static_cast<u32>(args.k - 1), depth)) + 1;
        return MmaScales{static_cast<const u8*>(data) + of_group * pitch * (token == kScaleFp32 ? 4 : 1),
                         row_pitch, depth_pitch, rows, depth, (columns + 3) / 4, token, (given & 4) != 0, (given & 8) != 0};
    };
    const auto scales_of_a = [&](i64 of_group) {
        return scales(of_group, args.scale_a, args.scale_a_rows, args.scale_a_depth, args.scale_a_row_pitch,
                      args.scale_a_depth_pitch, args.scale_a_group,
                      option(3));
    };
    const auto scales_of_b = [&](i64 of_group) {
        return scales(of_group, args.scale_b, args.scale_b_rows, args.scale_b_depth, args.scale_b_row_pitch,
                      args.scale_b_depth_pitch, args.scale_b_group,
                      option(4));
    };
    const MmaScales left_scales = scales_of_a(group), right_scales = scales_of_b(group);
    // Scales that span all of k are applied at the end.
    const bool scales_left = left_scales.token != kNoScale && left_scales.depth != 0;
    const bool scales_right = right_scales.token != kNoScale && right_scales.depth != 0;
    const int stretches = kTile == 2 && args.sum_depth < kDepth ? kDepth / static_cast<int>(args.sum_depth) : 1;  // in a stage
    const int k_begin = tile.k_first / static_cast<int>(args.k_align) * static_cast<int>(args.k_align);
    const int steps = (tile.k_last - k_begin + kDepth - 1) / kDepth;

    // The ring of stages.
    const ptx::SharedAddress base = ptx::shared_address(memory);
    const int stage_count = static_cast<int>(args.stages);
    const u8* from_a = left.start(k_begin);
    const u8* from_b = right.start(k_begin);
    const int scale_ring = stage_count * Shape::kStageBytes;  // of floats
    int fetched = 0, fetch_slot = 0;
    bool in_parts = false;  // the next stage is fetched in parts, one per unit
    auto fetch_begins = [&]() {
        const int k0 = k_begin + fetched * kDepth;
        in_parts = fetched < steps && left.in_parts(k0, tile.k_last) && right.in_parts(k0, tile.k_last);
        if (fetched >= steps) return;
        const ptx::SharedAddress to = base + fetch_slot * Shape::kStageBytes;
        if (!in_parts) {
            left.fetch(to, from_a, k0, tile.k_first, tile.k_last);
            right.fetch(to + OperandA::kBytes, from_b, k0, tile.k_first, tile.k_last);
        }
        if constexpr (kBlockScales || Shape::kPromotes) {
            // A thread fetches scales of one row, or two.
            constexpr int kRows = Shape::kTileM + Shape::kTileN;
#pragma unroll
            for (int r = 0; r < kRows; r += Shape::kThreads) {
                const int row = r + static_cast<int>(threadIdx.x);
                const bool of_a = row < Shape::kTileM;
                const MmaScales& of = of_a ? left_scales : right_scales;
                if (row >= kRows || (of_a ? !scales_left : !scales_right)) continue;
                const i64 source = max(of_a ? left.rows.source(row) : right.rows.source(row - Shape::kTileM), 0ll);
                if constexpr (kBlockScales) {
                    fetch_scale_bytes<Shape::kScaleBytes>(to + Shape::kScaleAt + row * Shape::kScaleBytes, of, source,
                                                          divided(static_cast<u32>(k0), of.depth) & ~3u,
                                                          divided(static_cast<u32>(args.k - 1), of.depth) + 1u);
                } else {
                    const ptx::SharedAddress at =
                        base + scale_ring + fetched % (stage_count + 1) * Shape::kScaleStage + row * 4;
                    fetch_scale_floats(at, kRows * 4, of, source, k0, stretches, static_cast<int>(args.sum_depth), tile.k_last);
                }
            }
        }
    };
    auto fetch_unit = [&](int unit) {
        const ptx::SharedAddress to = base + fetch_slot * Shape::kStageBytes;
        constexpr int kPartsA = (OperandA::kPerThread + Shape::kUnits - 1) / Shape::kUnits;
        constexpr int kPartsB = (OperandB::kPerThread + Shape::kUnits - 1) / Shape::kUnits;
#pragma unroll
        for (int i = 0; i < kPartsA; ++i) {
            const int part = unit * kPartsA + i;
            left.fetch_part(in_parts && part < OperandA::kPerThread, to, from_a, part);
        }
#pragma unroll
        for (int i = 0; i < kPartsB; ++i) {
            const int part = unit * kPartsB + i;
            right.fetch_part(in_parts && part < OperandB::kPerThread, to + OperandA::kBytes, from_b, part);
        }
    };
    auto fetch_ends = [&]() {
        from_a += left.stage_stride();
        from_b += right.stage_stride();
        ++fetched;
        if (++fetch_slot == stage_count) fetch_slot = 0;
        ptx::cp_async_commit();
    };
    // All stages have arrived except those issued last, which belong to the next steps.
    auto wait_for_stage = [&]() {
        if (stage_count == 2) {
            ptx::cp_async_wait<0>();
        } else if (stage_count == 3) {
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<2>();
        }
        __syncthreads();
    };
#pragma unroll 1
    for (int i = 0; i < stage_count - 1; ++i) {
        fetch_begins();
#pragma unroll 1
        for (int unit = 0; unit < Shape::kUnits; ++unit) fetch_unit(unit);
        fetch_ends();
    }

    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4, t = lane % 4;
    const int warp_m = warp / Shape::kWarpsN * Shape::kWarpM, warp_n = warp % Shape::kWarpsN * Shape::kWarpN;
    Sums sums[kBlocksM][kBlocksN];
    float total[Shape::kPromotes ? kBlocksM : 1][Shape::kPromotes ? kBlocksN : 1][4];
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
            sums[i][j].clear();
            if constexpr (Shape::kPromotes)
#pragma unroll
                for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;
        }
    // Accumulators start from the fp32 result so far, so that a sum over k in several launches has the bits of one.
    if constexpr (!Shape::kPromotes && Shape::kBitsA == 16 && Shape::kBitsB == 16 && is_same<Sums, FloatSums>::value) {
        if (option(13) != 0) {
            const float* const from = static_cast<const float*>(args.out) + group * args.out_group;
#pragma unroll
            for (int i = 0; i < 2 * kBlocksM; ++i) {
                const int row = warp_m + 8 * i + g;
#pragma unroll
                for (int j = 0; j < 2 * kBlocksN; ++j) {
                    const i64 column = n0 + warp_n + j / 2 * 8 + 2 * t + j % 2;
                    ptx::ld_float_if(row < tile.rows && column < args.n, sums[i / 2][j / 2].v[i % 2 * 2 + j % 2],
                                     from + (tile.row + row) * args.out_pitch + column);
                }
            }
        }
    }

    // Adds the accumulators, times the scales of their stretch of k, to the fp32 sums.
    auto promote = [&](const float* scales_now) {
        if constexpr (Shape::kPromotes) {
            float column_scale[2 * kBlocksN];
#pragma unroll
            for (int j = 0; j < 2 * kBlocksN; ++j)
                column_scale[j] = scales_right ? scales_now[Shape::kTileM + warp_n + j / 2 * 8 + 2 * t + j % 2] : 1.0f;
#pragma unroll
            for (int i = 0; i < 2 * kBlocksM; ++i) {
                const float row_scale = scales_left ? scales_now[warp_m + 8 * i + g] : 1.0f;
#pragma unroll
                for (int j = 0; j < 2 * kBlocksN; ++j) {
                    const int e = i % 2 * 2 + j % 2;
                    float& to = total[i / 2][j / 2][e];
                    to = fmaf(sums[i / 2][j / 2].value(e) * row_scale, column_scale[j], to);
                }
            }
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
                for (int j = 0; j < kBlocksN; ++j) sums[i][j].clear();
        }
    };

    // Words of the next unit are loaded while this one is multiplied: those of b into a second set of registers, those
    // of a into registers that have just been used for the last time.
    using WordsA = MmaWords<OperandA, 2 * kBlocksM, Shape::kChunks, Shape::kRawA, true>;
    using WordsB = MmaWords<OperandB, kBlocksN, Shape::kChunks, Shape::kRawB, false>;
    WordsA words_a;
    WordsB words_b[2];
    auto load_b = [&](int to, const u8* stage, int unit) {
#pragma unroll
        for (int part = 0; part < kBlocksN / WordsB::kAtATime; ++part)
            words_b[to].load(stage + OperandA::kBytes, warp_n, unit, part);
    };
    // Byte of the scales of this lane's elements of a unit, as a pair.
    auto block_scale = [&](const MmaScales& of, const u8* bytes, int k0, int row, int unit) -> u32 {
        if constexpr (kBlockScales) {
            const int shift = static_cast<int>(of.depth >> 32);  // of a power of two
            const int inside = unit * Shape::kUnitDepth + t * (32 / Shape::kMinBits);
            const u32 byte = bytes[row * Shape::kScaleBytes + (k0 >> shift & 3) + (inside >> shift)];
            return scale_pair<is_same<Math, MathBf16>::value>(byte, of.token);
        }
        return 0u;
    };

    const bool integers = option(5) == kTypeInt32;
    int slot = 0, until = static_cast<int>(args.sum_depth);
    if (steps > 0) {
        wait_for_stage();
        load_b(0, memory, 0);
#pragma unroll
        for (int part = 0; part < 2 * kBlocksM / WordsA::kAtATime; ++part) words_a.load(memory, warp_m, 0, part);
    }
    static_assert(Shape::kUnits % 2 == 0, "the first unit of a stage is 0 modulo 2, the last one is not");
    auto work = [&](int step, int unit, int now) {  // now: unit % 2, known to the compiler
        if (now == 0 && unit == 0) fetch_begins();
        fetch_unit(unit);
        const int k0 = k_begin + step * kDepth;
        const u8* scale_memory = memory + slot * Shape::kStageBytes + Shape::kScaleAt;
        // Scales first: after the barrier below the stage belongs to a later step.
        [[maybe_unused]] u32 pairs_a[2 * kBlocksM], pairs_b[kBlocksN];
        if constexpr (Shape::kScaleVector > 0) {
            // Lane 4g + t has the word of row 8t + g of every 32.
            const u8* from = scale_memory + unit * Shape::kScaleVector / 4 * 4 + (8 * t + g) * Shape::kScaleBytes;
#pragma unroll
            for (int i = 0; i < kBlocksM; i += 2)
                pairs_a[i / 2] = *reinterpret_cast<const u32*>(from + (warp_m + 16 * i) * Shape::kScaleBytes);
#pragma unroll
            for (int j = 0; j < kBlocksN; j += 4)
                pairs_b[j / 4] =
                    *reinterpret_cast<const u32*>(from + (Shape::kTileM + warp_n + 8 * j) * Shape::kScaleBytes);
        } else if constexpr (kBlockScales) {
            const bool with_a = left_scales.token != kNoScale;
#pragma unroll
            for (int i = 0; i < 2 * kBlocksM; ++i)
                pairs_a[i] = with_a ? block_scale(left_scales, scale_memory, k0, warp_m + 8 * i + g, unit) : 0u;
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j)
                pairs_b[j] = block_scale(right_scales, scale_memory + Shape::kTileM * Shape::kScaleBytes, k0,
                                         warp_n + 8 * j + g, unit);
        }
        const int next = now == 0 || unit + 1 < Shape::kUnits ? unit + 1 : 0;
        if (next == 0) {
            fetch_ends();
            if (++slot == stage_count) slot = 0;
            wait_for_stage();
        }
        const bool more = next != 0 || step + 1 < steps;
        const u8* stage = memory + slot * Shape::kStageBytes;
        if (more) load_b(1 - now, stage, next);

        // Columns are processed in two parts where words of a take many registers.
        constexpr int kParts = Shape::kRawA == 4 ? 2 : 1, kColumns = kBlocksN / kParts;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            u32 columns[kColumns][Shape::kWords];
            words_b[now].template expand<B, Math, (Shape::kBitsB < Shape::kBitsA), Shape::kConvertScaled>(
                part * kColumns, kind_b, pairs_b + part * kColumns, columns);
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i) {
                constexpr bool kScaledA = Shape::kConvertScaled && Shape::kBitsA < 16;
                u32 rows[2][Shape::kWords];
                words_a.template expand<A, Math, (Shape::kBitsA < Shape::kBitsB), kScaledA>(2 * i, kind_a,
                                                                                         pairs_a + 2 * i, rows);
#pragma unroll
                for (int p = 0; p < Shape::kWords; p += 2) {
                    const u32 fragment[4] = {rows[0][p], rows[1][p], rows[0][p + 1], rows[1][p + 1]};
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        const int j = part * kColumns + c;
                        const u32 column[2] = {columns[c][p], columns[c][p + 1]};
                        if constexpr (Shape::kScaleVector > 0) {
                            Math::multiply(sums[i][j], fragment, column, pairs_a[i / 2], pairs_b[j / 4],
                                           unit * Shape::kScaleVector % 4, i, j);
                        } else {
                            Math::template multiply<A, B>(sums[i][j], fragment, column, kind_a, kind_b);
                        }
                    }
                }
                constexpr int kTogether = WordsA::kAtATime / 2;
                if (part + 1 == kParts && i % kTogether == kTogether - 1 && more)
                    words_a.load(stage, warp_m, next, i / kTogether);
            }
        }
        if constexpr (Shape::kPromotes) {
            // Large tiles have stretches of whole stages.
            if (kTile == 2 || next == 0) {
                until -= kTile == 2 ? Shape::kUnitDepth : kDepth;
                if (!integers && (until <= 0 || (step + 1 == steps && next == 0))) {
                    until = static_cast<int>(args.sum_depth);
                    const int stretch = kTile == 2 ? unit * Shape::kUnitDepth / static_cast<int>(args.sum_depth) : 0;
                    // Stretches past the last k are zeros, which no scale may turn into NaN.
                    if (k0 + stretch * static_cast<int>(args.sum_depth) < tile.k_last)
                        promote(reinterpret_cast<const float*>(memory + scale_ring +
                                                               step % (stage_count + 1) * Shape::kScaleStage) +
                                stretch * (Shape::kTileM + Shape::kTileN));
                }
            }
        }
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if constexpr (!Shape::kConvertScaled) {
#pragma unroll
            for (int unit = 0; unit < Shape::kUnits; ++unit) work(step, unit, unit % 2);
        } else {  // unrolling their conversions would overflow the instruction cache
#pragma unroll 1
            for (int unit = 0; unit < Shape::kUnits; unit += 2) {
                work(step, unit, 0);
                work(step, unit + 1, 1);
            }
        }
    }

    // Through shared memory, so that whole rows are written.
    ptx::cp_async_wait<0>();
    __syncthreads();
    constexpr int kExcess = excess_of<A, Math, Shape::kConvertScaled>() + excess_of<B, Math, Shape::kConvertScaled>();
    float* staged = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float2 pair;
                if (integers) {
                    pair.x = __int_as_float(sums[i][j].integer(2 * r) >> (kExcess > 0 ? kExcess : 0));
                    pair.y = __int_as_float(sums[i][j].integer(2 * r + 1) >> (kExcess > 0 ? kExcess : 0));
                } else if constexpr (Shape::kPromotes) {
                    pair.x = total[i][j][2 * r], pair.y = total[i][j][2 * r + 1];
                } else {
                    pair.x = sums[i][j].value(2 * r), pair.y = sums[i][j].value(2 * r + 1);
                }
                float* to = staged + (warp_m + 16 * i + g + 8 * r) * (Shape::kTileN + 8) + warp_n + 8 * j + 2 * t;
                *reinterpret_cast<float2*>(to) = pair;
            }
    __syncthreads();
    const MmaTile done = tile_for_later;
    const int out_type = option(5), quantized = option(10);
    const bool out_of_words = out_type == kTypeFp32 || out_type == kTypeInt32;
    const i64 out_bits = out_of_words ? 32 : out_type < kTypeFp32 ? 16 : out_type < kTypeE2m1 ? 8 : 4;
    const i64 add_bytes = option(7) == kTypeFp32 ? 4 : 2, scale_bytes = quantized == kQuantized16 ? 1 : 4;
    MmaFinish finish{static_cast<u8*>(args.out) + done.group * args.out_group * out_bits / 8,
                     static_cast<u8*>(args.out_scale) + done.group * args.out_scale_group * scale_bytes, args.bias,
                     static_cast<const u8*>(args.add) + done.group * args.add_group * add_bytes,
                     static_cast<const float*>(args.global_scale), scales_of_a(done.group), scales_of_b(done.group),
                     args.out_pitch, args.add_pitch, args.n, args.out_scale_pitch, out_type, option(6), option(7), option(8),
                     option(9), quantized,
                     option(11), option(12) != 0};
    if (args.scale_a_depth != 0) finish.scale_a.token = kNoScale;
    if (args.scale_b_depth != 0) finish.scale_b.token = kNoScale;
    const float factor = __uint_as_float(static_cast<u32>(127 - kExcess) << 23);
    finish.template run<Shape::kTileM, Shape::kTileN, Shape::kThreads>(staged, done.row, done.rows, done.n, factor);
}

}  // namespace rtk
