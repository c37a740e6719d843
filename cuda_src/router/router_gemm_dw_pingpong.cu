// Gradient of the router's weight as in router_gemm_dw.cu, for splits so short that sums may stay in the tensor cores.
// This leaves registers for products of 256 columns, which need half the conversions of dy; with 128, conversions,
// copies and tensor cores together exceed the bandwidth of shared memory.
//
// A block computes a tile of 64 experts and 256 columns of one split of the tokens. Its two warpgroups take stages of
// 32 tokens in ping-pong; at the end their sums are added in shared memory, and stored as whole rows.
#include "router/router_gemm_dy.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

template <typename T, int kTerms>
__global__ void __launch_bounds__(kRouterThreads, 1)
    router_dw_pingpong(const __grid_constant__ ptx::TensorMap dy, const __grid_constant__ ptx::TensorMap x, float* out,
                    i64 tokens, i64 experts, i64 depth, i64 stages_per_split) {
    constexpr int kStages = 8, kTokens = 32, kSteps = kTokens / 16, kExperts = 64, kColumns = 256;
    constexpr u32 kBoxBytes = kTokens * kTileRow;
    constexpr u32 kDyBytes = kExperts / 32 * kBoxBytes, kStageBytes = kDyBytes + kColumns / 64 * kBoxBytes;
    constexpr u32 kSumsRow = kColumns * 4 + 16;  // so that 8 rows are in different banks
    extern __shared__ u8 memory[];
    const ptx::SharedAddress base = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* stages = memory + (base - ptx::shared_address(memory));
    const RingBarriers ring{base + kStages * kStageBytes, kStages};
    const Fragment place;
    const u32 expert_tiles = static_cast<u32>(ceil_div(experts, kExperts));
    const i64 e0 = static_cast<i64>(blockIdx.x % expert_tiles) * kExperts;
    const i64 k0 = static_cast<i64>(blockIdx.x / expert_tiles) * kColumns;
    const int first = static_cast<int>(blockIdx.y * stages_per_split);
    const int count = min(static_cast<int>(stages_per_split), static_cast<int>(ceil_div(tokens, kTokens)) - first);

    ptx::launch_dependents();
    if (threadIdx.x == 0) {
        ptx::tma_prefetch_map(dy);
        ptx::tma_prefetch_map(x);
        ring.init(kConsumerWarps / 2);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp) {
            fetch_dy_and_x<kTokens, kExperts / 32, kColumns / 64>(ring, base, dy, x, e0, k0, first, count);
        }
        return;
    }
    ptx::registers_take<kConsumerRegisters>();
    const int group = place.warp / 4, warp = place.warp % 4;
    const DyFragment<T, kTerms> fragment(warp, place.lane, kBoxBytes);
    float sums[kColumns / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    u32 left[2][kTerms][kSteps][4];  // one is filled while the tensor cores read the other
    int stage = group, last_stage = -1;
    u32 phase = 0;
    auto multiply = [&](u32(&terms)[kTerms][kSteps][4]) {
        ptx::mbarrier_wait(ring.full(stage), phase);
        fragment.terms(stages + stage * kStageBytes, 0, terms);
        const u64 b = ptx::matrix_descriptor(base + stage * kStageBytes + kDyBytes, kBoxBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term)
                ptx::wgmma_registers<T>(sums, terms[term][k], b + k * kNextColumnMajor, 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (last_stage >= 0) ring.release(last_stage, place.lane);
        last_stage = stage;
        stage += 2;
        if (stage >= kStages) stage -= kStages, phase ^= 1u;
    };
    for (int i = group; i < count; i += 4) {
        multiply(left[0]);
        if (i + 2 < count) multiply(left[1]);
    }
    ptx::wgmma_wait<0>();

    ptx::named_barrier_sync(1, kConsumerWarps * kWarp);  // stages are no longer read
    u8* own = stages + (group * kExperts + warp * 16 + place.lane / 4 * 2) * kSumsRow + place.column * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
            *reinterpret_cast<float2*>(own + r * kSumsRow + 32 * j) =
                make_float2(sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]);
    ptx::named_barrier_sync(1, kConsumerWarps * kWarp);
    ptx::wait_for_previous();  // so that the end of this kernel implies the end of all kernels before it
    float* to = out + (blockIdx.y * experts + e0) * depth + k0;
    if (e0 + kExperts <= experts && k0 + kColumns <= depth && depth % 4 == 0) {
        // A warp has every eighth row, a lane four neighbours of each 128 columns.
        constexpr int kRows = kExperts / kConsumerWarps, kVectors = kColumns / (4 * kWarp);
        float values[kRows * kVectors][4];
#pragma unroll
        for (int i = 0; i < kRows * kVectors; ++i) {
            const int row = place.warp + i / kVectors * kConsumerWarps, vector = i % kVectors * kWarp + place.lane;
            const u8* from = stages + row * kSumsRow + vector * 16;
            const float4 a = *reinterpret_cast<const float4*>(from);
            const float4 b = *reinterpret_cast<const float4*>(from + kExperts * kSumsRow);
            values[i][0] = a.x + b.x, values[i][1] = a.y + b.y, values[i][2] = a.z + b.z, values[i][3] = a.w + b.w;
        }
        to += place.warp * depth + place.lane * 4;
#pragma unroll
        for (int i = 0; i < kRows * kVectors; ++i)
            store<float, 4>(to + i / kVectors * kConsumerWarps * depth + i % kVectors * 4 * kWarp, values[i]);
    } else {
        const int rows = static_cast<int>(min(experts - e0, static_cast<i64>(kExperts)));
        const int columns = static_cast<int>(min(depth - k0, static_cast<i64>(kColumns)));
#pragma unroll 1
        for (int row = place.warp; row < rows; row += kConsumerWarps)
#pragma unroll 1
            for (int column = place.lane; column < columns; column += kWarp) {
                const float* from = reinterpret_cast<const float*>(stages + row * kSumsRow) + column;
                to[row * depth + column] = from[0] + from[kExperts * kSumsRow / 4];
            }
    }
}

}  // namespace rtk
