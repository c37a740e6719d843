// Router logits on sm_90a: out[m, e] = sum over k of x[m, k] W[e, k], fp32. x [rows, depth] is used as it is; W is the
// sum of `terms` matrices [experts, depth] of x's type, stacked (gemm/terms.cuh), so a tile of x in shared memory is
// multiplied by all of them.
//
// A cluster of `splits` blocks computes a tile of 64 kGroups rows and kColumns experts, each block a part of the depth,
// 64 of it per stage, smallest term first. A block has kGroups consumer warpgroups of 64 rows and a producer, one
// thread. Tensor cores drop low bits as they accumulate, so every `promote` stages their sums go to fp32 registers. At
// the end each block receives the others' sums of every splits-th 8 columns through its shared memory and adds them in
// the order of the depth. Results are multiplied by scale[e], then bias[e] is added.
//
// Boxes of x have `x_rows` rows and those of W `weight_rows`: rows outside of a tensor cost time too. The rest of a
// stage only affects rows and columns that are not stored.
#include "gemm/mainloop.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

namespace rtk {

// Registers of a thread: the launch gives all threads the same number, then the producer hands its share to the
// consumers.
template <int kGroups>
struct ForwardRegisters {
    static constexpr int kProducer = kGroups == 3 ? 32 : 40, kConsumer = kGroups == 3 ? 160 : 232;
};

// A compile-time number of terms. With a loop over them between the fence and the commit of the products, ptxas inserts
// a fence of its own (C7519).
template <int N>
struct Terms {
    static constexpr int value = N;
};

template <typename T, int kGroups, int kColumns>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    router_fwd(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap weight,
               const __grid_constant__ ptx::TensorMap out_map, float* out, const float* bias, const float* scale,
               i64 rows, i64 experts, i64 depth, i64 x_rows, i64 weight_rows, i64 term_count, i64 stage_count,
               i64 split_count, i64 promote, i64 by_copy_engine) {
    constexpr int kRows = 64 * kGroups, kConsumers = 4 * kGroups;  // warps
    constexpr u32 kRowBytes = kRows * kTileRow, kWeightBytes = kColumns * kTileRow;
    extern __shared__ u8 memory[];
    const int terms = static_cast<int>(term_count), splits = static_cast<int>(split_count);
    const int stages = static_cast<int>(stage_count);
    const u32 stage_bytes = kRowBytes + static_cast<u32>(terms) * kWeightBytes;
    const ptx::SharedAddress base = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const RingBarriers ring{base + stages * stage_bytes, stages};
    const Fragment place;
    const u32 tile = blockIdx.x / static_cast<u32>(splits);
    const u32 column_tiles = static_cast<u32>(ceil_div(experts, kColumns));
    const i64 m0 = static_cast<i64>(tile / column_tiles) * kRows;
    const i64 n0 = static_cast<i64>(tile % column_tiles) * kColumns;
    const int rank = static_cast<int>(blockIdx.x % static_cast<u32>(splits));
    const int all_blocks = static_cast<int>(ceil_div(depth, kBlockDepth));
    const int first = rank * all_blocks / splits, blocks = (rank + 1) * all_blocks / splits - first;

    auto fetch_x = [&](int stage, int block) {
        ptx::mbarrier_arrive_expect(ring.full(stage), static_cast<u32>(x_rows + terms * weight_rows) * kTileRow);
        ptx::tma_load_2d(base + stage * stage_bytes, x, ring.full(stage), (first + block) * kBlockDepth,
                         static_cast<i32>(m0));
    };
    // Copies arrive in the order in which they are issued, so those of x and W alternate at the start; unless W comes
    // from a kernel that may still run.
    const int x_first = terms == 1 ? 1 : min(stages, blocks);
    if (threadIdx.x == kConsumers * kWarp) {
        ring.init(kConsumers);
        ptx::mbarrier_fence_init();
        for (int stage = 0; stage < stages; ++stage) {
            const ptx::SharedAddress to = base + stage * stage_bytes;
            ptx::leave_undefined(to + x_rows * kTileRow, static_cast<u32>(kRows - x_rows) * kTileRow);
            for (int term = 0; term < terms; ++term)
                ptx::leave_undefined(to + kRowBytes + term * kWeightBytes + weight_rows * kTileRow,
                                     static_cast<u32>(kColumns - weight_rows) * kTileRow);
        }
#pragma unroll 1
        for (int i = 0; i < x_first; ++i) fetch_x(i, i);
    }
    ptx::launch_dependents();
    __syncthreads();

    if (place.warp >= kConsumers) {
        ptx::registers_give<ForwardRegisters<kGroups>::kProducer>();
        if (threadIdx.x == kConsumers * kWarp) {
            auto fetch_weight = [&](int stage, int block) {
#pragma unroll 1
                for (int term = 0; term < terms; ++term)
                    ptx::tma_load_2d(base + stage * stage_bytes + kRowBytes + term * kWeightBytes, weight,
                                     ring.full(stage), (first + block) * kBlockDepth,
                                     static_cast<i32>(term * experts + n0));
            };
            ptx::wait_for_previous();  // the previous kernel may still be writing the terms, but not x
            // One compact loop: after other kernels its code is fetched from memory, one line at a time.
            RingPlace at{stages, 0, 1};
#pragma unroll 1
            for (int i = 0; i < blocks; ++i, at.next()) {
                ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
                if (i >= x_first) fetch_x(at.stage, i);
                fetch_weight(at.stage, i);
            }
        }
        __syncwarp();
        if (splits > 1) {  // as the consumers do
            ptx::cluster_barrier();
            ptx::cluster_barrier();
        }
        return;
    }

    ptx::registers_take<ForwardRegisters<kGroups>::kConsumer>();
    RingPlace at{stages};
    const u32 own_rows = place.warp / 4 * 64 * kTileRow;
    // Stages `begin` to `end` of this block, from zero.
    auto multiply = [&](float(&sums)[kColumns / 2], int begin, int end, auto known) {
        constexpr int kTerms = decltype(known)::value;
        int last_stage = 0;
        for (int i = begin; i < end; ++i) {
            ptx::mbarrier_wait(ring.full(at.stage), at.phase);
            const ptx::SharedAddress x_tile = base + at.stage * stage_bytes;
            const u64 a = k_major_descriptor(x_tile + own_rows);
            const u64 b = k_major_descriptor(x_tile + kRowBytes);
            ptx::wgmma_fence();
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
                for (int k = 0; k < kDepthSteps; ++k)
                    ptx::wgmma_shared<T, false>(sums, a + k * kNextKMajor,
                                                b + term * (kWeightBytes >> 4) + k * kNextKMajor,
                                                i != begin || k != 0 || term != kTerms - 1);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if (i != begin) ring.release(last_stage, place.lane);
            last_stage = at.stage;
            at.next();
        }
        ptx::wgmma_wait<0>();
        ring.release(last_stage, place.lane);
    };
    float sums[kColumns / 2], part[kColumns / 2];
    set_zero(sums);
    auto multiply_and_add = [&](auto known) {
        for (int done = 0; done < blocks;) {
            const int end = min(blocks, done + static_cast<int>(promote));
            multiply(part, done, end, known);
            add_to(sums, part);
            done = end;
        }
    };
    if (terms == 1) {
        multiply_and_add(Terms<1>());
    } else if (terms == 2) {
        multiply_and_add(Terms<2>());
    } else {
        multiply_and_add(Terms<3>());
    }

    ptx::wait_for_previous();  // `scale` comes from it
    const int group = place.warp / 4, t = place.lane % 4;
    // Columns 8j + 2t and the next, of rows place.row and place.row + 8.
    const bool plain = scale == nullptr && bias == nullptr;
    auto finished = [&](int j, float(&value)[4]) {
        if (plain) return;
        const i64 column = n0 + 8 * j + 2 * t;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (column + c < experts) {
                if (scale != nullptr) value[c] *= scale[column + c], value[2 + c] *= scale[column + c];
                if (bias != nullptr) value[c] += bias[column + c], value[2 + c] += bias[column + c];
            }
    };
    auto store_from_registers = [&](int j, const float(&value)[4]) {
        const i64 column = n0 + 8 * j + 2 * t;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i64 row = m0 + place.row + 8 * r;
            if (row >= rows || column >= experts) continue;
            float* to = out + row * experts + column;
            if (experts % 2 == 0) {
                *reinterpret_cast<float2*>(to) = make_float2(value[2 * r], value[2 * r + 1]);
            } else {
                to[0] = value[2 * r];
                if (column + 1 < experts) to[1] = value[2 * r + 1];
            }
        }
    };

