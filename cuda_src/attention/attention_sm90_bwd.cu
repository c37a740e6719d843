// Attention backward on sm_90a: dk, dv, and sums of dq, in one pass, with the same bits in every launch.
//
// A block takes a tile of 128 keys of one head of keys, and all tiles of queries (of all heads that share these keys) that
// see any of them, the last queries first. Two consumer warpgroups have 64 keys each; with s, p, dp, ds transposed
// (keys are rows), per tile of queries
//   s = k q^T,  dp = v dout^T,  p = 2^(s - lse),  ds = p (dp - delta),  dv += p dout,  dk += ds q      from registers,
//   dq = ds^T k                                                     from ds of both warpgroups in shared memory.
// One warp of a third warpgroup asks the copy engine for tiles; another one sends tiles of dq to be added to fp32 sums in
// global memory.
//
// The sums of a tile of queries come from several blocks. Each waits until the tiles of keys before its own have been
// added (`order` counts them), so the order of additions is fixed; the first one stores. Tiles of keys are drawn in that order,
// so a block waits for blocks only that have started before it and never for one that has not. All blocks go through
// queries in the same order and soon follow each other at a distance.
//
// Numerics: p and ds are rounded to T for the products, all sums are fp32. dk and dv are rounded one time.
//
// EXTRAS: 1 for a soft-cap, a limit per query, or a scale that is not positive.
#include "attention/sm90_bwd.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// Tile numbers in the order of the counter, none before it is wanted (compare DrawnSource).
template <typename Handover>
struct OrderedSource {
    u32* counter;
    Handover handover;

    RTK_DEVICE u32 draw() {
        return handover.give([&] { return atomicAdd(counter, 1u); });
    }
};

// Number `index` of the tiles of keys: `heads_together` heads share L2; inside of these the first keys of all heads come first.
struct KeyTile {
    int n, head, batch;

    RTK_DEVICE KeyTile(u32 index, u32 tiles, u32 heads, u32 batches, u32 heads_together) {
        const u32 all = heads * batches, band = index / (heads_together * tiles), first = band * heads_together;
        const u32 here = min(heads_together, all - first), inside = index - first * tiles;
        const u32 step = inside / here, which = first + inside - step * here;
        n = static_cast<int>(step);
        batch = static_cast<int>(which / heads);
        head = static_cast<int>(which - batch * heads);
    }
};

