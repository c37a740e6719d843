// Gradient of the router's input on sm_90a: dx[m, k] = sum over e of dy[m, e] W[e, k], rounded once to bf16 or fp16.
// dy is fp32 [rows, experts]; its kLeft bf16 terms are made in registers, on the way from shared memory to the tensor
// cores. W is the sum of kRight bf16 matrices [experts, depth], stacked. Of two terms each, the product of the small ones
// is left out.
//
// A block makes `tiles_each` tiles of 128 columns for its 128 rows, block = row tile * parts + part. Up to 256 experts,
// dy's tile stays in shared memory meanwhile; beyond, its four places are a second ring. Sums of 256 experts go to
// fp32 registers.
#include "gemm/router_wgmma.cuh"

namespace rtk {

inline constexpr int kDyPlaces = 4;
inline constexpr u32 kDyBytes = 2 * kTileBytes;  // 128 rows of 64 fp32 experts: two tiles of 32

// Four neighbouring lanes hold words 0..3 (by lane) of four pieces; afterwards lane t holds piece t whole.
RTK_DEVICE void transpose_quad(u32 (&word)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(0xffffffffu, odd ? word[i] : word[i + 1], 1);
        (odd ? word[i] : word[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + 2], 2);
        (upper ? word[i] : word[i + 2]) = got;
    }
}

