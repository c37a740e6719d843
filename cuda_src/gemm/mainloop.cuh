// Shared by the wgmma kernels of the router: a block has two consumer warpgroups, each with 64 of the 128 rows, and a
// third one with a single active thread that issues TMA loads. Accumulators are in registers.
#pragma once
#include "common/pipeline.cuh"
#include "gemm/operand.cuh"
#include "gemm/terms.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

inline constexpr int kRouterThreads = 384;  // 168 registers each at the start
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kRouterTile = 128;
inline constexpr u32 kTileBytes = kRouterTile * kTileRow;  // 128 rows of 64 16-bit elements, or 64 rows of 128
inline constexpr int kDepthSteps = kBlockDepth / 16;

// ---- the loop over the depth, for any product ----------------------------------------------------------------------
//
// One thread loads stages (produce_tile), warpgroups multiply them (sum_products), with a pipeline in between; both
// visit the same tiles (common/tile_scheduler.cuh). The contents of a stage and how they are multiplied are a policy,
// so that other types, scales and layouts change no loop. Operands are a type with
//     kStageBytes                                bytes of a stage, all of which fetch() copies; a multiple of 1024
//     kSums                                      accumulators of a thread
//     fetch(stage, full, block, m, n)            loads depth block `block` of the rows from m on and the columns from n on
//     multiply(sums, stage, add)                 issues its products; sums are overwritten, not added to, unless `add`
// The promotion of sums from tensor cores, which drop low bits as they accumulate, to fp32 registers is another policy.

// Tensor cores accumulate over the whole depth.
struct KeepSums {};

// They accumulate over `stages` stages, then registers do. A policy with scales per depth block has its own add().
struct PromoteEvery {
    int stages;

    // `part` is the sum over the depth blocks from `block` on.
    template <int N>
    RTK_DEVICE void add(float (&sums)[N], const float (&part)[N], int) const {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += part[i];
    }
};

// Rows of 64 16-bit elements of the depth for both: 128 rows of a [.., depth], then 128 of b [.., depth].
template <typename T>
struct KMajorOperands {
    static constexpr u32 kStageBytes = 2 * kTileBytes;
    static constexpr int kSums = 64;
    const ptx::TensorMap& a;  // boxes of 128 rows
    const ptx::TensorMap& b;
    u32 own_rows;  // bytes from the tile to the 64 rows of this warpgroup; the same in all lanes, and known to be

    RTK_DEVICE void fetch(ptx::SharedAddress stage, ptx::SharedAddress full, int block, i64 m, i64 n) const {
        ptx::tma_load_2d(stage, a, full, block * kBlockDepth, static_cast<i32>(m));
        ptx::tma_load_2d(stage + kTileBytes, b, full, block * kBlockDepth, static_cast<i32>(n));
    }

    RTK_DEVICE void multiply(float (&sums)[kSums], ptx::SharedAddress stage, bool add) const {
        const u64 left = k_major_descriptor(stage + own_rows), right = k_major_descriptor(stage + kTileBytes);
#pragma unroll
        for (int k = 0; k < kDepthSteps; ++k)
            ptx::wgmma_shared<T, false>(sums, left + k * kNextKMajor, right + k * kNextKMajor, add || k != 0);
    }
};

// Called by one thread: loads the `blocks` depth blocks of a tile into stages that begin at `stages`.
template <typename Operands, int STAGES>
RTK_DEVICE void produce_tile(const Operands& operands, const Pipeline<STAGES>& pipeline, PipelineState<STAGES>& state,
                             ptx::SharedAddress stages, int blocks, i64 m, i64 n) {
    for (int block = 0; block < blocks; ++block, state.advance()) {
        pipeline.acquire(state);
        const ptx::SharedAddress full = pipeline.expect(state, Operands::kStageBytes);
        operands.fetch(stages + state.stage * Operands::kStageBytes, full, block, m, n);
    }
}

// Called by a warpgroup: sums over `count` stages (more than 0) in the tensor cores. The products of a stage are in
// flight while the next one is waited for; a stage is released when its products have read it. One arrival per warp.
template <typename Operands, int STAGES>
RTK_DEVICE void multiply_stages(float (&sums)[Operands::kSums], const Operands& operands, const Pipeline<STAGES>& pipeline,
                                PipelineState<STAGES>& state, ptx::SharedAddress stages, int count) {
    const bool speaks = threadIdx.x % kWarp == 0;
    PipelineState<STAGES> last = state;
    for (int i = 0; i < count; ++i, state.advance()) {
        pipeline.wait(state);
        ptx::wgmma_fence();
        operands.multiply(sums, stages + state.stage * Operands::kStageBytes, i != 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (i != 0 && speaks) pipeline.release(last);
        last = state;
    }
    ptx::wgmma_wait<0>();
    if (speaks) pipeline.release(last);
}

// Called by a warpgroup: the sums of a tile.
template <typename Promotion, typename Operands, int STAGES>
RTK_DEVICE void sum_products(float (&sums)[Operands::kSums], const Operands& operands, const Promotion& promotion,
                             const Pipeline<STAGES>& pipeline, PipelineState<STAGES>& state, ptx::SharedAddress stages,
                             int blocks) {
    constexpr bool kPromotes = !is_same<Promotion, KeepSums>::value;
    if (kPromotes || blocks == 0) {
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
    }
    if constexpr (kPromotes) {
        float part[Operands::kSums];
        for (int done = 0; done < blocks;) {
            const int count = min(blocks - done, promotion.stages);
            multiply_stages(part, operands, pipeline, state, stages, count);
            promotion.add(sums, part, done);
            done += count;
        }
    } else if (blocks != 0) {
        multiply_stages(sums, operands, pipeline, state, stages, blocks);
    }
}

// ---- shared by the router's kernels --------------------------------------------------------------------------------

// Positions of this thread's accumulators (ptx/wgmma.cuh): d[4j + 2r + c] is row + 8r, column + 8j + c of the tile.
struct Fragment {
    int warp, lane, row, column;

    RTK_DEVICE Fragment() {
        warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
        lane = threadIdx.x % kWarp;
        row = warp * 16 + lane / 4;
        column = lane % 4 * 2;
    }
};

template <int N>
RTK_DEVICE void add_to(float (&sums)[N], const float (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += part[i];
}

template <int N>
RTK_DEVICE void set_zero(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.0f;
}

}  // namespace rtk