template <typename T, int D, int EXTRAS>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_bwd(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                       const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap dout_map,
                       const float* lse, const float* delta, float* dq_sums, T* dk, T* dv, const i32* lengths,
                       const i32* kv_limit, const i32* cu_q, const i32* cu_k, u32* counter, u32* order, i64 batches, i64 heads,
                       i64 heads_per_kv, i64 lq, i64 lkv, i64 padded_rows, i64 d_qk, i64 d_v, i64 dk_batch, i64 dk_row,
                       i64 dk_head, i64 dv_batch, i64 dv_row, i64 dv_head, i64 left, i64 right, i64 heads_together,
                       i64 limit_batch, double scale, double softcap) {
    constexpr int BQ = BackwardTile<D>::kQueries, BN = kBackwardKeys, kConsumers = 8, kStages = 2;
    using KTile = Boxed<BN, D>;
    using QTile = Boxed<BQ, D>;
    using DsTile = Boxed<BN, BQ>;
    constexpr u32 kStatBytes = BQ * 4;
    constexpr u32 kSumBytes = BackwardTile<D>::kSumBytes;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress k_tile = ptx::aligned_up<1024>(ptx::shared_address(memory)), v_tile = k_tile + KTile::kBytes;
    const ptx::SharedAddress q_tiles = v_tile + KTile::kBytes, do_tiles = q_tiles + kStages * QTile::kBytes;
    const ptx::SharedAddress ds_tiles = do_tiles + kStages * QTile::kBytes;
    const ptx::SharedAddress dq_tile = ds_tiles + 2 * DsTile::kBytes;
    const ptx::SharedAddress lse_rows = dq_tile + kSumBytes, delta_rows = lse_rows + kStages * kStatBytes;
    const ptx::SharedAddress barriers = delta_rows + kStages * kStatBytes;
    const Pipeline<1> kv_pipe{barriers}, dq_pipe{barriers + Pipeline<1>::kBytes};
    const Pipeline<kStages> q_pipe{barriers + 2 * Pipeline<1>::kBytes};
    const Pipeline<kStages> do_pipe{q_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress patch = do_pipe.barriers + Pipeline<kStages>::kBytes;
    auto memory_at = [&](ptx::SharedAddress address) { return memory + (address - ptx::shared_address(memory)); };
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 tiles = static_cast<u32>(ceil_div(lkv, BN));
    const u32 kv_heads = static_cast<u32>(heads / heads_per_kv);
    const u32 count = tiles * kv_heads * static_cast<u32>(batches);
    const u32 query_tiles = static_cast<u32>(padded_rows / BQ);  // of a head, in all sequences
    OrderedSource<WarpHandover> source{counter, WarpHandover(memory_at(patch + 8), warp == kConsumers)};

    if (threadIdx.x == 0) {
        kv_pipe.init(1, kConsumers);
        dq_pipe.init(kConsumers, 1);
        q_pipe.init(1, kConsumers);
        do_pipe.init(1, kConsumers);
        ptx::mbarrier_init(patch, 1);
        source.handover.init(kConsumers + 2);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<24>();
        if (warp == kConsumers) {  // fetches
            PipelineState<1> kv_state;
            PipelineState<kStages> q_state, do_state;
            u32 patched = 0;
            for (u32 index; (index = source.draw()) < count;) {
                const KeyTile tile(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together));
                const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
                const Mask mask(sequence, left, right);
                const Interval any = mask.queries_any(tile.n * BN, tile.n * BN + BN);
                if (any.empty()) {  // a use of the stage all the same: consumers count tiles
                    kv_pipe.acquire(kv_state);
                    kv_pipe.commit_warp(kv_state);
                    kv_state.advance();
                    continue;
                }
                const int batch = cu_q == nullptr ? tile.batch : 0;
                const bool packed = cu_q != nullptr;
                const i64 padded = padded_row(tile.batch, sequence, lq, packed);

                // Two tiles whose rows from `rows` on are another sequence's, or nobody's: they may be NaN, which a factor of
                // 0 does not hide, so this warp overwrites them before consumers see them.
                auto overwrite = [&](ptx::SharedAddress to, int rows, u32 box_bytes, int boxes) {
                    for (u32 at = rows * kTileRow + lane * 16; at < box_bytes; at += kWarp * 16)
                        for (int box = 0; box < boxes; ++box)
                            ptx::st_shared_16(to + box * box_bytes + at, Raw<16>{{0, 0, 0, 0}});
                    ptx::fence_async_shared();
                };
                auto arrived = [&] {
                    ptx::mbarrier_wait(patch, patched);
                    patched ^= 1u;
                };

                kv_pipe.acquire(kv_state);
                const int k_row = sequence.k_row + tile.n * BN, keys = sequence.keys - tile.n * BN;
                const bool patches_keys = keys < BN && (lengths != nullptr || cu_k != nullptr);
                if (lane == 0) {
                    const ptx::SharedAddress full = patches_keys ? patch : kv_pipe.full(kv_state);
                    ptx::mbarrier_arrive_expect(full, 2 * KTile::kBytes);
                    KTile::fetch(k_tile, k_map, full, k_row, tile.head, batch);
                    KTile::fetch(v_tile, v_map, full, k_row, tile.head, batch);
                }
                if (patches_keys) {
                    arrived();
                    overwrite(k_tile, keys, KTile::kBoxBytes, 2 * KTile::kBoxes);
                    kv_pipe.commit_warp(kv_state);
                }
                kv_state.advance();

                const int first = any.first / BQ, last = (any.end - 1) / BQ;
#pragma unroll 1
                for (int h = 0; h < static_cast<int>(heads_per_kv); ++h) {
                    const int head = tile.head * static_cast<int>(heads_per_kv) + h;
                    const i64 stats = head * padded_rows + padded;
#pragma unroll 1
                    for (int m = last; m >= first; --m) {
                        const int rows = sequence.lq - m * BQ;
                        const bool patches = packed && rows < BQ;
                        auto fetch = [&](const Pipeline<kStages>& pipe, PipelineState<kStages>& state,
                                         ptx::SharedAddress tile_at, const ptx::TensorMap& map, ptx::SharedAddress row_at,
                                         const float* row) {
                            pipe.acquire(state);
                            const ptx::SharedAddress to = tile_at + state.stage * QTile::kBytes;
                            if (lane == 0) {
                                const ptx::SharedAddress full = patches ? patch : pipe.full(state);
                                ptx::mbarrier_arrive_expect(full, QTile::kBytes + kStatBytes);
                                QTile::fetch(to, map, full, sequence.q_row + m * BQ, head, batch);
                                ptx::bulk_load(row_at + state.stage * kStatBytes, row + stats + m * BQ, kStatBytes, full);
                            }
                            if (patches) {
                                arrived();
                                overwrite(to, rows, QTile::kBoxBytes, QTile::kBoxes);
                                pipe.commit_warp(state);
                            }
                            __syncwarp();
                            state.advance();
                        };
                        fetch(q_pipe, q_state, q_tiles, q_map, lse_rows, lse);
                        fetch(do_pipe, do_state, do_tiles, dout_map, delta_rows, delta);
                    }
                }
            }
        } else if (warp == kConsumers + 1) {  // sends dq
            PipelineState<1> dq_state;
            for (u32 index; (index = source.draw()) < count;) {
                const KeyTile tile(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together));
                const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
                const Mask mask(sequence, left, right);
                const Interval any = mask.queries_any(tile.n * BN, tile.n * BN + BN);
                if (any.empty()) continue;
                const i64 padded = padded_row(tile.batch, sequence, lq, cu_q != nullptr) / BQ;
                const int first = any.first / BQ, last = (any.end - 1) / BQ;
#pragma unroll 1
                for (int h = 0; h < static_cast<int>(heads_per_kv); ++h) {
                    const int head = tile.head * static_cast<int>(heads_per_kv) + h;
#pragma unroll 1
                    for (int m = last; m >= first; --m) {
                        dq_pipe.wait(dq_state);
                        if (lane == 0) {
                            const i64 place = static_cast<i64>(head) * query_tiles + padded + m;
                            const u32 before = static_cast<u32>(tile.n - mask.keys_any(m * BQ, m * BQ + BQ).first / BN);
                            u8* const to = reinterpret_cast<u8*>(dq_sums) + place * kSumBytes;
                            if (before == 0) {
                                ptx::bulk_store(to, dq_tile, kSumBytes);
                            } else {
                                while (atomicAdd(order + place, 0u) != before) {
                                }
                                __threadfence();
                                ptx::fence_async_global();
                                ptx::bulk_add(to, dq_tile, kSumBytes);
                            }
                            ptx::bulk_store_commit();
                            ptx::bulk_store_wait_read();
                            dq_pipe.release(dq_state);
                            ptx::bulk_store_wait();
                            ptx::fence_async_global();
                            __threadfence();
                            atomicAdd(order + place, 1u);
                        }
                        __syncwarp();
                        dq_state.advance();
                    }
                }
            }
        }
        return;
    }

    ptx::registers_take<240>();
    const int group = warp / 4, own_row = group * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    const bool speaks = lane == 0;
    const float factor = static_cast<float>(scale) * kLog2e;
    const ptx::SharedAddress own_k = k_tile + group * 64 * kTileRow, own_v = v_tile + group * 64 * kTileRow;
    source.handover.makes = false;
    // Registers are short: all states of pipelines follow from how many tiles of keys and of queries there were.
    u32 taken = 0, uses = 0;
