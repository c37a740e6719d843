// Gradient of the router's input on sm_90a: dx[m, k] = sum over e of dy[m, e] W[e, k], rounded once to bf16 or fp16.
// dy is fp32 [rows, experts]; each warpgroup splits its 64 rows into kLeft bf16 terms in place, in shared memory. W is
// the sum of kRight bf16 matrices [experts, depth], stacked. With two terms each, the product of the small ones is left
// out.
//
// A block computes `tiles_each` tiles of 128 columns for its 128 rows, block = row tile * parts + part. Up to 256
// experts, dy's terms stay in shared memory meanwhile, and a tile is stored while the next one is computed in another
// set of registers; beyond that, dy's four places are a second ring, and sums of 256 experts go to the other registers.
#include "gemm/mainloop.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

inline constexpr int kDyPlaces = 4;
inline constexpr u32 kDyBytes = 2 * kTileBytes;  // 128 rows of 64 fp32 experts: two tiles of 32

// Splits 64 rows of 64 fp32 numbers, in two tiles of 32 columns, into their bf16 terms: the first one replaces the
// first tile, the second one the second tile. All 128 threads of a warpgroup call this.
template <int kLeft>
RTK_DEVICE void split_rows(u8* rows, int group) {
    const int row = threadIdx.x % 64, tile = threadIdx.x / 64 % 2;
    u8* own = rows + row * kTileRow;
    Raw<16> value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        value[i] = ptx::ld_shared_16(ptx::shared_address(own + tile * kTileBytes + ((i ^ (row & 7)) << 4)));
    ptx::named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        u32 terms[4][kLeft];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Raw<16>& from = value[i + j / 2];
            split_pair<bf16, kLeft>(__uint_as_float(from.w[j % 2 * 2]), __uint_as_float(from.w[j % 2 * 2 + 1]),
                                    terms[j]);
        }
#pragma unroll
        for (int term = 0; term < kLeft; ++term)
            *reinterpret_cast<uint4*>(own + term * kTileBytes + (((tile * 4 + i / 2) ^ (row & 7)) << 4)) =
                make_uint4(terms[0][term], terms[1][term], terms[2][term], terms[3][term]);
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + group, 128);
}

