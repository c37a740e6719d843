// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to TOKENS rows of a, at the speed at
// which memory delivers b: the weights b are the left operand of wgmma, tokens a its n. 16-bit operands, or e4m3 with
// scales of whole rows.
//
// A cluster of `parts` blocks (a power of two) owns a tile of 64 CONSUMERS rows of b (gated: half as many and their
// counterparts) and all rows of a; each block has a range of steps of 128 bytes of k. One thread keeps a ring of stages
// filled by TMA; each warpgroup multiplies 64 rows of the tile. Sums go straight from registers to the block of the
// cluster that finishes the token, which adds those of the blocks in order: results do not depend on timing. There, a
// warp has a token and a lane a column, so that stores of the transposed tile are neighbours.
//
// Sums are fp32 in the tensor cores over the k of a block; those of e4m3 are added in fp32 registers every 128 of k.
//
// The launch may start before the previous kernel has ended. With kSwappedConstant, nothing that may still be running
// writes b, whose first stages are then loaded at once; without it, they are prefetched into L2.
//
// Shared memory: the ring; after the loop, in its place, sums [parts][tokens of a block][kPitch] from all blocks of the
// cluster.
#include "common/pipeline.cuh"
#include "gemm/gemm_swapped_finish.cuh"
#include "gemm/operand_sm90.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

template <int TOKENS, int CONSUMERS>
struct SwappedShape {
    static constexpr int kRows = 64 * CONSUMERS, kPitch = SwappedTile<CONSUMERS>::kPitch;
    static constexpr int kStageBytes = (kRows + TOKENS) * static_cast<int>(kTileRow);
    static constexpr int kBlocks = TOKENS > 64 ? 1 : 2;  // on an SM
    static constexpr int kStages = (kBlocks == 1 ? 196608 : 110592) / kStageBytes;
    static_assert(TOKENS * kPitch * 4 <= kStages * kStageBytes, "sums take the place of the ring");
};