#pragma unroll 1
    for (u32 index;; ++taken) {
        source.handover.state = {static_cast<int>(taken % 2), taken / 2 % 2};
        index = source.draw();
        if (index >= count) break;
        const PipelineState<1> kv_state{0, taken % 2};
        index = __shfl_sync(0xffffffffu, index, 0);  // known to be uniform
        const KeyTile tile(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together));
        const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
        const Mask mask(sequence, left, right);
        const Interval any = mask.queries_any(tile.n * BN, tile.n * BN + BN);
        float dk_sums[D / 2], dv_sums[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk_sums[i] = dv_sums[i] = 0.0f;

        if (!any.empty()) {
            const Interval all = mask.queries_all(tile.n * BN + group * 64, tile.n * BN + group * 64 + 64);
            const int first = any.first / BQ, per_head = (any.end - 1) / BQ - first + 1;
            const int steps = per_head * static_cast<int>(heads_per_kv);
            kv_pipe.wait(kv_state);
            int m = first + per_head;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                m = m == first ? first + per_head - 1 : m - 1;
                const PipelineState<kStages> state{static_cast<int>(uses % kStages), uses / kStages % 2};
                const PipelineState<1> dq_state{0, uses % 2};
                ++uses;
                const ptx::SharedAddress q_tile = q_tiles + state.stage * QTile::kBytes;
                const ptx::SharedAddress do_tile = do_tiles + state.stage * QTile::kBytes;
                float s[BQ / 2], dp[BQ / 2];
                u32 p[BQ / 16][4], ds[BQ / 16][4];
                q_pipe.wait(state);
                ptx::wgmma_fence();
                multiply_rows<T, BN, BQ, D>(s, own_k, q_tile);
                ptx::wgmma_commit();
                do_pipe.wait(state);
                ptx::wgmma_fence();
                multiply_rows<T, BN, BQ, D>(dp, own_v, do_tile);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();

                const float* const lse_row = reinterpret_cast<const float*>(memory_at(lse_rows + state.stage * kStatBytes)) + 2 * t;
                const float* const delta_row =
                    reinterpret_cast<const float*>(memory_at(delta_rows + state.stage * kStatBytes)) + 2 * t;
                if constexpr (EXTRAS != 0) make_scores(s, static_cast<float>(scale), static_cast<float>(softcap));
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j) {
                    const float2 lse_pair = *reinterpret_cast<const float2*>(lse_row + 8 * j);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float* const at = s + 4 * j + 2 * r;
                        at[0] = ptx::ex2((EXTRAS != 0 ? at[0] : at[0] * factor) - lse_pair.x);
                        at[1] = ptx::ex2((EXTRAS != 0 ? at[1] : at[1] * factor) - lse_pair.y);
                    }
                }
                if ((EXTRAS != 0 && kv_limit != nullptr) || m * BQ < all.first || m * BQ + BQ > all.end) {
                    u32 here = index;
                    ptx::forget(here);  // as below
                    const KeyTile at(here, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together));
                    const Sequence rows = sequence_at(at.batch, lq, lkv, cu_q, cu_k, lengths);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int key = at.n * BN + own_row + 8 * r, own = key - (rows.keys - rows.lq) - m * BQ - 2 * t;
                        const int from = key >= rows.keys ? BQ : right < 0 ? -BQ : own - static_cast<int>(right);
                        const int to = left < 0 ? BQ : own + static_cast<int>(left) + 1;
