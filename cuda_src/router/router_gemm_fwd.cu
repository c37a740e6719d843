// Router logits on sm_90a: out[m, e] = sum over k of x[m, k] W[e, k], fp32. x [rows, depth] is used as it is; W is the
// sum of kTerms matrices [experts, depth] of x's type, stacked (gemm/terms.cuh), so a tile of x that has come to shared
// memory meets all of them.
//
// A block makes a 128x128 tile of one split of the depth; 64 of it per stage, smallest term first.  Tensor cores drop
// low bits as they add, so every `promote` stages their sums go to fp32 registers. Results are multiplied by scale[e],
// then bias[e] is added; split s writes from row s * split_rows of `out`.
#include "gemm/mainloop.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

inline constexpr int kRingTiles = 14;  // ops/router/router_gemm_kernels.py knows it too

template <typename T, int kTerms>
__global__ void __launch_bounds__(kRouterThreads, 1)
    router_fwd(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap weight,
               const __grid_constant__ ptx::TensorMap out, const float* bias, const float* scale, i64 experts,
               i64 depth, i64 split_rows, i64 blocks_per_split, i64 promote) {
    constexpr int kStages = kRingTiles / (1 + kTerms);
    constexpr u32 kStageBytes = (1 + kTerms) * kTileBytes;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress base = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const RingBarriers<kStages> ring{base + kStages * kStageBytes};
    const Fragment place;
    const int tiles = static_cast<int>(ceil_div(experts, kRouterTile));
    const i64 m0 = static_cast<i64>(blockIdx.x / tiles) * kRouterTile;
    const i64 n0 = static_cast<i64>(blockIdx.x % tiles) * kRouterTile;
    const int first = static_cast<int>(blockIdx.y * blocks_per_split);
    const int blocks =
        min(static_cast<int>(blocks_per_split), static_cast<int>(ceil_div(depth, kBlockDepth)) - first);

    auto fetch_x = [&](int stage, int block) {
        ptx::mbarrier_arrive_expect(ring.full(stage), kStageBytes);
        ptx::tma_load_2d(base + stage * kStageBytes, x, ring.full(stage), (first + block) * kBlockDepth,
                         static_cast<i32>(m0));
    };
    // Of the copies at the start the first come first, so those of x and W take turns; unless W may be late.
    const int ahead = min(kStages, blocks), early = kTerms == 1 ? 1 : ahead;
    if (threadIdx.x == kConsumerWarps * kWarp) {
        ring.init(kConsumerWarps);
        ptx::mbarrier_fence_init();
        for (int i = 0; i < early; ++i) fetch_x(i, i);
    }
    ptx::launch_dependents();
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp) {
            auto fetch_weight = [&](int stage, int block) {
#pragma unroll
                for (int term = 0; term < kTerms; ++term)
                    ptx::tma_load_2d(base + stage * kStageBytes + (1 + term) * kTileBytes, weight, ring.full(stage),
                                     (first + block) * kBlockDepth, static_cast<i32>(term * experts + n0));
            };
            ptx::wait_for_previous();  // the terms may still be on their way from there; x is not
            for (int i = 0; i < ahead; ++i) {
                if (i >= early) fetch_x(i, i);
                fetch_weight(i, i);
            }
            RingPlace<kStages> at{0, 0};
            for (int i = ahead; i < blocks; ++i) {
                ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
                fetch_x(at.stage, i);
                fetch_weight(at.stage, i);
                at.next();
            }
        }
    } else {
        ptx::registers_take<kConsumerRegisters>();
        float sums[64], part[64];
        set_zero(sums);
        RingPlace<kStages> at;
        const u32 own_rows = place.warp / 4 * 64 * kTileRow;
        for (int done = 0; done < blocks;) {
            const int end = min(blocks, done + static_cast<int>(promote));
            int last_stage = 0;
            for (int i = done; i < end; ++i) {
                ptx::mbarrier_wait(ring.full(at.stage), at.phase);
                const ptx::SharedAddress tile = base + at.stage * kStageBytes;
                const u64 a = k_major_descriptor(tile + own_rows);
                const u64 b = k_major_descriptor(tile + kTileBytes);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kDepthSteps; ++k)
#pragma unroll
                    for (int term = kTerms - 1; term >= 0; --term)
                        ptx::wgmma_shared<T, false>(part, a + k * kNextKMajor,
                                                    b + term * (kTileBytes >> 4) + k * kNextKMajor,
                                                    i != done || k != 0 || term != kTerms - 1);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if (i != done) ring.release(last_stage, place.lane);
                last_stage = at.stage;
                at.next();
            }
            ptx::wgmma_wait<0>();
            ring.release(last_stage, place.lane);
            add_to(sums, part);
            done = end;
        }

        ptx::wait_for_previous();  // `scale` comes from it
        // Rows of 128 bytes as the copy engine wants them, where the ring was: four tiles of 32 columns per warpgroup.
        const int group = place.warp / 4, t = place.lane % 4;
        u8* results = memory + (base - ptx::shared_address(memory)) + group * 2 * kTileBytes;
        u8* own = results + (place.row % 64) * kTileRow + t % 2 * 8;
        ptx::named_barrier_sync(1, kConsumerWarps * kWarp);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const i64 column = n0 + 8 * j + 2 * t;
            float2 times = make_float2(1.0f, 1.0f), plus = make_float2(0.0f, 0.0f);
            const bool one = column < experts, two = column + 1 < experts;
            if (scale != nullptr) times = make_float2(one ? scale[column] : 0.0f, two ? scale[column + 1] : 0.0f);
            if (bias != nullptr) plus = make_float2(one ? bias[column] : 0.0f, two ? bias[column + 1] : 0.0f);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(own + j / 4 * (kTileBytes / 2) + 8 * r * kTileRow +
                                           (((j % 4 * 2 + t / 2) ^ (place.row & 7)) << 4)) =
                    make_float2(sums[4 * j + 2 * r] * times.x + plus.x, sums[4 * j + 2 * r + 1] * times.y + plus.y);
        }
        ptx::fence_async_shared();
        ptx::named_barrier_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ptx::tma_store_2d(out, ptx::shared_address(results) + i * (kTileBytes / 2),
                                  static_cast<i32>(n0) + 32 * i,
                                  static_cast<i32>(blockIdx.y * split_rows + m0) + 64 * group);
            ptx::bulk_store_commit();
            ptx::bulk_store_wait_read();
        }
    }
}

}  // namespace rtk
