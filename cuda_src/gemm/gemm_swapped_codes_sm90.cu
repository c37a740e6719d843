// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n]) factor + add[m, n] for up to TOKENS rows of a in bf16 and
// weights b in codes of 4 or 8 bits. As in gemm_swapped_sm90.cu the weights are wgmma's left operand and tokens its n;
// here each lane converts codes of its own two rows in registers (gemm_swapped_codes.cuh has the order of k).
//
// A cluster of `parts` blocks (a power of two) owns a tile of 64 CONSUMERS rows of b (gated: half as many and their
// counterparts) and all rows of a; each block has a range of steps of 128 of k. Stages of a ring hold codes and tokens, by
// TMA, and scales along k, by cp.async. Tokens come from gemm_swapped_tokens.cu, in the order of k that codes need and behind
// a norm if there is one, so nothing in a step waits for other warps. Each warpgroup converts and multiplies 64 of k at a
// time, and converts the next ones while these products are in flight. Scales along k multiply the sums of a step, but those
// of 16 e2m1 codes multiply the codes, exactly. Sums of the blocks and launches that overlap are as in gemm_swapped_sm90.cu.
//
// No warp only loads: 8 of 9 warps of two blocks could have no more than 96 registers. In the middle of a step, warps release
// the stage of the step before; at the end of it each warp loads the scales of its rows into it, and one lane, of another warp
// in each step, codes and tokens.
//
// Shared memory: the ring's codes and tokens, then its scales; after the loop, in its place, sums (gemm_swapped_finish.cuh).
#include "common/pipeline.cuh"
#include "gemm/gemm_swapped_codes.cuh"
#include "gemm/gemm_swapped_finish.cuh"
#include "gemm/operand.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk {

// As in rtkernels/ops/gemm/swapped_codes_plan.py.
inline constexpr i64 kSwappedSigned = 16, kSwappedVaries = 32;

template <typename Codes, int TOKENS, int CONSUMERS>
struct SwappedCodesShape {
    static constexpr bool kFine = SwappedCodes<Codes>::kScaled;
    static constexpr int kRows = 64 * CONSUMERS, kDepth = 128, kRowBytes = kDepth * SwappedCodes<Codes>::kBits / 8;
    static constexpr int kCodeBytes = kRows * kRowBytes, kBoxBytes = TOKENS * static_cast<int>(kTileRow);  // of 64 of k
    static constexpr int kTileBytes = kCodeBytes + 2 * kBoxBytes;
    static constexpr int kScaleBytes = kRows * (kFine ? 8 : 4);
    static constexpr int kStages = 110592 / (kTileBytes + kScaleBytes);
    static_assert(kCodeBytes % 1024 == 0 && kBoxBytes % 1024 == 0, "boxes begin at multiples of 1024 bytes");
    static_assert(TOKENS * SwappedTile<CONSUMERS>::kPitch * 4 <= kStages * kTileBytes, "sums fit into the ring");
};

// Position of a vector in a tile whose rows are kRowBytes long, swizzled as wide as they are.
template <int kRowBytes>
RTK_DEVICE int swizzled_vector(int row, int vector) {
    return row * kRowBytes + ((vector ^ (kRowBytes == 128 ? row & 7 : row >> 1 & 3)) << 4);
}