#pragma unroll
                        for (int j = 0; j < BQ / 8; ++j)
#pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                bool seen = 8 * j + c >= from && 8 * j + c < to;
                                if (EXTRAS != 0 && kv_limit != nullptr) {
                                    const int i = m * BQ + 8 * j + 2 * t + c;
                                    seen = seen && i < rows.lq && key < kv_limit[at.batch * limit_batch + i];
                                }
                                if (!seen) s[4 * j + 2 * r + c] = 0.0f;
                            }
                    }
                }
                ptx::wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j) {
                    const float2 delta_pair = *reinterpret_cast<const float2*>(delta_row + 8 * j);
#pragma unroll
                    for (int r = 0; r < 2; ++r)
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            const int i = 4 * j + 2 * r + c;
                            float weight = s[i];
                            if (EXTRAS != 0 && softcap != 0.0) {
                                // The derivative of the cap, 1 - tanh^2, from the power: a score in units of log2 is cap * tanh.
                                const float2 lse_pair = *reinterpret_cast<const float2*>(lse_row + 8 * j);
                                const float score = log2f(weight) + (c == 0 ? lse_pair.x : lse_pair.y);
                                const float tangent = score * (1.0f / (static_cast<float>(softcap) * kLog2e));
                                weight = weight == 0.0f ? 0.0f : weight * (1.0f - tangent * tangent);
                            }
                            dp[i] = weight * (dp[i] - (c == 0 ? delta_pair.x : delta_pair.y));
                        }
                }
                pack_rows<T>(ds, dp);
                pack_rows<T>(p, s);

                ptx::wgmma_fence();
                multiply_packed<T, BQ>(dv_sums, p, do_tile, true);
                ptx::wgmma_commit();
                // The buffer is free: the barrier of the step before came after the products of the step before that.
                const ptx::SharedAddress ds_tile = ds_tiles + state.stage * DsTile::kBytes;
                const u32 ds_row = own_row * kTileRow + ((own_row & 7) << 4) + 4 * t;
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        *reinterpret_cast<u32*>(memory_at(ds_tile) + (ds_row ^ j % 8 << 4) + j / 8 * DsTile::kBoxBytes +
                                                8 * r * kTileRow) = ds[j / 2][j % 2 * 2 + r];
                ptx::fence_async_shared();
                ptx::named_barrier_sync(1, 256);
                float dq[32];
                {
                    const u64 a = ptx::matrix_descriptor(
                        ds_tile + (BackwardTile<D>::kRow != 0 ? group * DsTile::kBoxBytes : 0), DsTile::kBoxBytes);
                    const u64 b = ptx::matrix_descriptor(
                        k_tile + (BackwardTile<D>::kColumn != 0 ? group * KTile::kBoxBytes : 0), KTile::kBoxBytes);
                    ptx::wgmma_fence();
#pragma unroll
                    for (int k = 0; k < BN / 16; ++k)
                        ptx::wgmma_ss<T, true, true>(dq, a + k * kNextColumnMajor, b + k * kNextColumnMajor, k != 0);
                    ptx::wgmma_commit();
                }
                multiply_packed<T, BQ>(dk_sums, ds, q_tile, true);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if (speaks) do_pipe.release(state);
                dq_pipe.acquire(dq_state);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    ptx::st_shared_16(dq_tile + (i * 256 + threadIdx.x) * 16,
                                      Raw<16>{{__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                               __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])}});
                ptx::fence_async_shared();
                dq_pipe.commit_warp(dq_state);
                ptx::wgmma_wait<0>();
                if (speaks) q_pipe.release(state);
            }
        } else {
            kv_pipe.wait(kv_state);
        }
        if (speaks) kv_pipe.release(PipelineState<1>{0, 0});

        ptx::forget(index);  // where this tile lies is worked out a second time: registers are short above
        const KeyTile at(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together));
        const Sequence own = sequence_at(at.batch, lq, lkv, cu_q, cu_k, nullptr);
        const int rows = own.keys - at.n * BN;
        const i64 first_row = own.k_row + at.n * BN;
        const float by_scale[2] = {static_cast<float>(scale), static_cast<float>(scale)}, as_is[2] = {1.0f, 1.0f};
        store_rows(dk + at.batch * dk_batch + at.head * dk_head + first_row * dk_row, dk_row, own_row, rows,
                   static_cast<int>(d_qk), dk_sums, by_scale);
        store_rows(dv + at.batch * dv_batch + at.head * dv_head + first_row * dv_row, dv_row, own_row, rows,
                   static_cast<int>(d_v), dv_sums, as_is);
    }
}

}  // namespace rtk