// `types`: four bits each of bias, add, out, activation (SkinnyTypes, SkinnyActivation).
template <typename T, int TOKENS, int CONSUMERS>
__global__ void __launch_bounds__(128 * CONSUMERS + 32, SwappedShape<TOKENS, CONSUMERS>::kBlocks)
    gemm_swapped_sm90(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map, const u8* b,
                      const float* scale_a, const float* scale_b, const void* bias, const void* add, void* out, i64 m,
                      i64 n, i64 k_bytes, i64 b_pitch, i64 out_pitch, i64 add_pitch, i64 scale_a_step, i64 scale_b_step,
                      i64 parts_shift_, i64 flags, i64 types, double factor) {
    using Shape = SwappedShape<TOKENS, CONSUMERS>;
    using Operands = TypedOperands<T, T, false, false, CONSUMERS, 1, TOKENS>;
    constexpr int kRows = Shape::kRows, kStages = Shape::kStages;
    constexpr int kConsumerWarps = 4 * CONSUMERS, kThreads = 128 * CONSUMERS;
    constexpr bool kPromoted = sizeof(T) == 1;
    static_assert(Operands::kStageBytes == Shape::kStageBytes, "rows of b, then tokens");
    extern __shared__ u8 memory[];
    __shared__ alignas(8) u64 barriers[2 * kStages];
    const ptx::SharedAddress ring = ptx::aligned_up<1024>(ptx::shared_address(memory));
    float* const received = reinterpret_cast<float*>(memory + (ring - ptx::shared_address(memory)));
    const Pipeline<kStages> pipeline{ptx::shared_address(barriers)};
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int parts_shift = static_cast<int>(parts_shift_), parts = 1 << parts_shift;
    const int rank = parts == 1 ? 0 : ptx::cluster_rank(), tokens = static_cast<int>(m);
    const bool gated = flags & kSwappedGated, constant = flags & kSwappedConstant;
    const SwappedTile<CONSUMERS> tile{static_cast<int>(blockIdx.x) >> parts_shift, n, gated};
    const i64 first_column = tile.first;
    const int steps = static_cast<int>((k_bytes + kTileRow - 1) / kTileRow);
    const int begin = steps * rank >> parts_shift, end = steps * (rank + 1) >> parts_shift;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };

    if (thread == 0) pipeline.init(1, kConsumerWarps);
    if (!constant) {
        const int first_steps = min(end - begin, kStages);
        for (int i = thread; i < kRows * first_steps; i += kThreads + kWarp) {
            ptx::prefetch_l2(b + tile.existing_row(i % kRows) * b_pitch + (begin + i / kRows) * static_cast<i64>(kTileRow));
        }
        ptx::wait_for_previous();
    }
    ptx::launch_dependents();
    __syncthreads();

    float sums[TOKENS / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    SwappedFactors<CONSUMERS> factors;

    if (warp == kConsumerWarps) {
        if (lane == 0) {
            constexpr int kPerStep = static_cast<int>(kTileRow / sizeof(T));
            PipelineState<kStages> state;
            auto load_b = [&](ptx::SharedAddress stage, ptx::SharedAddress full, int step) {
                const i32 row = static_cast<i32>(first_column);
                ptx::tma_load_2d(stage, b_map, full, step * kPerStep, row);
                if (gated) ptx::tma_load_2d(stage + Operands::kABytes / 2, b_map, full, step * kPerStep, row + static_cast<i32>(n));
            };
            const int first_end = constant ? min(end, begin + kStages) : begin;
            for (int i = begin; i < first_end; ++i, state.advance())
                load_b(ring + state.stage * Shape::kStageBytes, pipeline.expect(state, Shape::kStageBytes), i);
            if (constant) ptx::wait_for_previous();
            state = {};
            for (int i = begin; i < end; ++i, state.advance()) {
                const ptx::SharedAddress stage = ring + state.stage * Shape::kStageBytes;
                if (i >= first_end) {
                    pipeline.acquire(state);
                    load_b(stage, pipeline.expect(state, Shape::kStageBytes), i);
                }
                ptx::tma_load_2d(stage + Operands::kABytes, a_map, pipeline.full(state), i * kPerStep, 0);
            }
        }
    } else {
        factors.load(tile, lane, scale_b, scale_b_step, bias, type(0));
        if (constant) ptx::wait_for_previous();
        const u32 own = static_cast<u32>(warp / 4);  // 64 rows of the tile
        PipelineState<kStages> state;
        if constexpr (kPromoted) {
            for (int i = begin; i < end; ++i, state.advance()) {
                float part[TOKENS / 2];
                pipeline.wait(state);
                ptx::wgmma_fence();
                Operands::multiply(part, ring + state.stage * Shape::kStageBytes, own, 0, false);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                if (lane == 0) pipeline.release(state);
#pragma unroll
                for (int e = 0; e < TOKENS / 2; ++e) sums[e] += part[e];
            }
        } else {
            PipelineState<kStages> last = state;
            for (int i = begin; i < end; ++i, state.advance()) {
                pipeline.wait(state);
                ptx::wgmma_fence();
                Operands::multiply(sums, ring + state.stage * Shape::kStageBytes, own, 0, true);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if (i != begin && lane == 0) pipeline.release(last);
                last = state;
            }
            ptx::wgmma_wait<0>();
        }
    }

    SwappedExchange<CONSUMERS> exchange{received, tokens, parts_shift, rank};
    exchange.barrier();  // all rings of the cluster are free behind it
    if (warp < kConsumerWarps) exchange.send(sums, warp, lane);
    exchange.barrier();

    const bool add_last = flags & kSwappedAddLast;
    const SkinnyStore store = {add, out, out_pitch, add_pitch, type(1), type(2), type(3), (flags & kSwappedAccumulate) != 0, gated};
    if (warp >= kConsumerWarps) return;
    exchange.finish(tile, factors, store, warp, lane, add_last, static_cast<float>(factor), [&](int token) {
        return scale_a == nullptr ? 1.0f : scale_a[token * scale_a_step];
    });
}

}  // namespace rtk