template <typename Codes, int TOKENS, int CONSUMERS>
__global__ void __launch_bounds__(128 * CONSUMERS, 2)
    gemm_swapped_codes_sm90(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map,
                            const u8* b, const u8* scale, const float* global_scale, const void* bias, const void* add,
                            void* out, i64 m, i64 n, i64 k_, i64 b_pitch, i64 out_pitch, i64 add_pitch, i64 scale_row,
                            i64 scale_group, i64 scale_shift, i64 parts_shift_, i64 flags, i64 types, double factor) {
    using Shape = SwappedCodesShape<Codes, TOKENS, CONSUMERS>;
    using Left = SwappedCodes<Codes>;
    constexpr bool kFine = Shape::kFine;
    constexpr int kRows = Shape::kRows, kRowBytes = Shape::kRowBytes, kStages = Shape::kStages, kDepth = Shape::kDepth;
    constexpr int kWarps = 4 * CONSUMERS, kThreads = 128 * CONSUMERS, kHalf = TOKENS / 2;
    constexpr int kBlocks = TOKENS > 32 && !kFine ? 1 : 2, kGroups = 4 / kBlocks;  // two would spill
    constexpr int kEach = Left::kWords == 2 ? kBlocks : 2;  // blocks whose codes are read at a time
    extern __shared__ u8 memory[];
    __shared__ alignas(8) u64 barriers[2 * kStages];
    const ptx::SharedAddress ring = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const tiles = memory + (ring - ptx::shared_address(memory));
    constexpr int kExtras = kStages * Shape::kTileBytes;  // where scales of the ring begin
    const Pipeline<kStages> pipeline{ptx::shared_address(barriers)};
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int parts_shift = static_cast<int>(parts_shift_), parts = 1 << parts_shift;
    const int rank = parts == 1 ? 0 : ptx::cluster_rank(), tokens = static_cast<int>(m), k = static_cast<int>(k_);
    const bool gated = flags & kSwappedGated, constant = flags & kSwappedConstant, varies = flags & kSwappedVaries;
    const SwappedTile<CONSUMERS> tile{static_cast<int>(blockIdx.x) >> parts_shift, n, gated};
    const int steps = (k + kDepth - 1) / kDepth;
    const int begin = steps * rank >> parts_shift, end = steps * (rank + 1) >> parts_shift;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };

    if (thread == 0) pipeline.init(varies ? 1 + kThreads : 1, kWarps);  // filled by an announcement, and copies of all threads
    if (!constant) {
        const int first_steps = min(end - begin, kStages);
        for (int i = thread; i < kRows * first_steps; i += kThreads)
            ptx::prefetch_l2(b + tile.existing_row(i % kRows) * b_pitch + (begin + i / kRows) * static_cast<i64>(kRowBytes));
        ptx::wait_for_previous();
    }
    ptx::launch_dependents();
    __syncthreads();

    float sums[kHalf], products[kHalf];  // of all steps; of the last one, before its scales
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    SwappedFactors<CONSUMERS> factors;

    // Announces the bytes of the tokens, too.
    auto load_weights = [&](const PipelineState<kStages>& to, int step) {
        if (lane != 0) return;
        const ptx::SharedAddress stage = ring + to.stage * Shape::kTileBytes, full = pipeline.full(to);
        const i32 row = static_cast<i32>(tile.first);
        pipeline.expect(to, Shape::kTileBytes);
        ptx::tma_load_2d(stage, b_map, full, step * kRowBytes, row);
        if (gated) ptx::tma_load_2d(stage + Shape::kCodeBytes / 2, b_map, full, step * kRowBytes, row + static_cast<i32>(n));
    };
    // Each warp loads the scales along k of its own 16 rows, after it has read those that were in their place.
    const i64 scaled_row = tile.existing_row(warp * 16 + lane % 16);
    const u8* const own_scales = scale + (kFine ? scaled_row * scale_row : 4 * (scaled_row >> scale_shift) * scale_row);
    auto load_scales = [&](const PipelineState<kStages>& to, int step) {
        if (!varies) return;
        const ptx::SharedAddress extra = ring + (kExtras + to.stage * Shape::kScaleBytes);
        if (lane < 16) {
            if constexpr (kFine) {
                ptx::cp_async_8_partial(extra + 8 * (warp * 16 + lane), own_scales + step * 8, min(8, (k + 15) / 16 - step * 8));
            } else {
                ptx::cp_async_4_partial(extra + 4 * (warp * 16 + lane), own_scales + 4 * step * scale_group, 4);
            }
        }
        ptx::cp_async_arrive(pipeline.full(to));
    };
    auto load_tokens = [&](const PipelineState<kStages>& to, int step) {
        if (lane != 0) return;
        const ptx::SharedAddress box = ring + (to.stage * Shape::kTileBytes + Shape::kCodeBytes), full = pipeline.full(to);
        ptx::tma_load_2d(box, a_map, full, step * kDepth, 0);
        ptx::tma_load_2d(box + Shape::kBoxBytes, a_map, full, step * kDepth + kDepth / 2, 0);
    };

    const float* const of_rows = kFine || varies ? nullptr : reinterpret_cast<const float*>(scale);
    factors.load(tile, lane, of_rows, scale_row, bias, type(0));
    const int first_end = min(end, begin + kStages);
    PipelineState<kStages> to;
    for (int i = begin; i < first_end; ++i, to.advance()) {
        if (warp == 0) load_weights(to, i);
        load_scales(to, i);
    }
    if (constant) ptx::wait_for_previous();
    if (warp == 0) {
        to = {};
        for (int i = begin; i < first_end; ++i, to.advance()) load_tokens(to, i);
    }
    const CodeOptions options = {(flags & kSwappedSigned) != 0};
    const int own_row = warp * 16 + lane / 4;  // and + 8
    const int matrix_row = warp * 16 + lane % 16;
    // Of a step whose stage has not been released.
    auto add_products = [&](int stage) {
        const float* const scales = reinterpret_cast<const float*>(tiles + kExtras + stage * Shape::kScaleBytes) + own_row;
        float scale_of[2] = {1.0f, 1.0f};
        if (varies) scale_of[0] = scales[0], scale_of[1] = scales[8];
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(products);
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sums[e] = fmaf(products[e], scale_of[e / 2 % 2], sums[e]);
    };
    u32 left[2][2 * kBlocks][4];  // of two groups of products, kBlocks of 32 of k each
    u32 words[2][2][Left::kWords];  // of 64 of k: [block][row]
    auto read = [&](const PipelineState<kStages>& from, int block) {  // kEach of them
        const u8* const stage = tiles + from.stage * Shape::kTileBytes;
#pragma unroll
        for (int x = 0; x < Left::kWords; ++x) {  // two vectors of 16 bytes at a time
            if (kEach == 1 && x != block % 2) continue;
            u32 four[4];
            const int vector = 2 * (block / 2 * Left::kWords + x) + lane / 16;
            ptx::ldmatrix_x4(four, stage + swizzled_vector<kRowBytes>(matrix_row, vector));
#pragma unroll
            for (int y = 0; y < 2; ++y)
#pragma unroll
                for (int r = 0; r < 2; ++r) words[Left::kWords == 1 ? y : x][r][Left::kWords == 1 ? 0 : y] = four[2 * y + r];
        }
    };
    auto convert = [&](const PipelineState<kStages>& from, int block, u32(&to)[2 * kBlocks][4]) {
        u32 scales[2][2] = {};  // [row][block of a half]
        if constexpr (kFine) {
            const u8* const extra = tiles + kExtras + from.stage * Shape::kScaleBytes;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 word = *reinterpret_cast<const u32*>(extra + 8 * (own_row + 8 * r) + 2 * block);
                Left::scale_pairs(__byte_perm(word, 0u, lane % 4 < 2 ? 0x4420u : 0x4431u), scales[r]);
            }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 pair[4];
                Left::pairs(words[(block + b) % 2][r], scales[r][b], options, pair);
#pragma unroll
                for (int p = 0; p < 4; ++p) to[2 * b + p / 2][2 * (p % 2) + r] = pair[p];
            }
