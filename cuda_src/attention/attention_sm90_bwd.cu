// Attention backward on sm_90a: dk, dv, and sums of dq, in one pass, bitwise reproducible.
//
// A block owns a tile of 128 keys of one key head and loops over all query tiles (of all heads that share these keys, or
// of one of `parts` parts of them) that see any of them.
// Two consumer warpgroups own 64 keys each; with s, p, dp, ds transposed
// (rows are keys), per tile of queries
//     s = k q^T,  dp = v dout^T,  p = 2^(s - lse),  ds = p (dp - delta),  dv += p dout,  dk += ds q      from registers,
//     dq = ds^T k                                                     from ds of both warpgroups in shared memory.
// Two warps of a third warpgroup issue TMA loads; two more send tiles of dq to be added to fp32 sums in global memory.
// dq of a query tile is computed one step late, so that a warpgroup does not wait for the other one's ds.
//
// Several blocks add to the sums of a query tile, in a fixed order: each waits until the key tiles before its own have
// been added (`order` counts them); the first one stores. attention/sm90_bwd.cuh explains why this cannot deadlock.
//
// It meets all query tiles of one head before those of the next, so that blocks which run together find the q, dout and
// dq of few heads in L2.
//
// Numerics: p and ds are rounded to T before the products, all sums are fp32. dk and dv are rounded once; with parts they
// are stored in fp32, and another launch adds them in order.
//
// G: type of dk and dv, float for parts. EXTRAS: 1 for a soft-cap, a limit per query, or a scale that is not positive.
#include "attention/sm90_bwd.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <typename T, typename G, int D, int EXTRAS>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_bwd(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                       const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap dout_map,
                       const float* lse, const float* delta, float* dq_sums, G* dk, G* dv, const i32* lengths,
                       const i32* kv_limit, const i32* cu_q, const i32* cu_k, u32* counter, u32* order, i64 batches, i64 heads,
                       i64 heads_per_kv, i64 lq, i64 lkv, i64 padded_rows, i64 d_qk, i64 d_v, i64 dk_batch, i64 dk_row,
                       i64 dk_head, i64 dv_batch, i64 dv_row, i64 dv_head, i64 left, i64 right, i64 heads_together,
                       i64 together, i64 ascending, i64 resident, i64 parts, i64 limit_batch, double scale, double softcap) {
    constexpr int BQ = BackwardTile<D>::kQueries, BN = kBackwardKeys, kConsumers = 8, kStages = 2;
    using KTile = Boxed<BN, D>;
    using QTile = Boxed<BQ, D>;
    using DsTile = Boxed<BN, BQ>;
    constexpr u32 kStatBytes = BQ * 4;
    constexpr bool kKeysFirst = D == 64 || EXTRAS != 0;
    constexpr u32 kSumBytes = BackwardTile<D>::kSumBytes, kHalfBytes = kSumBytes / 2;
    extern __shared__ __align__(1024) u8 memory[];
    const ptx::SharedAddress k_tile = ptx::aligned_up<1024>(ptx::shared_address(memory)), v_tile = k_tile + KTile::kBytes;
    const ptx::SharedAddress q_tiles = v_tile + KTile::kBytes, do_tiles = q_tiles + kStages * QTile::kBytes;
    const ptx::SharedAddress ds_tiles = do_tiles + kStages * QTile::kBytes;
    const ptx::SharedAddress dq_tile = ds_tiles + 2 * DsTile::kBytes;
    const ptx::SharedAddress lse_rows = dq_tile + 2 * kSumBytes, delta_rows = lse_rows + kStages * kStatBytes;
    const ptx::SharedAddress barriers = delta_rows + kStages * kStatBytes;
    const Pipeline<1> kv_pipe{barriers};
    const ptx::SharedAddress dq_pipes = barriers + Pipeline<1>::kBytes;  // of two buffers, one of each warpgroup
    const Pipeline<kStages> q_pipe{dq_pipes + 4 * Pipeline<1>::kBytes};
    const Pipeline<kStages> do_pipe{q_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress ds_full = do_pipe.barriers + Pipeline<kStages>::kBytes;  // a barrier of each buffer
    const ptx::SharedAddress handover = ds_full + 2 * 8, records = handover + 48;
    const ptx::SharedAddress unblocked = records + 4 * KeyRecord::kBytes;  // a tile waits for no other one any more
    static_assert(WarpHandover::kBytes <= 48, "records are aligned to 16 bytes");
    auto memory_at = [&](ptx::SharedAddress address) { return memory + (address - ptx::shared_address(memory)); };
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 tiles = static_cast<u32>(ceil_div(lkv, BN));
    const u32 kv_heads = static_cast<u32>(heads / heads_per_kv);
    const u32 count = tiles * kv_heads * static_cast<u32>(batches);
    const u32 query_tiles = static_cast<u32>(padded_rows / BQ);  // of a head, in all sequences
    WarpHandover numbers(memory_at(handover), warp == kConsumers);  // claimed in order, each only when it is needed
    auto tile_at = [&](u32 index) {
        return KeyTile(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together),
                       static_cast<u32>(together), ascending != 0);
    };

    if (threadIdx.x == 0) {
        kv_pipe.init(1, kConsumers);
        for (u32 i = 0; i < 4; ++i) Pipeline<1>{dq_pipes + i * Pipeline<1>::kBytes}.init(kConsumers / 2, 1);
        for (u32 i = 0; i < 2; ++i) ptx::mbarrier_init(ds_full + 8 * i, kConsumers);
        q_pipe.init(1, kConsumers);
        do_pipe.init(1, kConsumers);
        numbers.init(kConsumers + 4);
        ptx::mbarrier_init(unblocked, 2);
        ptx::leave_undefined(ds_tiles, 2 * DsTile::kBytes);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<24>();
        // Registers are short in all roles, so the warp that claims a tile writes its description to shared memory, and
        // pipeline states are derived from the number of key and query tiles so far.
        u32 taken = 0, uses = 0;
        // The next tile; its record is number (taken - 1) % 4. A warp has claimed tile t before tile t + 2 is handed
        // out.
        auto next_tile = [&] {
            numbers.state = {static_cast<int>(taken % 2), taken / 2 % 2};
            const u32 index = numbers.give([&] {
                if (resident != 0 && taken != 0) ptx::mbarrier_wait(unblocked, (taken - 1) % 2);
                const u32 drawn = atomicAdd(counter, 1u);
                if (drawn < count) {
                    const KeyTile tile = tile_at(drawn);
                    const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
                    const KeyRecord record{records + taken % 4 * KeyRecord::kBytes};
                    record.put(0, tile.n, tile.head, cu_q == nullptr ? tile.batch : 0, sequence.k_row + tile.n * BN);
                    record.put(1, sequence.q_row, static_cast<int>(padded_row(tile.batch, sequence, lq, cu_q != nullptr)),
                               sequence.lq, sequence.keys);
                    const Mask mask(sequence, left, right);
                    const Interval any = mask.queries_any(tile.n * BN, tile.n * BN + BN);
                    if (any.empty()) {
                        record.put(2, 0, 0, 0, 0);
                    } else {
                        const QueryOrder<BQ> queries(mask, any, tile.n, static_cast<int>(together));
                        record.put(2, queries.count() * static_cast<int>(heads_per_kv), queries.first, queries.last,
                                   queries.start);
                    }
                }
                return drawn;
            });
            ++taken;
            return index < count;
        };
        // Called by one thread: loads tiles of q or dout, and their statistics.
        auto fetch = [&](const KeyRecord& tile, const Pipeline<kStages>& pipe, ptx::SharedAddress tiles_at,
                         const ptx::TensorMap& map, ptx::SharedAddress rows_at, const float* from) {
            int m = static_cast<int>(tile.queries().w[3]), h = 0;
#pragma unroll 1
            for (u32 left_over = tile.queries().w[0]; left_over > 0; --left_over, ++uses) {
                const PipelineState<kStages> state{static_cast<int>(uses % kStages), uses / kStages % 2};
                pipe.acquire(state);
                const ptx::SharedAddress full = pipe.expect(state, QTile::kBytes + kStatBytes);
                const Raw<16> keys = tile.keys(), rows = tile.rows();
                const int head = static_cast<int>(keys.w[1]) * static_cast<int>(heads_per_kv) + h;
                QTile::fetch(tiles_at + state.stage * QTile::kBytes, map, full, static_cast<int>(rows.w[0]) + m * BQ, head,
                             static_cast<int>(keys.w[2]));
                ptx::bulk_load(rows_at + state.stage * kStatBytes, from + (head * padded_rows + rows.w[1] + m * BQ), kStatBytes,
                               full);
                tile.advance(m, h);
            }
        };
        if (warp == kConsumers) {  // fetches q
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) fetch(tile, q_pipe, q_tiles, q_map, lse_rows, lse);
                __syncwarp();
            }
        } else if (warp == kConsumers + 1) {  // fetches k, v and dout
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) {
                    const PipelineState<1> kv_state{0, (taken - 1) % 2};
                    kv_pipe.acquire(kv_state);
                    // Where no query sees these keys the stage is still used, because the other roles count tiles.
                    const bool empty = tile.queries().w[0] == 0;
                    const ptx::SharedAddress full = kv_pipe.expect(kv_state, empty ? 0 : 2 * KTile::kBytes);
                    if (!empty) {
                        const Raw<16> keys = tile.keys();
                        const int head = static_cast<int>(keys.w[1] / static_cast<u32>(parts));
                        KTile::fetch(k_tile, k_map, full, keys.w[3], head, keys.w[2]);
                        KTile::fetch(v_tile, v_map, full, keys.w[3], head, keys.w[2]);
                    }
                    fetch(tile, do_pipe, do_tiles, dout_map, delta_rows, delta);
                }
                __syncwarp();
            }
        } else {  // the last two warps send dq of alternate steps: one reduction takes longer than a step
            const u32 buffer = warp - (kConsumers + 2);
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) {
                    int m = static_cast<int>(tile.queries().w[3]), h = 0;
                    if (tile.queries().w[0] == 0) ptx::mbarrier_arrive(unblocked);
#pragma unroll 1
                    for (u32 left_over = tile.queries().w[0]; left_over > 0; --left_over) {
                        if (uses++ % 2 == buffer) {
                            const PipelineState<1> state{0, (uses - 1) / 2 % 2};
                            const DqPlace<D> place(tile, m, h, order, query_tiles, heads_per_kv, left, right, together);
                            place.wait();
                            if (left_over <= 2) ptx::mbarrier_arrive(unblocked);  // the last step of this warp
                            place.send(buffer, state, dq_pipes, dq_tile, dq_sums);
                        } else if (left_over == 1 && tile.queries().w[0] == 1) {
                            ptx::mbarrier_arrive(unblocked);
                        }
                        tile.advance(m, h);
                    }
                }
                __syncwarp();
            }
        }
        return;
    }

    ptx::registers_take<240>();
    const int group = warp / 4, own_row = group * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    const bool speaks = lane == 0;
    const float factor = static_cast<float>(scale) * kLog2e;
    const float by_cap = softcap <= 0.0 ? 0.0f : 1.0f / (static_cast<float>(softcap) * kLog2e);
    const ptx::SharedAddress own_k = k_tile + group * 64 * kTileRow, own_v = v_tile + group * 64 * kTileRow;
    numbers.makes = false;
    u32 taken = 0, uses = 0;
    // Rows from `rows` on of a tile of `height` belong to another sequence or to none. They may be NaN, which a factor
    // of 0 does not hide, so the first warpgroup overwrites them. All consumers call this before any of them multiplies
    // the tile.
    auto overwrite = [&](ptx::SharedAddress at, int rows, u32 box_bytes, int boxes) {
        if (group == 0)
            for (u32 i = rows * kTileRow + threadIdx.x * 16; i < box_bytes; i += 128 * 16)
                for (int box = 0; box < boxes; ++box) ptx::st_shared_16(at + box * box_bytes + i, Raw<16>{{0, 0, 0, 0}});
        ptx::fence_async_shared();
    };
