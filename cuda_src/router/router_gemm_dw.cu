// Gradient of the router's weight on sm_90a: out[e, k] = sum over tokens m of dy[m, e] x[m, k], fp32. dy is fp32
// [tokens, experts] and is split into kTerms terms of x's type in registers, on the way from shared memory to the
// tensor cores. x [tokens, depth] is used as it is. For fp16, dy is scaled by powers of two, by the largest magnitude
// of each expert (`largest`, fp32 [experts]).
//
// router_gemm_dw_pingpong.cu handles two bf16 terms and short splits.
//
// A block computes a 128x128 tile of one split of the tokens, 64 of them per stage. Split s writes at out + s * experts
// * depth; the splits are then added in order. Every `promote` stages the sums of the tensor cores, which drop low bits
// as they accumulate, go to fp32 registers.
#include "router/router_gemm_dy.cuh"

namespace rtk {

inline constexpr int kHalfSteps = kDepthSteps / 2;

template <typename T, int kTerms>
__global__ void __launch_bounds__(kRouterThreads, 1)
    router_dw(const __grid_constant__ ptx::TensorMap dy, const __grid_constant__ ptx::TensorMap x, float* out,
              const float* largest, i64 tokens, i64 experts, i64 depth, i64 blocks_per_split, i64 promote) {
    constexpr int kStages = 4;
    constexpr u32 kDyBytes = 2 * kTileBytes;  // 64 tokens of 128 fp32 experts: four tiles of 32
    constexpr u32 kStageBytes = kDyBytes + kTileBytes;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress base = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const u8* tiles = memory + (base - ptx::shared_address(memory));
    const RingBarriers ring{base + kStages * kStageBytes, kStages};
    const Fragment place;
    const u32 expert_tiles = static_cast<u32>(ceil_div(experts, kRouterTile));
    const i64 e0 = static_cast<i64>(blockIdx.x % expert_tiles) * kRouterTile;
    const i64 k0 = static_cast<i64>(blockIdx.x / expert_tiles) * kRouterTile;
    const int first = static_cast<int>(blockIdx.y * blocks_per_split);
    const int blocks =
        min(static_cast<int>(blocks_per_split), static_cast<int>(ceil_div(tokens, kBlockDepth)) - first);

    ptx::launch_dependents();
    if (threadIdx.x == 0) {
        ptx::tma_prefetch_map(dy);
        ptx::tma_prefetch_map(x);
        ring.init(kConsumerWarps);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp) {
            fetch_dy_and_x<kBlockDepth, 4, 2>(ring, base, dy, x, e0, k0, first, blocks);
        }
    } else {
        ptx::registers_take<kConsumerRegisters>();
        const i64 expert = e0 + place.warp * 16 + place.lane / 4 * 2;  // and the next one
        DyFragment<T, kTerms> fragment(place.warp, place.lane, kTileBytes / 2);
        if (largest != nullptr) {
            ptx::wait_for_previous();  // it comes from the previous kernel
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (expert + r < experts) fragment.factor[r] = fp16_factor(largest[expert + r]);
        }
        float sums[64], part[64];
        set_zero(sums);
        RingPlace at{kStages};
        // 32 tokens at a time, in two sets of registers: one is filled while the tensor cores read the other.
        u32 left[2][kTerms][kHalfSteps][4];
        auto convert = [&](int half, const u8* stage) { fragment.terms(stage, 32 * half, left[half]); };
        auto multiply = [&](int half, u64 b, bool fresh) {
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kHalfSteps; ++k)
#pragma unroll
                for (int term = kTerms - 1; term >= 0; --term)
                    ptx::wgmma_registers<T>(part, left[half][term][k], b + (half * kHalfSteps + k) * kNextColumnMajor,
                                            !fresh || k != 0 || term != kTerms - 1);
            ptx::wgmma_commit();
        };
        int until = static_cast<int>(promote), last_stage = 0;  // stages until sums leave the tensor cores
        bool fresh = true;
        for (int i = 0; i < blocks; ++i) {
            ptx::mbarrier_wait(ring.full(at.stage), at.phase);
            const u8* stage = tiles + at.stage * kStageBytes;
            const u64 b = column_major_descriptor(base + at.stage * kStageBytes + kDyBytes);
            convert(0, stage);
            if (until-- == 0) {
                ptx::wgmma_wait<0>();
                add_to(sums, part);
                fresh = true;
                until = static_cast<int>(promote) - 1;
            }
            multiply(0, b, fresh);
            fresh = false;
            ptx::wgmma_wait<1>();
            if (i != 0) ring.release(last_stage, place.lane);
            convert(1, stage);
            multiply(1, b, false);
            ptx::wgmma_wait<1>();
            last_stage = at.stage;
            at.next();
        }
        ptx::wgmma_wait<0>();
        add_to(sums, part);
        ptx::wait_for_previous();  // so that the end of this kernel implies the end of all kernels before it
        const bool in_pairs = depth % 2 == 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (expert + r >= experts) continue;
            const float back = is_same<T, fp16>::value ? 1.0f / fragment.factor[r] : 1.0f;
            const i64 column = k0 + place.column;
            float* to = out + (blockIdx.y * experts + expert + r) * depth + column;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (column + 8 * j >= depth) continue;
                const float2 value = make_float2(sums[4 * j + 2 * r] * back, sums[4 * j + 2 * r + 1] * back);
                if (in_pairs) {
                    *reinterpret_cast<float2*>(to + 8 * j) = value;
                } else {
                    to[8 * j] = value.x;
                    if (column + 8 * j + 1 < depth) to[8 * j + 1] = value.y;
                }
            }
        }
    }
}

}  // namespace rtk