template <int kLeft, int kRight>
__global__ void __launch_bounds__(kRouterThreads, 1)
    router_dx(const __grid_constant__ ptx::TensorMap dy, const __grid_constant__ ptx::TensorMap weight,
              const __grid_constant__ ptx::TensorMap dx, i64 experts, i64 depth, i64 parts, i64 tiles_each, i64 half) {
    constexpr int kStages = 4;  // of one term of W each
    extern __shared__ u8 memory[];
    const ptx::SharedAddress aligned = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* dy_tiles = memory + (aligned - ptx::shared_address(memory));
    const ptx::SharedAddress base = aligned + kDyPlaces * kDyBytes;
    u8* results = dy_tiles + kDyPlaces * kDyBytes + kStages * kTileBytes;  // 2 * kTileBytes
    const RingBarriers ring{base + (kStages + 2) * kTileBytes, kStages};
    const RingBarriers dy_ring{ring.base + 16 * kStages, kDyPlaces};
    const Fragment place;
    const i64 m0 = static_cast<i64>(blockIdx.x / static_cast<u32>(parts)) * kRouterTile;
    const int tile0 = static_cast<int>(blockIdx.x % static_cast<u32>(parts) * tiles_each);
    const int tiles = min(static_cast<int>(tiles_each), static_cast<int>(ceil_div(depth, kRouterTile)) - tile0);
    const int blocks = static_cast<int>(ceil_div(experts, kBlockDepth));
    const bool stays = blocks <= kDyPlaces;
    // Copies arrive in the order in which they are issued, so those of dy and W alternate at the start, unless W may
    // come later.
    const int fetched_first = kRight == 1 ? 1 : blocks;
    const int together = kRight == 1 ? min(tiles, 2) : 1;  // tiles at the start: enough to multiply while dy arrives

    auto fetch_dy = [&](int where, int block) {
        ptx::mbarrier_arrive_expect(dy_ring.full(where), kDyBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            ptx::tma_load_2d(aligned + where * kDyBytes + i * kTileBytes, dy, dy_ring.full(where),
                             block * kBlockDepth + 32 * i, static_cast<i32>(m0));
    };
    ptx::launch_dependents();
    if (threadIdx.x == kConsumerWarps * kWarp) {
        ring.init(kConsumerWarps);
        dy_ring.init(kConsumerWarps);
        ptx::mbarrier_fence_init();
        if (stays)
            for (int i = 0; i < fetched_first; ++i) fetch_dy(i, i);
    }
    if (threadIdx.x == 0) {
        ptx::tma_prefetch_map(weight);
        ptx::tma_prefetch_map(dx);
    }
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp) {
            ptx::wait_for_previous();  // W's terms
            RingPlace at{kStages, 0, 1};
            RingPlace dy_at{kDyPlaces, 0, 1};
            auto fetch_weight = [&](int tile, int block) {
                for (int term = kRight - 1; term >= 0; --term) {
                    ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
                    ptx::mbarrier_arrive_expect(ring.full(at.stage), kTileBytes);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        ptx::tma_load_2d(base + at.stage * kTileBytes + i * (kTileBytes / 2), weight,
                                         ring.full(at.stage), (tile0 + tile) * kRouterTile + i * 64,
                                         static_cast<i32>(term * experts + block * kBlockDepth));
                    at.next();
                }
            };
            if (stays) {
                int here = fetched_first;
                for (int block = 0; block < blocks; ++block) {
                    for (; here < (block < 2 ? block + 1 : blocks); ++here) fetch_dy(here, here);
                    for (int tile = 0; tile < together; ++tile) fetch_weight(tile, block);
                }
            }
            for (int tile = stays ? together : 0; tile < tiles; ++tile)
                for (int block = 0; block < blocks; ++block) {
                    if (!stays) {
                        ptx::mbarrier_wait(dy_ring.empty(dy_at.stage), dy_at.phase);
                        fetch_dy(dy_at.stage, block);
                        dy_at.next();
                    }
                    fetch_weight(tile, block);
                }
        }
    } else {
        ptx::registers_take<kConsumerRegisters>();
        RingPlace at{kStages};
        RingPlace dy_at{kDyPlaces};
        const int t = place.lane % 4, group = place.warp / 4;
        u8* own = results + group * kTileBytes + (place.row % 64) * kTileRow + t * 4;

        auto write = [&](const float(&values)[64], int tile) {
            // Rows of 128 bytes as TMA needs them: two tiles of 64 columns per warpgroup.
            if (threadIdx.x % 128 == 0) ptx::bulk_store_wait_read();
            ptx::named_barrier_sync(1 + group, 128);
            auto put = [&](auto pack) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int j = 0; j < 16; ++j)
                        *reinterpret_cast<u32*>(own + j / 8 * (kTileBytes / 2) + 8 * r * kTileRow +
                                                ((j % 8 ^ (place.row & 7)) << 4)) =
                            pack(values[4 * j + 2 * r], values[4 * j + 2 * r + 1]);
            };
            if (half) {
                put([](float lo, float hi) { return ptx::cvt_f16x2(lo, hi); });
            } else {
                put([](float lo, float hi) { return ptx::cvt_bf16x2(lo, hi); });
            }
            ptx::fence_async_shared();
            ptx::named_barrier_sync(1 + group, 128);
            if (threadIdx.x % 128 == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    ptx::tma_store_2d(dx, ptx::shared_address(results) + group * kTileBytes + i * (kTileBytes / 2),
                                      (tile0 + tile) * kRouterTile + 64 * i, static_cast<i32>(m0) + 64 * group);
                ptx::bulk_store_commit();
            }
        };
        RingPlace behind{kStages};  // the oldest place of W that products may still read
        auto release = [&] {
            if (place.lane == 0) ptx::mbarrier_arrive(ring.empty(behind.stage));
            behind.next();
        };
        auto split = [&](int where, u32 phase) {
            ptx::mbarrier_wait(dy_ring.full(where), phase);
            split_rows<kLeft>(dy_tiles + where * kDyBytes + group * (kTileBytes / 2), group);
        };
        // Starts the products of dy in `where` and one term of W, the next one of the ring.
        auto multiply = [&](float(&part)[64], int where, int term, bool fresh) {
            ptx::mbarrier_wait(ring.full(at.stage), at.phase);
            const u64 a = k_major_descriptor(aligned + where * kDyBytes + group * (kTileBytes / 2));
            const u64 b = column_major_descriptor(base + at.stage * kTileBytes);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kDepthSteps; ++k)