    if (splits > 1) {
        // 8 columns are a share: address of share `share` of block `owner`, from block `from`.
        constexpr u32 kShareBytes = kConsumers * kWarp * 16;
        constexpr int kShares = kColumns / 8;
        const u32 from_bytes = static_cast<u32>((kShares + splits - 1) / splits) * kShareBytes;
        const ptx::SharedAddress own = base + threadIdx.x * 16;
        ptx::cluster_barrier();  // all products are done: stages are no longer read
        int owner = 0;
        u32 share = 0;
        auto next = [&] {
            if (++owner == splits) owner = 0, share += kShareBytes;
        };
#pragma unroll
        for (int j = 0; j < kShares; ++j, next()) {
            const float value[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
            if (owner != rank) ptx::st_cluster(own + rank * from_bytes + share, owner, value);
        }
        ptx::cluster_barrier();
        owner = 0, share = 0;
#pragma unroll
        for (int j = 0; j < kShares; ++j, next()) {
            if (owner != rank) continue;
            float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (int from = 0; from < splits; ++from) {
                Raw<16> part;
                if (from != rank) part = ptx::ld_shared_16(own + from * from_bytes + share);
#pragma unroll
                for (int i = 0; i < 4; ++i) value[i] += from == rank ? sums[4 * j + i] : __uint_as_float(part.w[i]);
            }
            finished(j, value);
            store_from_registers(j, value);
        }
    } else if (by_copy_engine) {
        // Rows of 128 bytes as TMA needs them, in the memory of the ring: tiles of 32 columns per warpgroup.
        constexpr u32 kResultBytes = 64 * kTileRow;
        u8* results = memory + (base - ptx::shared_address(memory)) + group * (kColumns / 32) * kResultBytes;
        u8* own = results + (place.row % 64) * kTileRow + t % 2 * 8;
        ptx::named_barrier_sync(1, kConsumers * kWarp);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            float value[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
            finished(j, value);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(own + j / 4 * kResultBytes + 8 * r * kTileRow +
                                           (((j % 4 * 2 + t / 2) ^ (place.row & 7)) << 4)) =
                    make_float2(value[2 * r], value[2 * r + 1]);
        }
        ptx::fence_async_shared();
        ptx::named_barrier_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int i = 0; i < kColumns / 32; ++i)
                ptx::tma_store_2d(out_map, ptx::shared_address(results) + i * kResultBytes,
                                  static_cast<i32>(n0) + 32 * i, static_cast<i32>(m0) + 64 * group);
            ptx::bulk_store_commit();
            ptx::bulk_store_wait_read();
        }
    } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            float value[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
            finished(j, value);
            store_from_registers(j, value);
        }
    }
}

}  // namespace rtk
