// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n]) factor + add[m, n] for up to TOKENS rows of a in bf16 and
// weights b in codes of 4 or 8 bits. As in gemm_swapped_sm90.cu the weights are wgmma's left operand and tokens its n;
// here each lane converts codes of its own two rows in registers (gemm_swapped_codes.cuh has the order of k).
//
// A cluster of `parts` blocks (a power of two) owns a tile of 64 CONSUMERS rows of b (gated: half as many and their
// counterparts) and all rows of a; each block has a range of steps of 128 of k. Stages of a ring hold codes and tokens, by
// TMA, and scales along k and a norm's weight, by cp.async. In a step, all threads reorder the tokens in shared memory,
// behind a norm times offset + gain[k], and meet; then warpgroups convert and multiply 64 of k at a time. Scales along k
// multiply the sums of a step, but those of 16 e2m1 codes multiply the codes, exactly. Norms, sums of the blocks and
// launches that overlap are as in gemm_swapped_sm90.cu.
//
// No warp only loads: 8 of 9 warps of two blocks could have no more than 96 registers. Where all threads meet in a step,
// nobody reads the stage of the step before any more, and one warp, another one in each step, fills it again.
//
// Shared memory: the ring's codes and tokens, then its scales and gains; after the loop, in its place, sums
// (gemm_swapped_finish.cuh) and sums of squares of four threads for a token.
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
    static constexpr int kTileBytes = kCodeBytes + 2 * kBoxBytes, kGainBytes = 2 * kDepth;
    static constexpr int kScaleBytes = kRows * (kFine ? 8 : 4), kExtraBytes = kScaleBytes + kGainBytes;
    static constexpr int kStages = 110592 / (kTileBytes + kExtraBytes);
    static_assert(kCodeBytes % 1024 == 0 && kBoxBytes % 1024 == 0, "boxes begin at multiples of 1024 bytes");
    static_assert(TOKENS * SwappedTile<CONSUMERS>::kPitch * 4 + 4 * TOKENS * 4 <= kStages * kTileBytes, "sums fit into the ring");
    static_assert(4 * TOKENS <= 128 * CONSUMERS, "a thread reorders at most 64 bytes of a step");
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
                            const u8* gain, void* out, i64 m, i64 n, i64 k_, i64 b_pitch, i64 out_pitch, i64 add_pitch,
                            i64 scale_row, i64 scale_group, i64 scale_shift, i64 parts_shift_, i64 flags, i64 types,
                            double eps, double offset, double factor) {
    using Shape = SwappedCodesShape<Codes, TOKENS, CONSUMERS>;
    using Left = SwappedCodes<Codes>;
    constexpr bool kFine = Shape::kFine;
    constexpr int kRows = Shape::kRows, kRowBytes = Shape::kRowBytes, kStages = Shape::kStages, kDepth = Shape::kDepth;
    constexpr int kWarps = 4 * CONSUMERS, kThreads = 128 * CONSUMERS;
    extern __shared__ u8 memory[];
    __shared__ alignas(8) u64 barriers[2 * kStages];
    const ptx::SharedAddress ring = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const tiles = memory + (ring - ptx::shared_address(memory));
    constexpr int kExtras = kStages * Shape::kTileBytes;  // where scales and gains of the ring begin
    const Pipeline<kStages> pipeline{ptx::shared_address(barriers)};
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int parts_shift = static_cast<int>(parts_shift_), parts = 1 << parts_shift;
    const int rank = parts == 1 ? 0 : ptx::cluster_rank(), tokens = static_cast<int>(m), k = static_cast<int>(k_);
    const bool gated = flags & kSwappedGated, constant = flags & kSwappedConstant, varies = flags & kSwappedVaries;
    const bool norm = gain != nullptr;
    const SwappedTile<CONSUMERS> tile{static_cast<int>(blockIdx.x) >> parts_shift, n, gated};
    const int steps = (k + kDepth - 1) / kDepth;
    const int begin = steps * rank >> parts_shift, end = steps * (rank + 1) >> parts_shift;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };

    if (thread == 0) pipeline.init(1 + kWarp, 1);  // an announcement, and copies of all lanes; nobody waits for empty stages
    if (!constant) {
        const int first_steps = min(end - begin, kStages);
        for (int i = thread; i < kRows * first_steps; i += kThreads)
            ptx::prefetch_l2(b + tile.existing_row(i % kRows) * b_pitch + (begin + i / kRows) * static_cast<i64>(kRowBytes));
        ptx::wait_for_previous();
    }
    ptx::launch_dependents();
    __syncthreads();

    float sums[TOKENS / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    float square = 0.0f;  // of this thread's 32 of k of a token, of all steps
    SwappedFactors<CONSUMERS> factors;

    // Called by a warp: loads what belongs to the weights, and announces the bytes of the tokens, too.
    auto load_weights = [&](const PipelineState<kStages>& to, int step) {
        const ptx::SharedAddress stage = ring + to.stage * Shape::kTileBytes, full = pipeline.full(to);
        const ptx::SharedAddress extra = ring + (kExtras + to.stage * Shape::kExtraBytes);
        if (lane == 0) {
            const i32 row = static_cast<i32>(tile.first);
            pipeline.expect(to, Shape::kTileBytes);
            ptx::tma_load_2d(stage, b_map, full, step * kRowBytes, row);
            if (gated) ptx::tma_load_2d(stage + Shape::kCodeBytes / 2, b_map, full, step * kRowBytes, row + static_cast<i32>(n));
        }
        if (varies) {
#pragma unroll 1
            for (int local = lane; local < kRows; local += kWarp) {
                const i64 row = tile.existing_row(local);
                if constexpr (kFine) {
                    const i64 at = row * scale_row + step * 8;
                    ptx::cp_async_8_partial(extra + 8 * local, scale + at, min(8, (k + 15) / 16 - step * 8));
                } else {
                    const i64 at = (row >> scale_shift) * scale_row + step * scale_group;
                    ptx::cp_async_4_partial(extra + 4 * local, scale + 4 * at, 4);
                }
            }
        }
        if (norm && lane < Shape::kGainBytes / 16) {
            const int at = step * Shape::kGainBytes + 16 * lane, bytes = min(max(2 * k - at, 0), 16);
            ptx::cp_async_16_partial(extra + Shape::kScaleBytes + 16 * lane, gain + (bytes > 0 ? at : 0), bytes);
        }
        ptx::cp_async_arrive(full);
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
    if (warp == 0) {
        PipelineState<kStages> to;
        for (int i = begin; i < first_end; ++i, to.advance()) load_weights(to, i);
    }
    if (constant) ptx::wait_for_previous();
    if (warp == 0) {
        PipelineState<kStages> to;
        for (int i = begin; i < first_end; ++i, to.advance()) load_tokens(to, i);
    }
    const CodeOptions options = {(flags & kSwappedSigned) != 0};
    const int own_row = warp * 16 + lane / 4;  // and + 8
    const int matrix_row = warp * 16 + lane % 16;
    const int token = thread % TOKENS, part = thread / TOKENS;  // 32 of k of a step, if part < 4
    PipelineState<kStages> state, last;
    for (int i = begin; i < end; ++i, last = state, state.advance()) {
        u8* const stage = tiles + state.stage * Shape::kTileBytes;
        const u8* const extra = tiles + kExtras + state.stage * Shape::kExtraBytes;
        pipeline.wait(state);
        if (part < 4 && token < tokens) {
            u8* const box = stage + Shape::kCodeBytes + part / 2 * Shape::kBoxBytes;
            Raw<16> v[4];
#pragma unroll
            for (int q = 0; q < 4; ++q)
                v[q] = ptx::ld_shared_16(ptx::shared_address(box + swizzled_vector<128>(token, part % 2 * 4 + q)));
            if (norm) {
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    float value[8], gains[8];
                    unpack<bf16, 8>(v[q], value);
                    const u8* const of_k = extra + Shape::kScaleBytes + part * 64 + 16 * q;
                    unpack<bf16, 8>(ptx::ld_shared_16(ptx::shared_address(of_k)), gains);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        square = fmaf(value[e], value[e], square);
                        value[e] *= gains[e] + static_cast<float>(offset);
                    }
                    v[q] = pack<bf16, 8>(value);
                }
            }
            Left::reorder(v);
#pragma unroll
            for (int q = 0; q < 4; ++q)
                ptx::st_shared_16(ptx::shared_address(box + swizzled_vector<128>(token, part % 2 * 4 + q)), v[q]);
        }
        ptx::fence_async_shared();
        float products[TOKENS / 2];
        float(&accumulators)[TOKENS / 2] = kFine ? sums : products;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 64 of k, 32 of which are `block`
            u32 left[4][4];
            u32 words[2][2][Left::kWords];  // [block][row]
#pragma unroll
            for (int x = 0; x < Left::kWords; ++x) {  // two vectors of 16 bytes at a time
                u32 four[4];
                const int vector = 2 * (half * Left::kWords + x) + lane / 16;
                ptx::ldmatrix_x4(four, stage + swizzled_vector<kRowBytes>(matrix_row, vector));
#pragma unroll
                for (int y = 0; y < 2; ++y)
#pragma unroll
                    for (int r = 0; r < 2; ++r) words[Left::kWords == 1 ? y : x][r][Left::kWords == 1 ? 0 : y] = four[2 * y + r];
            }
            u32 scales[2][2] = {};  // [row][block]
            if constexpr (kFine) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 word = *reinterpret_cast<const u32*>(extra + 8 * (own_row + 8 * r) + 4 * half);
                    Left::scale_pairs(__byte_perm(word, 0u, lane % 4 < 2 ? 0x4420u : 0x4431u), scales[r]);
                }
            }