#pragma unroll 1
    for (u32 index;; ++taken) {
        numbers.state = {static_cast<int>(taken % 2), taken / 2 % 2};
        index = numbers.give([] { return 0u; });
        if (index >= count) break;
        const PipelineState<1> kv_state{0, taken % 2};
        index = __shfl_sync(0xffffffffu, index, 0);  // shuffled so that the compiler knows it is uniform
        const KeyTile tile = tile_at(index);
        const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
        const Mask mask(sequence, left, right);
        const Interval any = mask.queries_any(tile.n * BN, tile.n * BN + BN);
        float dk_sums[D / 2], dv_sums[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk_sums[i] = dv_sums[i] = 0.0f;

        if (!any.empty()) {
            const Interval all = mask.queries_all(tile.n * BN + group * 64, tile.n * BN + group * 64 + 64);
            const QueryOrder<BQ> queries(mask, any, tile.n, static_cast<int>(together));
            const int steps = queries.count() * static_cast<int>(heads_per_kv);
            kv_pipe.wait(kv_state);
            if (tile.n * BN + BN > sequence.keys && (lengths != nullptr || cu_k != nullptr)) {
                overwrite(k_tile, sequence.keys - tile.n * BN, KTile::kBoxBytes, 2 * KTile::kBoxes);  // v is stored after k
                ptx::named_barrier_sync(1, 256);
            }
            // Issues dq of the previous step, whose ds is in shared memory.
            auto multiply_dq = [&](float(&dq)[32]) {
                const u32 buffer = (uses - 1) % 2;
                ptx::mbarrier_wait(ds_full + 8 * buffer, (uses - 1) / 2 % 2);
                const ptx::SharedAddress ds_tile = ds_tiles + buffer * DsTile::kBytes;
                const u64 a = ptx::matrix_descriptor(ds_tile + (BackwardTile<D>::kRow != 0 ? group * DsTile::kBoxBytes : 0),
                                                     DsTile::kBoxBytes);
                const u64 b = ptx::matrix_descriptor(k_tile + (BackwardTile<D>::kColumn != 0 ? group * KTile::kBoxBytes : 0),
                                                     KTile::kBoxBytes);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < BN / 16; ++k)
                    ptx::wgmma_ss<T, true, true>(dq, a + k * kNextColumnMajor, b + k * kNextColumnMajor, k != 0);
                ptx::wgmma_commit();
            };
            auto send_dq = [&](const float(&dq)[32]) {
                const u32 part = (uses - 1) % 2 * 2 + group;
                const PipelineState<1> dq_state{0, (uses - 1) / 2 % 2};
                const Pipeline<1> dq_pipe{dq_pipes + part * Pipeline<1>::kBytes};
                dq_pipe.acquire(dq_state);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    ptx::st_shared_16(dq_tile + part * kHalfBytes + (i * 128 + threadIdx.x % 128) * 16,
                                      Raw<16>{{__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                               __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])}});
                ptx::fence_async_shared();
                dq_pipe.commit_warp(dq_state);
            };
            int m = queries.start;
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ++uses) {
                const PipelineState<kStages> state{static_cast<int>(uses % kStages), uses / kStages % 2};
                const ptx::SharedAddress q_tile = q_tiles + state.stage * QTile::kBytes;
                const ptx::SharedAddress do_tile = do_tiles + state.stage * QTile::kBytes;
                float s[BQ / 2], dp[BQ / 2];
                u32 p[BQ / 16][4], ds[BQ / 16][4];
                q_pipe.wait(state);
                if (cu_q != nullptr && m * BQ + BQ > sequence.lq) {
                    do_pipe.wait(state);
                    overwrite(q_tile, sequence.lq - m * BQ, QTile::kBoxBytes, QTile::kBoxes);
                    overwrite(do_tile, sequence.lq - m * BQ, QTile::kBoxBytes, QTile::kBoxes);
                    ptx::named_barrier_sync(1, 256);
                }
                ptx::wgmma_fence();
                multiply_rows<T, BN, BQ, D>(s, own_k, q_tile);
                ptx::wgmma_commit();
                do_pipe.wait(state);
                ptx::wgmma_fence();
                multiply_rows<T, BN, BQ, D>(dp, own_v, do_tile);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();

                const float* const lse_row =
                    reinterpret_cast<const float*>(memory_at(lse_rows + state.stage * kStatBytes)) + 2 * t;
                const float* const delta_row =
                    reinterpret_cast<const float*>(memory_at(delta_rows + state.stage * kStatBytes)) + 2 * t;
                if constexpr (EXTRAS != 0) {  // scores for now, probabilities once dp has arrived
                    make_scores(s, static_cast<float>(scale), static_cast<float>(softcap));
                } else {
#pragma unroll
                    for (int j = 0; j < BQ / 8; ++j) {
                        const float2 lse_pair = *reinterpret_cast<const float2*>(lse_row + 8 * j);
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            float* const at = s + 4 * j + 2 * r;
                            at[0] = ptx::ex2(at[0] * factor - lse_pair.x);
                            at[1] = ptx::ex2(at[1] * factor - lse_pair.y);
                        }
                    }
                }
                if ((EXTRAS != 0 && kv_limit != nullptr) || m * BQ < all.first || m * BQ + BQ > all.end) {
                    u32 here = index;
                    ptx::forget(here);  // as below
                    const KeyTile at = tile_at(here);
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
                                if (!seen) s[4 * j + 2 * r + c] = EXTRAS != 0 ? negative_infinity() : 0.0f;
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
                            if constexpr (EXTRAS != 0) {
                                const float2 lse_pair = *reinterpret_cast<const float2*>(lse_row + 8 * j);
                                const float score = s[i], tangent = score * by_cap;
                                s[i] = weight = ptx::ex2(score - (c == 0 ? lse_pair.x : lse_pair.y));
                                // The derivative of the cap is 1 - tanh^2; a capped score is cap * tanh.
                                weight = weight == 0.0f ? 0.0f : weight * (1.0f - tangent * tangent);
                            }
                            dp[i] = weight * (dp[i] - (c == 0 ? delta_pair.x : delta_pair.y));
                        }
                }

                pack_rows<T>(ds, dp);
                pack_rows<T>(p, s);

                // dq belongs to the previous step; before the first step there is none and its result is ignored. This
                // order of the products is the one that fits into registers.
                float dq[32];
                if constexpr (kKeysFirst) {
                    ptx::wgmma_fence();
                    multiply_packed<T, BQ>(dk_sums, ds, q_tile, true);
                    ptx::wgmma_commit();
                    multiply_dq(dq);
                    ptx::wgmma_fence();
                    multiply_packed<T, BQ>(dv_sums, p, do_tile, true);
                    ptx::wgmma_commit();
                } else {
                    multiply_dq(dq);
                    ptx::wgmma_fence();
                    multiply_packed<T, BQ>(dv_sums, p, do_tile, true);
                    ptx::wgmma_commit();
                    ptx::wgmma_fence();
                    multiply_packed<T, BQ>(dk_sums, ds, q_tile, true);
                    ptx::wgmma_commit();
                }
                // The buffer is free: whoever waited for ds of the previous step knows that dq of the step before it is
                // done.
                const u32 ds_row = own_row * kTileRow + ((own_row & 7) << 4) + 4 * t;
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        *reinterpret_cast<u32*>(memory_at(ds_tiles) + state.stage * DsTile::kBytes + (ds_row ^ j % 8 << 4) +
                                                j / 8 * DsTile::kBoxBytes + 8 * r * kTileRow) = ds[j / 2][j % 2 * 2 + r];
                ptx::fence_async_shared();
                ptx::wgmma_wait<kKeysFirst ? 0 : 1>();
                __syncwarp();
                if (speaks) {
                    ptx::mbarrier_arrive(ds_full + 8 * state.stage);
                    do_pipe.release(state);
                }
                if (step != 0) send_dq(dq);
                ptx::wgmma_wait<0>();
                if (speaks) q_pipe.release(state);
                m = m == queries.last ? queries.first : m + 1;
            }
            float dq[32];
            multiply_dq(dq);
            ptx::wgmma_wait<0>();
            send_dq(dq);
        } else {
            kv_pipe.wait(kv_state);
        }
        if (speaks) kv_pipe.release(PipelineState<1>{0, 0});

        ptx::forget(index);  // the position of this tile is computed again to save registers above
        const KeyTile at = tile_at(index);
        const Sequence own = sequence_at(at.batch, lq, lkv, cu_q, cu_k, nullptr);
        const int rows = own.keys - at.n * BN;
        const i64 first_row = own.k_row + at.n * BN;
        const float by_scale[2] = {static_cast<float>(scale), static_cast<float>(scale)}, as_is[2] = {1.0f, 1.0f};
        store_rows(dk + (at.batch * dk_batch + at.head * dk_head + first_row * dk_row), dk_row, own_row,
                   rows, static_cast<int>(d_qk), dk_sums, by_scale);
        store_rows(dv + (at.batch * dv_batch + at.head * dv_head + first_row * dv_row), dv_row, own_row,
                   rows, static_cast<int>(d_v), dv_sums, as_is);
    }
}

}  // namespace rtk