#pragma unroll
                for (int l = term == 0 ? kLeft - 1 : 0; l >= 0; --l)  // dy's small term is multiplied by W's large one only
                    ptx::wgmma_shared<bf16, true>(
                        part, a + l * (kTileBytes >> 4) + k * kNextKMajor, b + k * kNextColumnMajor,
                        !fresh || term != kRight - 1 || k != 0 || (term == 0 && l != kLeft - 1));
            ptx::wgmma_commit();
            at.next();
        };
        // All products of a tile; `meanwhile` is called while the first ones are in flight.
        auto whole_tile = [&](float(&part)[64], auto meanwhile) {
            for (int block = 0; block < blocks; ++block) {
#pragma unroll
                for (int term = kRight - 1; term >= 0; --term) {
                    multiply(part, block, term, block == 0);
                    if (block == 0 && term == kRight - 1) {
                        meanwhile();
                    } else {
                        ptx::wgmma_wait<1>();
                        release();
                    }
                }
            }
            ptx::wgmma_wait<0>();
            release();
        };
        float sums_0[64], sums_1[64];
        if (stays) {
            split(0, 0u);
            for (int block = 0; block < blocks; ++block) {
#pragma unroll
                for (int term = kRight - 1; term >= 0; --term) multiply(sums_0, block, term, block == 0);
                if (together == 2) {
#pragma unroll
                    for (int term = kRight - 1; term >= 0; --term) multiply(sums_1, block, term, block == 0);
                }
                if (block + 1 < blocks) split(block + 1, 0u);
                ptx::wgmma_wait<0>();
                for (int i = 0; i < together * kRight; ++i) release();
            }
            // From here on, a tile is stored while the next one is computed.
            if (kRight == 2 && tiles > 1) {
                whole_tile(sums_1, [&] { write(sums_0, 0); });
            } else {
                write(sums_0, 0);
            }
            for (int tile = 2; tile < tiles; tile += 2) {
                whole_tile(sums_0, [&] { write(sums_1, tile - 1); });
                if (tile + 1 < tiles) {
                    whole_tile(sums_1, [&] { write(sums_0, tile); });
                } else {
                    write(sums_0, tile);
                }
            }
            if (tiles % 2 == 0) write(sums_1, tiles - 1);
        } else {
            RingPlace dy_behind{kDyPlaces};
            auto release_dy = [&] {
                if (place.lane == 0) ptx::mbarrier_arrive(dy_ring.empty(dy_behind.stage));
                dy_behind.next();
            };
            for (int tile = 0; tile < tiles; ++tile) {
                set_zero(sums_1);
                for (int first = 0; first < blocks; first += kDyPlaces) {
                    const int end = min(blocks, first + kDyPlaces);
                    for (int block = first; block < end; ++block) {
                        split(dy_at.stage, dy_at.phase);
#pragma unroll
                        for (int term = kRight - 1; term >= 0; --term) {
                            multiply(sums_0, dy_at.stage, term, block == first);
                            if (block == first && term == kRight - 1) continue;
                            ptx::wgmma_wait<1>();
                            release();
                            if (term == kRight - 1) release_dy();
                        }
                        dy_at.next();
                    }
                    ptx::wgmma_wait<0>();
                    release();
                    release_dy();
                    add_to(sums_1, sums_0);
                }
                write(sums_1, tile);
            }
        }
        if (threadIdx.x % 128 == 0) ptx::bulk_store_wait_read();
    }
}

}  // namespace rtk