template <int kLeft, int kRight>
__global__ void __launch_bounds__(kRouterThreads, 1)
    router_dx(const __grid_constant__ ptx::TensorMap dy, const __grid_constant__ ptx::TensorMap weight, void* dx,
              i64 rows, i64 experts, i64 depth, i64 parts, i64 tiles_each, i64 half) {
    constexpr int kStages = 6 / kRight;
    constexpr u32 kStageBytes = kRight * kTileBytes;
    extern __shared__ u8 memory[];
    const u32 aligned = (ptx::shared_address(memory) + 1023u) & ~1023u;
    const u8* dy_tiles = memory + (aligned - ptx::shared_address(memory));
    const u32 base = aligned + kDyPlaces * kDyBytes;
    const RingBarriers<kStages> ring{base + kStages * kStageBytes};
    const RingBarriers<kDyPlaces> dy_ring{ring.base + 16 * kStages};
    const Fragment place;
    const i64 m0 = static_cast<i64>(blockIdx.x / static_cast<u32>(parts)) * kRouterTile;
    const int tile0 = static_cast<int>(blockIdx.x % static_cast<u32>(parts) * tiles_each);
    const int tiles = min(static_cast<int>(tiles_each), static_cast<int>(ceil_div(depth, kRouterTile)) - tile0);
    const int blocks = static_cast<int>(ceil_div(experts, kBlockDepth));
    const bool stays = blocks <= kDyPlaces;

    ptx::launch_dependents();
    if (threadIdx.x == 0) {
        ring.init(kConsumerWarps);
        dy_ring.init(kConsumerWarps);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp) {
            auto fetch_dy = [&](int where, int block) {
                ptx::mbarrier_arrive_expect(dy_ring.full(where), kDyBytes);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    ptx::tma_load_2d(aligned + where * kDyBytes + i * kTileBytes, dy, dy_ring.full(where),
                                     block * kBlockDepth + 32 * i, static_cast<i32>(m0));
            };
            if (stays)
                for (int i = 0; i < blocks; ++i) fetch_dy(i, i);
            ptx::wait_for_previous();  // W's terms
            RingPlace<kStages> at{0, 1};
            RingPlace<kDyPlaces> dy_at{0, 1};
            for (int tile = 0; tile < tiles; ++tile)
                for (int block = 0; block < blocks; ++block) {
                    if (!stays) {
                        ptx::mbarrier_wait(dy_ring.empty(dy_at.stage), dy_at.phase);
                        fetch_dy(dy_at.stage, block);
                        dy_at.next();
                    }
                    ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
                    ptx::mbarrier_arrive_expect(ring.full(at.stage), kStageBytes);
#pragma unroll
                    for (int i = 0; i < 2 * kRight; ++i)
                        ptx::tma_load_2d(base + at.stage * kStageBytes + i * (kTileBytes / 2), weight,
                                         ring.full(at.stage), (tile0 + tile) * kRouterTile + i % 2 * 64,
                                         static_cast<i32>(i / 2 * experts + block * kBlockDepth));
                    at.next();
                }
        }
    } else {
        ptx::registers_take<kConsumerRegisters>();
        RingPlace<kStages> at;
        RingPlace<kDyPlaces> dy_at;
        const int g = place.lane / 4, t = place.lane % 4;
        // Row g (+ 8) of this warp's 16, experts 2t and 2t + 1 (+ 8) of 16: pieces of 16 bytes are swizzled by the row.
        const u8* own = dy_tiles + (place.warp * 16 + g) * kTileRow + t % 2 * 8;
        for (int tile = 0; tile < tiles; ++tile) {
            float sums[64], part[64];
            set_zero(sums);
            for (int block = 0; block < blocks; ++block) {
                const int where = stays ? block : dy_at.stage;
                ptx::mbarrier_wait(dy_ring.full(where), stays ? 0u : dy_at.phase);
                u32 left[kLeft][kDepthSteps][4];
#pragma unroll
                for (int k = 0; k < kDepthSteps; ++k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {  // i = 2h + r
                        const int piece = k % 2 * 4 + i / 2 * 2 + t / 2;
                        const float2 pair = *reinterpret_cast<const float2*>(
                            own + where * kDyBytes + k / 2 * kTileBytes + i % 2 * 8 * kTileRow + ((piece ^ g) << 4));
                        u32 terms[kLeft];
                        split_pair<bf16, kLeft>(pair.x, pair.y, terms);
#pragma unroll
                        for (int term = 0; term < kLeft; ++term) left[term][k][i] = terms[term];
                    }
                if (!stays) {
                    __syncwarp();
                    if (place.lane == 0) ptx::mbarrier_arrive(dy_ring.empty(where));
                    dy_at.next();
                }
                ptx::mbarrier_wait(ring.full(at.stage), at.phase);
                const u64 b = column_major_descriptor(base + at.stage * kStageBytes);
                const bool fresh = block % 4 == 0;
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kDepthSteps; ++k)
#pragma unroll
                    for (int pair = 0; pair < kLeft + kRight - 1; ++pair) {
                        // Smallest products first: (1, 0), (0, 1), (0, 0).
                        const bool last = pair == kLeft + kRight - 2;
                        const int l = !last && pair == 0 && kLeft == 2, r = !last && l == 0;
                        ptx::wgmma_registers<bf16>(part, left[l][k], b + r * (kTileBytes >> 4) + k * kNextColumnMajor,
                                                   !fresh || k != 0 || pair != 0);
                    }
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                if (place.lane == 0) ptx::mbarrier_arrive(ring.empty(at.stage));
                at.next();
                if (block % 4 == 3 || block + 1 == blocks) add_to(sums, part);
            }

            const i64 row = m0 + place.row;
            const i64 column = static_cast<i64>(tile0 + tile) * kRouterTile;
            u16* to = static_cast<u16*>(dx) + row * depth + column;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < 16; j += 4) {
                    u32 word[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float lo = sums[4 * (j + i) + 2 * r], hi = sums[4 * (j + i) + 2 * r + 1];
                        word[i] = half ? ptx::cvt_f16x2(lo, hi) : ptx::cvt_bf16x2(lo, hi);
                    }
                    transpose_quad(word, place.lane);
                    const int at8 = 8 * (j + t);
                    if (row + 8 * r >= rows || column + at8 >= depth) continue;
                    u16* here = to + 8 * r * depth + at8;
                    if (depth % 8 == 0) {
                        ptx::st<16>(here, Raw<16>{{word[0], word[1], word[2], word[3]}});
                    } else {
#pragma unroll 1
                        for (int i = 0; i < 8; ++i) {
                            u32 bits = word[0];
                            bits = i >= 2 ? word[1] : bits;
                            bits = i >= 4 ? word[2] : bits;
                            bits = i >= 6 ? word[3] : bits;
                            if (column + at8 + i < depth) here[i] = static_cast<u16>(bits >> (i % 2 * 16));
                        }
                    }
                }
        }
    }
}

}  // namespace rtk