#pragma unroll
        for (auto& quad : to) ptx::wgmma_pin(quad);
    };
    // The first group of a step. The products before have read these registers.
    auto convert_first = [&](const PipelineState<kStages>& from) {
        pipeline.wait(from);
        read(from, 0);
        ptx::wgmma_wait<1>();
        convert(from, 0, left[0]);
        if (kBlocks == 2) read(from, 2);
    };

    PipelineState<kStages> state;
    if (begin < end) convert_first(state);
    for (int i = begin; i < end; ++i) {
        // The stage of the step before, as the use of step i - 1 + kStages.
        auto before = [&] {
            const bool first = state.stage == 0;
            return PipelineState<kStages>{first ? kStages - 1 : state.stage - 1, first ? state.phase : state.phase ^ 1u};
        };
        auto multiply = [&](int block, const u32(&by)[2 * kBlocks][4]) {
            const ptx::SharedAddress box =
                ring + (state.stage * Shape::kTileBytes + Shape::kCodeBytes + block / 2 * Shape::kBoxBytes);
            const u64 right = k_major_descriptor(box) + block % 2 * (2 * kNextKMajor);
            ptx::wgmma_fence();
#pragma unroll
            for (int p = 0; p < 2 * kBlocks; ++p) {
                if constexpr (kFine) {
                    ptx::wgmma_left<bf16, bf16>(sums, by[p], right + p * kNextKMajor, true);
                } else {
                    ptx::wgmma_left<bf16, bf16>(products, by[p], right + p * kNextKMajor, block != 0 || p != 0);
                }
            }
            ptx::wgmma_commit();
        };

        if (!kFine && i != begin) add_products(before().stage);
        multiply(0, left[0]);
#pragma unroll
        for (int g = 1; g < kGroups; ++g) {
            ptx::wgmma_wait<1>();  // the group before the last one, which had the same registers
            if (g == 1 && i != begin && lane == 0) pipeline.release(before());
            if (kBlocks == 1 && g % kEach == 0) read(state, g);
            convert(state, g * kBlocks, left[g % 2]);
            multiply(g * kBlocks, left[g % 2]);
        }
        const int next = i - 1 + kStages;
        __syncwarp();
        if (i != begin && next < end) {
            const PipelineState<kStages> to = before();
            load_scales(to, next);
            if (warp == i % kWarps && lane == 0) {
                pipeline.acquire(to);
                load_weights(to, next), load_tokens(to, next);
            }
        }
        __syncwarp();
        state.advance();
        // Not before add_products, where the compiler would move the wait for all products up.
        if (i + 1 < end) convert_first(state);
    }
    if (!kFine && begin < end) add_products((end - begin - 1) % kStages);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(sums);

    SwappedExchange<CONSUMERS> exchange{reinterpret_cast<float*>(tiles), tokens, parts_shift, rank};
    exchange.barrier();  // all rings of the cluster are free behind it
    exchange.send(sums, warp, lane);
    exchange.barrier();

    const SkinnyStore store = {add, out, out_pitch, add_pitch, type(1), type(2), type(3), false, gated};
    float common = Left::kFactor;
    if (global_scale != nullptr) common *= *global_scale;
    exchange.finish(tile, factors, store, warp, lane, true, static_cast<float>(factor), [&](int) { return common; });
}

}  // namespace rtk
