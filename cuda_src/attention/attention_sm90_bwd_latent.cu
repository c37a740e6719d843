// Attention backward on sm_90a for keys of 129 to 192 elements and values of up to 128: dk, dv, and sums of dq, in one pass.
//
// attention_sm90_bwd.cu says how: a block has 128 keys, two consumer warpgroups 64 each, and meets tiles of 64 queries. Here sums
// of dk and dv take 96 + 64 registers a thread, so a warpgroup takes a tile of queries in two halves of 32; and dq has three
// parts of 64 columns: warpgroup g makes part g with the first half, and every other time part 2 with the second half. A part
// goes through 16 KB of shared memory of its warpgroup, and a warp adds the parts of one warpgroup to sums in global memory.
// Each part of a tile of queries has its own count in `order`.
//
// Shared memory, KB: keys and values 48 + 32, two stages of q and dout 48 + 32, ds of two tiles 32, dq 2 x 16.
// Numerics: p and ds are rounded to T for the products, all sums are fp32. dk and dv are rounded one time.
#include "attention/sm90_bwd.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"
#include "ptx/words.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_bwd_latent(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                       const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap dout_map,
                       const float* lse, const float* delta, float* dq_sums, T* dk, T* dv, const i32* lengths,
                       const i32* cu_q, const i32* cu_k, u32* counter, u32* order, i64 batches, i64 heads,
                       i64 heads_per_kv, i64 lq, i64 lkv, i64 padded_rows, i64 d_qk, i64 d_v, i64 dk_batch, i64 dk_row,
                       i64 dk_head, i64 dv_batch, i64 dv_row, i64 dv_head, i64 left, i64 right, i64 heads_together,
                       i64 together, double scale) {
    constexpr int DQK = 192, DV = 128, BQ = 64, kHalf = 32, BN = kBackwardKeys, kConsumers = 8, kStages = 2, kParts = 3;
    using KTile = Boxed<BN, DQK>;
    using VTile = Boxed<BN, DV>;
    using QTile = Boxed<BQ, DQK>;
    using DoTile = Boxed<BQ, DV>;
    using DsTile = Boxed<BN, BQ>;
    constexpr u32 kStatBytes = BQ * 4, kPartBytes = BQ * 64 * 4;
    extern __shared__ __align__(1024) u8 memory[];
    const ptx::SharedAddress k_tile = ptx::aligned_up<1024>(ptx::shared_address(memory)), v_tile = k_tile + KTile::kBytes;
    const ptx::SharedAddress q_tiles = v_tile + VTile::kBytes, do_tiles = q_tiles + kStages * QTile::kBytes;
    const ptx::SharedAddress ds_tiles = do_tiles + kStages * DoTile::kBytes;
    const ptx::SharedAddress dq_tile = ds_tiles + 2 * DsTile::kBytes;
    const ptx::SharedAddress lse_rows = dq_tile + 2 * kPartBytes, delta_rows = lse_rows + kStages * kStatBytes;
    const ptx::SharedAddress barriers = delta_rows + kStages * kStatBytes;
    const Pipeline<1> kv_pipe{barriers};
    const ptx::SharedAddress dq_pipes = barriers + Pipeline<1>::kBytes;  // of each warpgroup
    const Pipeline<kStages> q_pipe{dq_pipes + 2 * Pipeline<1>::kBytes};
    const Pipeline<kStages> do_pipe{q_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress ds_full = do_pipe.barriers + Pipeline<kStages>::kBytes;  // a barrier of each buffer
    const ptx::SharedAddress handover = ds_full + 2 * 8, records = handover + 48;
    static_assert(WarpHandover::kBytes <= 48, "records are aligned to 16 bytes");
    auto memory_at = [&](ptx::SharedAddress address) { return memory + (address - ptx::shared_address(memory)); };
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 tiles = static_cast<u32>(ceil_div(lkv, BN));
    const u32 kv_heads = static_cast<u32>(heads / heads_per_kv);
    const u32 count = tiles * kv_heads * static_cast<u32>(batches);
    const u32 query_tiles = static_cast<u32>(padded_rows / BQ);  // of a head, in all sequences
    WarpHandover numbers(memory_at(handover), warp == kConsumers);  // drawn in order, none before it is wanted

    if (threadIdx.x == 0) {
        kv_pipe.init(1, kConsumers);
        for (u32 i = 0; i < 2; ++i) Pipeline<1>{dq_pipes + i * Pipeline<1>::kBytes}.init(kConsumers / 2, 1);
        for (u32 i = 0; i < 2; ++i) ptx::mbarrier_init(ds_full + 8 * i, kConsumers);
        q_pipe.init(1, kConsumers);
        do_pipe.init(1, kConsumers);
        numbers.init(kConsumers + 4);
        ptx::leave_undefined(ds_tiles, 2 * DsTile::kBytes);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<24>();
        // Registers are short in all roles: the warp that draws writes what is to be known of a tile to shared memory; states of pipelines follow from how many tiles of keys and of queries there were.
        u32 taken = 0, uses = 0;
        // The next tile, whose record is then number (taken - 1) % 4: a warp has drawn tile t before tile t + 2 is given.
        auto next_tile = [&] {
            numbers.state = {static_cast<int>(taken % 2), taken / 2 % 2};
            const u32 index = numbers.give([&] {
                const u32 drawn = atomicAdd(counter, 1u);
                if (drawn < count) {
                    const KeyRecord record{records + taken % 4 * KeyRecord::kBytes};
                    const KeyTile tile(drawn, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together),
                                       static_cast<u32>(together));
                    const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
                    record.put(0, tile.n, tile.head, cu_q == nullptr ? tile.batch : 0, sequence.k_row + tile.n * BN);
                    record.put(1, sequence.q_row, static_cast<int>(padded_row(tile.batch, sequence, lq, cu_q != nullptr)),
                               sequence.lq, sequence.keys);
                    // Read back, so that nothing of the above is kept: registers are short.
                    const Raw<16> rows = record.rows();
                    const int n = static_cast<int>(record.keys().w[0]);
                    const Mask mask(Sequence{0, 0, static_cast<int>(rows.w[2]), static_cast<int>(rows.w[3])}, left, right);
                    const Interval any = mask.queries_any(n * BN, n * BN + BN);
                    if (any.empty()) {
                        record.put(2, 0, 0, 0, 0);
                    } else {
                        const QueryOrder<BQ> queries(mask, any, n, static_cast<int>(together));
                        record.put(2, queries.count() * static_cast<int>(heads_per_kv), queries.first, queries.last,
                                   queries.start);
                    }
                }
                return drawn;
            });
            ++taken;
            return index < count;
        };
        auto next_query = [&](const KeyRecord& tile, int m) {
            const Raw<16> queries = tile.queries();
            return m == static_cast<int>(queries.w[2]) ? static_cast<int>(queries.w[1]) : m + 1;
        };
        // By one thread: tiles of q or dout, and their statistics.
        auto fetch = [&](auto box, const KeyRecord& tile, const Pipeline<kStages>& pipe, ptx::SharedAddress tiles_at,
                         const ptx::TensorMap& map, ptx::SharedAddress rows_at, const float* from) {
            using Box = decltype(box);
            int m = static_cast<int>(tile.queries().w[3]), h = 0;
#pragma unroll 1
            for (u32 left_over = tile.queries().w[0]; left_over > 0; --left_over, ++uses) {
                const PipelineState<kStages> state{static_cast<int>(uses % kStages), uses / kStages % 2};
                pipe.acquire(state);
                const ptx::SharedAddress full = pipe.expect(state, Box::kBytes + kStatBytes);
                const Raw<16> keys = tile.keys(), rows = tile.rows();
                const int head = static_cast<int>(keys.w[1]) * static_cast<int>(heads_per_kv) + h;
                Box::fetch(tiles_at + state.stage * Box::kBytes, map, full, static_cast<int>(rows.w[0]) + m * BQ, head,
                             static_cast<int>(keys.w[2]));
                ptx::bulk_load(rows_at + state.stage * kStatBytes, from + (head * padded_rows + rows.w[1] + m * BQ), kStatBytes,
                               full);
                if (++h == static_cast<int>(heads_per_kv)) h = 0, m = next_query(tile, m);
            }
        };
        if (warp == kConsumers) {  // fetches q
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) fetch(QTile{}, tile, q_pipe, q_tiles, q_map, lse_rows, lse);
                __syncwarp();
            }
        } else if (warp == kConsumers + 1) {  // fetches k, v and dout
            numbers.makes = false;
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) {
                    const PipelineState<1> kv_state{0, (taken - 1) % 2};
                    kv_pipe.acquire(kv_state);
                    // Where no query sees these keys the stage is used all the same: others count tiles.
                    const bool empty = tile.queries().w[0] == 0;
                    const ptx::SharedAddress full = kv_pipe.expect(kv_state, empty ? 0 : KTile::kBytes + VTile::kBytes);
                    if (!empty) {
                        const Raw<16> keys = tile.keys();
                        KTile::fetch(k_tile, k_map, full, keys.w[3], keys.w[1], keys.w[2]);
                        VTile::fetch(v_tile, v_map, full, keys.w[3], keys.w[1], keys.w[2]);
                    }
                    fetch(DoTile{}, tile, do_pipe, do_tiles, dout_map, delta_rows, delta);
                }
                __syncwarp();
            }
        } else {  // the last two warps send dq of a warpgroup each
            numbers.makes = false;
            const u32 of_group = warp - (kConsumers + 2);
#pragma unroll 1
            while (next_tile()) {
                const KeyRecord tile{records + (taken - 1) % 4 * KeyRecord::kBytes};
                if (lane == 0) {
                    int m = static_cast<int>(tile.queries().w[3]), h = 0;
#pragma unroll 1
                    for (u32 left_over = tile.queries().w[0]; left_over > 0; --left_over, ++uses) {
                        const Raw<16> keys = tile.keys(), rows = tile.rows(), queries = tile.queries();
                        const Sequence sequence{0, 0, static_cast<int>(rows.w[2]), static_cast<int>(rows.w[3])};
                        const Mask mask(sequence, left, right);
                        const int n = static_cast<int>(keys.w[0]);
                        const QueryOrder<BQ> met(mask, static_cast<int>(queries.w[1]), static_cast<int>(queries.w[2]), n,
                                                 static_cast<int>(together));
                        const u32 before = met.before(mask, n, m);
                        const u32 head = keys.w[1] * static_cast<u32>(heads_per_kv) + h;
                        u32 place = (head * query_tiles + rows.w[1] / BQ + m) * kParts + of_group;
#pragma unroll 1
                        for (u32 part = 0; part <= (uses % 2 == of_group ? 1u : 0u); ++part) {
                            if (before != 0) {
                                while (ptx::ld_word_acquire(order + place) != before) {
                                }
                                ptx::fence_async_global();
                            }
                            u8* const to = reinterpret_cast<u8*>(dq_sums) + static_cast<i64>(place) * kPartBytes;
                            const Pipeline<1> pipe{dq_pipes + of_group * Pipeline<1>::kBytes};
                            const PipelineState<1> state{0, (uses + (uses + 1 - of_group) / 2 + part) % 2};
                            pipe.wait(state);
                            if (before == 0) {
                                ptx::bulk_store(to, dq_tile + of_group * kPartBytes, kPartBytes);
                            } else {
                                ptx::bulk_add(to, dq_tile + of_group * kPartBytes, kPartBytes);
                            }
                            ptx::bulk_store_commit();
                            ptx::bulk_store_wait_read();
                            pipe.release(state);
                            ptx::bulk_store_wait();
                            ptx::fence_async_global();
                            __threadfence();
                            atomicAdd(order + place, 1u);
                            place += 2 - of_group;
                        }
                        if (++h == static_cast<int>(heads_per_kv)) h = 0, m = next_query(tile, m);
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
    numbers.makes = false;
    u32 taken = 0, uses = 0;
    // Rows from `rows` on of a tile of `height` are another sequence's, or nobody's. They may be NaN, which a factor of 0 does
    // not hide, so the first warpgroup overwrites them. All consumers call, before any of them multiplies the tile.
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
        const KeyRecord record{records + taken % 4 * KeyRecord::kBytes};
        const PipelineState<1> kv_state{0, taken % 2};
        index = __shfl_sync(0xffffffffu, index, 0);  // known to be uniform
        float dk_sums[DQK / 2], dv_sums[DV / 2];
#pragma unroll
        for (float& x : dk_sums) x = 0.0f;
#pragma unroll
        for (float& x : dv_sums) x = 0.0f;

        u32 left_over = __shfl_sync(0xffffffffu, record.queries().w[0], 0);
        if (left_over != 0) {
            kv_pipe.wait(kv_state);
            if (lengths != nullptr || cu_k != nullptr) {
                const int exist = static_cast<int>(record.rows().w[3]) - static_cast<int>(record.keys().w[0]) * BN;
                if (exist < BN) {
                    overwrite(k_tile, exist, KTile::kBoxBytes, KTile::kBoxes + VTile::kBoxes);  // v lies behind k
                    ptx::named_barrier_sync(1, 256);
                }
            }
            // A part of dq of the step before, whose ds lie in shared memory; then it is on its way.
            auto multiply_dq = [&](float(&dq)[32], int part) {
                const u32 buffer = (uses - 1) % 2;
                ptx::mbarrier_wait(ds_full + 8 * buffer, (uses - 1) / 2 % 2);
                const u64 a = ptx::matrix_descriptor(ds_tiles + buffer * DsTile::kBytes, DsTile::kBoxBytes);
                const u64 b = ptx::matrix_descriptor(k_tile + part * KTile::kBoxBytes, KTile::kBoxBytes);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < BN / 16; ++k)
                    ptx::wgmma_ss<T, true, true>(dq, a + k * kNextColumnMajor, b + k * kNextColumnMajor, k != 0);
                ptx::wgmma_commit();
            };
            auto send_dq = [&](const float(&dq)[32], int half) {
                // Of the steps before the one that this is of, one part each, and another one every other time.
                const u32 sent = uses - 1 + (uses - static_cast<u32>(group)) / 2 + half;
                const PipelineState<1> dq_state{0, sent % 2};
                const Pipeline<1> dq_pipe{dq_pipes + group * Pipeline<1>::kBytes};
                dq_pipe.acquire(dq_state);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    ptx::st_shared_16(dq_tile + group * kPartBytes + (i * 128 + threadIdx.x % 128) * 16,
                                      Raw<16>{{__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                               __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])}});
                ptx::fence_async_shared();
                dq_pipe.commit_warp(dq_state);
            };
            int m = static_cast<int>(record.queries().w[3]), same = static_cast<int>(heads_per_kv);
            bool before = false;  // there was a step
#pragma unroll 1
            for (; left_over > 0; --left_over, ++uses, before = true) {
                const PipelineState<kStages> state{static_cast<int>(uses % kStages), uses / kStages % 2};
                const ptx::SharedAddress q_tile = q_tiles + state.stage * QTile::kBytes;
                const ptx::SharedAddress do_tile = do_tiles + state.stage * DoTile::kBytes;
                q_pipe.wait(state);
                bool masked;
                {
                    const Raw<16> rows = record.rows();
                    const int lq_here = static_cast<int>(rows.w[2]), first_key = static_cast<int>(record.keys().w[0]) * BN + group * 64;
                    const Mask mask(Sequence{0, 0, lq_here, static_cast<int>(rows.w[3])}, left, right);
                    const Interval all = mask.queries_all(first_key, first_key + 64);
                    masked = m * BQ < all.first || m * BQ + BQ > all.end;
                    if (cu_q != nullptr && m * BQ + BQ > lq_here) {
                        do_pipe.wait(state);
                        overwrite(q_tile, lq_here - m * BQ, QTile::kBoxBytes, QTile::kBoxes);
                        overwrite(do_tile, lq_here - m * BQ, DoTile::kBoxBytes, DoTile::kBoxes);
                        ptx::named_barrier_sync(1, 256);
                    }
                }
#pragma unroll 1
                for (int half = 0; half < 2; ++half) {
                    u32 own_half = threadIdx.x / 128;
                    ptx::forget(own_half);  // addresses that follow from it are worked out anew: registers are short
                    own_half = __shfl_sync(0xffffffffu, own_half, 0);
                    float s[kHalf / 2], dp[kHalf / 2];
                    u32 p[kHalf / 16][4], ds[kHalf / 16][4];
                    ptx::wgmma_fence();
                    multiply_rows<T, BN, BQ, DQK>(s, k_tile + own_half * 64 * kTileRow, q_tile + half * kHalf * kTileRow);
                    ptx::wgmma_commit();
                    do_pipe.wait(state);
                    ptx::wgmma_fence();
                    multiply_rows<T, BN, BQ, DV>(dp, v_tile + own_half * 64 * kTileRow, do_tile + half * kHalf * kTileRow);
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<1>();

                    const u32 stat_at = state.stage * kStatBytes + half * kHalf * 4;
                    const float* const lse_row = reinterpret_cast<const float*>(memory_at(lse_rows + stat_at)) + 2 * t;
                    const float* const delta_row = reinterpret_cast<const float*>(memory_at(delta_rows + stat_at)) + 2 * t;
#pragma unroll
                    for (int j = 0; j < kHalf / 8; ++j) {
                        const float2 lse_pair = *reinterpret_cast<const float2*>(lse_row + 8 * j);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            s[4 * j + i] = ptx::ex2(s[4 * j + i] * factor - (i % 2 == 0 ? lse_pair.x : lse_pair.y));
                    }
                    const int query = m * BQ + half * kHalf;
                    if (masked) {
                        const Raw<16> rows = record.rows();
                        const int keys = static_cast<int>(rows.w[3]), shift = keys - static_cast<int>(rows.w[2]);
                        const int first_key = static_cast<int>(record.keys().w[0]) * BN + own_row;
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const int key = first_key + 8 * r, own = key - shift - query - 2 * t;
                            const int from = key >= keys ? kHalf : right < 0 ? -kHalf : own - static_cast<int>(right);
                            const int to = left < 0 ? kHalf : own + static_cast<int>(left) + 1;
#pragma unroll
                            for (int j = 0; j < kHalf / 8; ++j)
#pragma unroll
                                for (int c = 0; c < 2; ++c)
                                    if (8 * j + c < from || 8 * j + c >= to) s[4 * j + 2 * r + c] = 0.0f;
                        }
                    }
                    ptx::wgmma_wait<0>();
#pragma unroll
                    for (int j = 0; j < kHalf / 8; ++j) {
                        const float2 delta_pair = *reinterpret_cast<const float2*>(delta_row + 8 * j);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 == 0 ? delta_pair.x : delta_pair.y));
                    }
                    pack_rows<T>(ds, dp);
                    pack_rows<T>(p, s);

                    ptx::wgmma_fence();
                    multiply_packed<T, kHalf, BQ>(dv_sums, p, do_tile + half * kHalf * kTileRow, true);
                    ptx::wgmma_commit();
                    ptx::wgmma_fence();
                    multiply_packed<T, kHalf, BQ>(dk_sums, ds, q_tile + half * kHalf * kTileRow, true);
                    ptx::wgmma_commit();
                    // The buffer is free: who has ds of the step before knows that dq of the one before that is done.
                    if (half == 0) ptx::mbarrier_wait(ds_full + 8 * ((uses - 1) % 2), (uses - 1) / 2 % 2);
                    const u32 ds_row = own_row * kTileRow + ((own_row & 7) << 4) + 4 * t;
#pragma unroll
                    for (int j = 0; j < kHalf / 8; ++j)
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            *reinterpret_cast<u32*>(memory_at(ds_tiles) + state.stage * DsTile::kBytes +
                                                    (ds_row ^ (j + half * 4) << 4) + 8 * r * kTileRow) = ds[j / 2][j % 2 * 2 + r];
                    ptx::wgmma_wait<0>();
                    // dq is that of the step before: it needs what the other warpgroup made.
                    if (before && (half == 0 || (uses - 1) % 2 == static_cast<u32>(group))) {
                        float dq[32];
                        multiply_dq(dq, half == 0 ? group : 2);
                        ptx::wgmma_wait<0>();
                        send_dq(dq, half);
                    }
                }
                ptx::fence_async_shared();
                __syncwarp();
                if (speaks) {
                    ptx::mbarrier_arrive(ds_full + 8 * state.stage);
                    do_pipe.release(state);
                    q_pipe.release(state);
                }
                if (--same == 0) {
                    same = static_cast<int>(heads_per_kv);
                    const Raw<16> queries = record.queries();
                    m = m == static_cast<int>(queries.w[2]) ? static_cast<int>(queries.w[1]) : m + 1;
                }
            }
            float dq[32];
            multiply_dq(dq, group);
            ptx::wgmma_wait<0>();
            send_dq(dq, 0);
            if ((uses - 1) % 2 == static_cast<u32>(group)) {
                multiply_dq(dq, 2);
                ptx::wgmma_wait<0>();
                send_dq(dq, 1);
            }
        } else {
            kv_pipe.wait(kv_state);
        }
        if (speaks) kv_pipe.release(PipelineState<1>{0, 0});

        ptx::forget(index);  // where this tile lies is worked out a second time: registers are short above
        const KeyTile at(index, tiles, kv_heads, static_cast<u32>(batches), static_cast<u32>(heads_together),
                                   static_cast<u32>(together));
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