#pragma unroll
            for (int block = 0; block < 2; ++block)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    u32 pair[4];
                    Left::pairs(words[block][r], scales[r][block], options, pair);
#pragma unroll
                    for (int p = 0; p < 4; ++p) left[2 * block + p / 2][2 * (p % 2) + r] = pair[p];
                }
            if (half == 0) {
                __syncthreads();  // all tokens are in order, and the stage of the last step is free
                const int next = i - 1 + kStages;
                if (i != begin && next < end && warp == i % kWarps) load_weights(last, next), load_tokens(last, next);
            }
            const u64 right = k_major_descriptor(ring + (state.stage * Shape::kTileBytes + Shape::kCodeBytes + half * Shape::kBoxBytes));
#pragma unroll
            for (auto& quad : left) ptx::wgmma_pin(quad);
            ptx::wgmma_fence();
#pragma unroll
            for (int p = 0; p < 4; ++p)
                ptx::wgmma_left<bf16, bf16>(accumulators, left[p], right + p * kNextKMajor, kFine || half != 0 || p != 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(accumulators);
        }
        if constexpr (!kFine) {
            float scale_of[2] = {1.0f, 1.0f};
            const float* const scales = reinterpret_cast<const float*>(extra) + own_row;
            if (varies) scale_of[0] = scales[0], scale_of[1] = scales[8];
#pragma unroll
            for (int e = 0; e < TOKENS / 2; ++e) sums[e] = fmaf(products[e], scale_of[e / 2 % 2], sums[e]);
        }
    }

    SwappedExchange<CONSUMERS, 4> exchange{reinterpret_cast<float*>(tiles), tokens, parts_shift, rank};
    exchange.barrier();  // all rings of the cluster are free behind it
    exchange.send(sums, warp, lane);
    if (norm && part < 4 && token < tokens) exchange.send_square(token, part, square);
    exchange.barrier();

    const SkinnyStore store = {add, out, out_pitch, add_pitch, type(1), type(2), type(3), false, gated};
    float common = Left::kFactor;
    if (global_scale != nullptr) common *= *global_scale;
    exchange.finish(tile, factors, store, warp, lane, true, static_cast<float>(factor), [&](int, int local) {
        return norm ? common * exchange.inverse_root(local, static_cast<float>(k), static_cast<float>(eps)) : common;
    });
}

}  // namespace rtk
