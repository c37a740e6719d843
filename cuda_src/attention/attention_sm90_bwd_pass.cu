// Attention backward on sm_90a for heads of 129 to 256 elements: one of dq, dk and dv.
//
// Accumulators of dk and dv of 64 keys would take all registers of a warpgroup, so each gradient is a pass (a launch)
// of its own that recomputes the scores: eight products instead of five, but no exchange between warpgroups and no
// additions in global memory. A block takes tiles of 128 rows of one head from a counter: queries for dq (PASS 0), keys
// for dk (1) and dv (2). Two consumer warpgroups own 64 of these rows each, in shared memory: `own_qk` (q or k) and
// `own_v` (dout or v). One warp of a third warpgroup issues TMA loads of the tiles of BN rows that they meet: `met_qk`
// (k or q) and `met_v` (v or dout), keys for dq, queries (of all heads that share these keys) for dk and dv. With rows
// of `own` as rows of s,
//     s = own_qk met_qk^T,  p = 2^(s - lse),  dp = own_v met_v^T,  ds = p (dp - delta),
//     dq += ds met_qk,  dk += ds met_qk,  dv += p met_v                  p and ds come from registers.
// The last product of a step overlaps with the scores of the next one. Warpgroups alternate (ping-pong): one issues
// that product and the next step's scores to the tensor cores while the other computes p and ds.
//
// Shared memory, KB, own + met: 192/128 80 + 2 x 60, 192/192 96 + 2 x 60, 256/256 128 + 2 x 32 + 32 (one stage of
// met_v); dv has no own_v, and larger tiles: 48 + 2 x 80, 48 + 2 x 84, 64 + 2 x 80. Registers of a consumer:
// accumulators 64 to 128, plus either s and packed (3/4 BN) or s and dp (BN). This is why dp is issued only after the
// last product of the previous step.
//
// With `parts`, a tile of keys meets one of so many parts of the query heads that share it; dk and dv of a part are
// stored in fp32, and another launch adds them in order.
//
// Numerics: p and ds are rounded to T before the products, all sums are fp32 and rounded once. The bits do not depend
// on which block takes a tile.
//
// EXTRAS: 1 for a soft-cap or a limit per query.
#include "attention/sm90_bwd.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

inline constexpr int kPassDq = 0, kPassDk = 1, kPassDv = 2;
inline constexpr int kPassRows = 128;  // of a block's tile

// The tiles of BN rows that row tile `index` meets.
template <int PASS, int BN>
struct PassTile {
    int row0, head, batch;  // the head is one of queries for dq, of keys otherwise
    Sequence sequence;
    bool exists;
    int first, last;  // tiles met; none if last < first

    // Number of gradient rows of a sequence; rows past `lengths` have gradient 0.
    RTK_DEVICE static u32 tiles_of(i64 lq, i64 lkv) {
        return static_cast<u32>(ceil_div(PASS == kPassDq ? lq : lkv, kPassRows));
    }

    RTK_DEVICE PassTile(u32 index, u32 tiles, u32 heads, u32 batches, u32 heads_together, i64 lq, i64 lkv, const i32* cu_q,
                        const i32* cu_k, const i32* lengths, i64 left, i64 right) {
        const QueryTile tile(index, tiles, heads, batches, heads_together);
        // Under a causal mask the last queries and the first keys take the longest.
        row0 = kPassRows * (PASS == kPassDq ? tile.m : static_cast<int>(tiles) - 1 - tile.m);
        head = tile.head, batch = tile.batch;
        sequence = sequence_at(batch, lq, lkv, cu_q, cu_k, lengths);
        const Mask mask(sequence, left, right);
        const Interval any = PASS == kPassDq ? mask.keys_any(row0, row0 + kPassRows) : mask.queries_any(row0, row0 + kPassRows);
        exists = PASS != kPassDq || row0 < sequence.lq;
        first = any.empty() ? 0 : any.first / BN;
        last = any.empty() || !exists ? -1 : (any.end - 1) / BN;
    }
};

template <typename T, int DQK, int DV, int BN, int STAGES_V, int PASS, int EXTRAS>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_bwd_pass(const __grid_constant__ ptx::TensorMap own_qk_map, const __grid_constant__ ptx::TensorMap own_v_map,
                            const __grid_constant__ ptx::TensorMap met_qk_map, const __grid_constant__ ptx::TensorMap met_v_map,
                            const float* lse, const float* delta, void* gradient, const i32* lengths, const i32* kv_limit,
                            const i32* cu_q, const i32* cu_k, u32* counter, i64 batches, i64 heads, i64 heads_per_kv, i64 lq,
                            i64 lkv, i64 padded_rows, i64 columns, i64 gradient_batch, i64 gradient_row, i64 gradient_head,
                            i64 left, i64 right, i64 heads_together, i64 parts, i64 limit_batch, double scale, double softcap) {
    constexpr int kConsumers = 8, kStages = 2, kWidth = PASS == kPassDv ? DV : DQK;
    using OwnQk = Boxed<kPassRows, DQK>;
    using OwnV = Boxed<kPassRows, DV>;
    using MetQk = Boxed<BN, DQK>;
    using MetV = Boxed<BN, DV>;
    constexpr u32 kOwnVBytes = PASS == kPassDv ? 0 : OwnV::kBytes;
    constexpr u32 kStatBytes = PASS == kPassDq ? 0 : PASS == kPassDk ? 2 * BN * 4 : BN * 4;  // lse, then delta
    extern __shared__ __align__(1024) u8 memory[];
    const ptx::SharedAddress own_qk = ptx::aligned_up<1024>(ptx::shared_address(memory)), own_v = own_qk + OwnQk::kBytes;
    const ptx::SharedAddress met_qk = own_v + kOwnVBytes, met_v = met_qk + kStages * MetQk::kBytes;
    const ptx::SharedAddress stats = met_v + STAGES_V * MetV::kBytes, barriers = stats + kStages * kStatBytes;
    const Pipeline<1> own_pipe{barriers};
    const Pipeline<kStages> qk_pipe{barriers + Pipeline<1>::kBytes};
    const Pipeline<STAGES_V> v_pipe{qk_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress patch = v_pipe.barriers + Pipeline<STAGES_V>::kBytes;
    auto memory_at = [&](ptx::SharedAddress address) { return memory + (address - ptx::shared_address(memory)); };
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 tiles = PassTile<PASS, BN>::tiles_of(lq, lkv);
    const u32 own_heads = static_cast<u32>(PASS == kPassDq ? heads : heads / heads_per_kv);
    const u32 count = tiles * own_heads * static_cast<u32>(batches);
    const int met_heads = PASS == kPassDq ? 1 : static_cast<int>(heads_per_kv);
    WarpHandover numbers(memory_at(patch + 8), warp == kConsumers);
    static_assert(STAGES_V <= kStages, "stages follow from how many tiles were met");
    auto tile_at = [&](u32 index) {
        return PassTile<PASS, BN>(index, tiles, own_heads, static_cast<u32>(batches), static_cast<u32>(heads_together), lq, lkv,
                                  cu_q, cu_k, lengths, left, right);
    };

    if (threadIdx.x == 0) {
        own_pipe.init(1, kConsumers);
        qk_pipe.init(1, kConsumers);
        v_pipe.init(1, kConsumers);
        ptx::mbarrier_init(patch, 1);
        numbers.init(kConsumers + 1);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<kWidth < 256 ? 56 : 40>();
        if (warp != kConsumers) return;
        u32 taken = 0, uses = 0, patched = 0;
        for (u32 index; (index = numbers.give([&] { return atomicAdd(counter, 1u); })) < count;) {
            const PassTile<PASS, BN> tile = tile_at(index);
            if (tile.last < tile.first) continue;
            const Sequence& sequence = tile.sequence;
            const int batch = cu_q == nullptr ? tile.batch : 0;
            const int own_row = (PASS == kPassDq ? sequence.q_row : sequence.k_row) + tile.row0;
            const int met_row = PASS == kPassDq ? sequence.k_row : sequence.q_row;
            const int met_rows = PASS == kPassDq ? sequence.keys : sequence.lq;
            const int stats_row = static_cast<int>(padded_row(tile.batch, sequence, lq, cu_q != nullptr));
            // Only operands of products with p or ds must be cleared past the last row: scores there are masked, NaN or
            // not.
            const bool patches = PASS == kPassDq ? lengths != nullptr || cu_k != nullptr : cu_q != nullptr;

            const PipelineState<1> own_state{0, taken++ % 2};
            own_pipe.acquire(own_state);
            if (lane == 0) {
                const ptx::SharedAddress full = own_pipe.expect(own_state, OwnQk::kBytes + kOwnVBytes);
                const int head = PASS == kPassDq ? tile.head : tile.head / static_cast<int>(parts);
                OwnQk::fetch(own_qk, own_qk_map, full, own_row, head, batch);
                if (PASS != kPassDv) OwnV::fetch(own_v, own_v_map, full, own_row, head, batch);
            }
#pragma unroll 1
            for (int h = 0; h < met_heads; ++h) {
                const int head = PASS == kPassDq ? tile.head / static_cast<int>(heads_per_kv) : tile.head * met_heads + h;
#pragma unroll 1
                for (int n = tile.first; n <= tile.last; ++n, ++uses) {
                    const PipelineState<kStages> qk_state{static_cast<int>(uses % kStages), uses / kStages % 2};
                    const PipelineState<STAGES_V> v_state{static_cast<int>(uses % STAGES_V), uses / STAGES_V % 2};
                    const int row = met_row + n * BN, exist = met_rows - n * BN;
                    const bool patch_it = patches && exist < BN;
                    qk_pipe.acquire(qk_state);
                    {
                        const bool some = PASS != kPassDv && patch_it;
                        const ptx::SharedAddress to = met_qk + qk_state.stage * MetQk::kBytes;
                        if (some) {
                            MetQk::fetch_some(to, met_qk_map, patch, patched, row, head, batch, exist);
                            __syncwarp();
                        }
                        if (lane == 0) {
                            const ptx::SharedAddress full = qk_pipe.expect(qk_state, (some ? 0 : MetQk::kBytes) + kStatBytes);
                            if (!some) MetQk::fetch(to, met_qk_map, full, row, head, batch);
                            if (PASS != kPassDq) {
                                const i64 at = head * padded_rows + stats_row + n * BN;
                                const ptx::SharedAddress to_stats = stats + qk_state.stage * kStatBytes;
                                ptx::bulk_load(to_stats, lse + at, BN * 4, full);
                                if (PASS == kPassDk) ptx::bulk_load(to_stats + BN * 4, delta + at, BN * 4, full);
                            }
                        }
                        __syncwarp();
                    }
                    v_pipe.acquire(v_state);
                    const ptx::SharedAddress to = met_v + v_state.stage * MetV::kBytes;
                    if (PASS == kPassDv && patch_it) {
                        MetV::fetch_some(to, met_v_map, patch, patched, row, head, batch, exist);
                        v_pipe.commit_warp(v_state);
                    } else if (lane == 0) {
                        MetV::fetch(to, met_v_map, v_pipe.expect(v_state, MetV::kBytes), row, head, batch);
                    }
                    __syncwarp();
                }
            }
        }
        return;
    }

    ptx::registers_take<kWidth < 256 ? 224 : 232>();
    const int group = warp / 4, own_row = group * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    const bool speaks = lane == 0;
    const float factor = static_cast<float>(scale) * kLog2e;
    const float by_cap = softcap <= 0.0 ? 0.0f : 1.0f / (static_cast<float>(softcap) * kLog2e);
    const ptx::SharedAddress group_qk = own_qk + group * 64 * kTileRow, group_v = own_v + group * 64 * kTileRow;
    // Ping-pong: a warpgroup issues its products of a step after the other one has issued its own.
    auto wait_for_cores = [&] { ptx::named_barrier_sync(1 + group, 256); };
    auto pass_cores = [&] { ptx::named_barrier_arrive(2 - group, 256); };
    if (group == 1) pass_cores();
    numbers.makes = false;
    u32 drawn = 0, taken = 0, uses = 0;  // row tiles, those that meet any tile, and tiles met: pipeline states follow from these
    auto qk_state = [&](u32 use) { return PipelineState<kStages>{static_cast<int>(use % kStages), use / kStages % 2}; };
    auto v_state = [&](u32 use) { return PipelineState<STAGES_V>{static_cast<int>(use % STAGES_V), use / STAGES_V % 2}; };
    auto qk_at = [&](u32 use) { return met_qk + use % kStages * MetQk::kBytes; };
    auto v_at = [&](u32 use) { return met_v + use % STAGES_V * MetV::kBytes; };
#pragma unroll 1
    for (u32 index;; ++drawn) {
        numbers.state = {static_cast<int>(drawn % 2), drawn / 2 % 2};
        index = numbers.give([] { return 0u; });
        if (index >= count) break;
        index = __shfl_sync(0xffffffffu, index, 0);  // shuffled so that the compiler knows it is uniform
        const PassTile<PASS, BN> tile = tile_at(index);
        if (!tile.exists) continue;
        float sums[kWidth / 2];
#pragma unroll
        for (float& x : sums) x = 0.0f;

        if (tile.first <= tile.last) {
            const int first = tile.first, last = tile.last;
            Interval all;
            {
                const Mask mask(tile.sequence, left, right);
                const int group_row = tile.row0 + group * 64;
                all = PASS == kPassDq ? mask.keys_all(group_row, group_row + 64) : mask.queries_all(group_row, group_row + 64);
            }
            float own_lse[2], own_delta[2];
            if constexpr (PASS == kPassDq) {
                const i64 at =
                    tile.head * padded_rows + padded_row(tile.batch, tile.sequence, lq, cu_q != nullptr) + tile.row0 + own_row;
#pragma unroll
                for (int r = 0; r < 2; ++r) own_lse[r] = lse[at + 8 * r], own_delta[r] = delta[at + 8 * r];
            }
            float s[BN / 2], dp[PASS == kPassDv ? 1 : BN / 2];
            u32 packed[BN / 16][4];

            auto multiply_qk = [&] {
                qk_pipe.wait(qk_state(uses));
                ptx::wgmma_fence();
                multiply_rows<T, kPassRows, BN, DQK>(s, group_qk, qk_at(uses));
                ptx::wgmma_commit();
            };
            auto multiply_v = [&] {
                if constexpr (PASS != kPassDv) {
                    v_pipe.wait(v_state(uses));
                    ptx::wgmma_fence();
                    multiply_rows<T, kPassRows, BN, DV>(dp, group_v, v_at(uses));
                    ptx::wgmma_commit();
                }
            };
            // Releases the stage that the last product of a step read; all lanes have read its statistics.
            auto release_met = [&](u32 use) {
                if constexpr (PASS == kPassDv) {
                    if (speaks) v_pipe.release(v_state(use));
                } else {
                    qk_pipe.release_warp(qk_state(use));
                }
            };
            // lse or delta of this thread's row r and column 8 j + c: that of the row for dq, of the column otherwise.
            auto of = [&](const float(&rows)[2], const float2& pair, int r, int c) {
                return PASS == kPassDq ? rows[r] : c == 0 ? pair.x : pair.y;
            };
            // Turns scores of tile n, in s, and dp, which may still be in flight, into p (in s) or ds (in dp).
            auto make_values = [&](int n) {
                const float* const lse_row =
                    reinterpret_cast<const float*>(memory_at(stats + uses % kStages * kStatBytes)) + 2 * t;
                auto pair_at = [&](int j) {
                    return PASS == kPassDq ? float2{0.0f, 0.0f} : *reinterpret_cast<const float2*>(lse_row + 8 * j);
                };
                if constexpr (EXTRAS != 0) make_scores(s, static_cast<float>(scale), static_cast<float>(softcap));
                if constexpr (EXTRAS == 0 || PASS == kPassDv) {
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j) {
                        const float2 pair = pair_at(j);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            s[4 * j + i] =
                                ptx::ex2(s[4 * j + i] * (EXTRAS != 0 ? 1.0f : factor) - of(own_lse, pair, i / 2, i % 2));
                    }
                }
                if constexpr (PASS != kPassDv) {
                    ptx::wgmma_wait<0>();
                    if (speaks) v_pipe.release(v_state(uses));
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j) {
                        const float2 pair = pair_at(j), delta_pair = pair_at(j + (PASS == kPassDk ? BN / 8 : 0));
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float weight = s[4 * j + i];
                            if constexpr (EXTRAS != 0) {
                                const float tangent = weight * by_cap;
                                weight = ptx::ex2(weight - of(own_lse, pair, i / 2, i % 2));
                                // The derivative of the cap is 1 - tanh^2; a capped score is cap * tanh.
                                weight = weight == 0.0f ? 0.0f : weight * (1.0f - tangent * tangent);
                            }
                            dp[4 * j + i] = weight * (dp[4 * j + i] - of(own_delta, delta_pair, i / 2, i % 2));
                        }
                    }
                }
                if ((EXTRAS != 0 && kv_limit != nullptr) || n * BN < all.first || n * BN + BN > all.end) {
                    u32 here = index;
                    ptx::forget(here);  // as below
                    const PassTile<PASS, BN> at = tile_at(here);
                    const Mask mask(at.sequence, left, right);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int row = at.row0 + own_row + 8 * r, column = n * BN + 2 * t;
                        int from, end;
                        if constexpr (PASS == kPassDq) {
                            from = mask.lo(row) - column, end = mask.hi(row) - column;
                            if (EXTRAS != 0 && kv_limit != nullptr && row < mask.lq)
                                end = min(end, kv_limit[at.batch * limit_batch + row] - column);
                        } else {
                            const int same = row - mask.shift;  // the query whose own key this is
                            from = row >= mask.keys ? BN : mask.right < 0 ? 0 : same - mask.right - column;
                            end = (mask.left < 0 ? mask.lq : min(mask.lq, same + mask.left + 1)) - column;
                        }
#pragma unroll
                        for (int j = 0; j < BN / 8; ++j)
#pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                bool seen = 8 * j + c >= from && 8 * j + c < end;
                                if (EXTRAS != 0 && PASS != kPassDq && kv_limit != nullptr && seen)
                                    seen = row < kv_limit[at.batch * limit_batch + column + 8 * j + c];
                                if (seen) continue;
                                if constexpr (PASS == kPassDv) {
                                    s[4 * j + 2 * r + c] = 0.0f;
                                } else {
                                    dp[4 * j + 2 * r + c] = 0.0f;
                                }
                            }
                    }
                }
            };
            auto pack = [&] {
                if constexpr (PASS == kPassDv) {
                    pack_rows<T>(packed, s);
                } else {
                    pack_rows<T>(packed, dp);
                }
            };

            const int steps = (last - first + 1) * met_heads;
            int n = first;
            own_pipe.wait(PipelineState<1>{0, taken++ % 2});
            wait_for_cores();
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ++uses) {
                multiply_qk();
                ptx::wgmma_wait<1>();  // wait for the last product of the previous step: its registers go to dp
                if (step != 0) release_met(uses - 1);
                multiply_v();
                pass_cores();
                ptx::wgmma_wait<PASS == kPassDv ? 0 : 1>();
                make_values(n);
                pack();
                if constexpr (PASS == kPassDv) {
                    qk_pipe.release_warp(qk_state(uses));
                    v_pipe.wait(v_state(uses));
                }
                wait_for_cores();
                ptx::wgmma_fence();
                multiply_packed<T, BN>(sums, packed, PASS == kPassDv ? v_at(uses) : qk_at(uses), true);
                ptx::wgmma_commit();
                n = n == last ? first : n + 1;
            }
            pass_cores();
            if (speaks) own_pipe.release(PipelineState<1>{0, 0});
            ptx::wgmma_wait<0>();
            release_met(uses - 1);
        }

        ptx::forget(index);  // the position of this tile is computed again to save registers above
        const PassTile<PASS, BN> at = tile_at(index);
        const Sequence rows = sequence_at(at.batch, lq, lkv, cu_q, cu_k, nullptr);
        const int exist = (PASS == kPassDq ? rows.lq : rows.keys) - at.row0;
        const i64 first_row = (PASS == kPassDq ? rows.q_row : rows.k_row) + at.row0;
        const float by = PASS == kPassDv ? 1.0f : static_cast<float>(scale), times[2] = {by, by};
        const i64 to = at.batch * gradient_batch + at.head * gradient_head + first_row * gradient_row;
        if (PASS != kPassDq && parts > 1) {
            store_rows(static_cast<float*>(gradient) + to, gradient_row, own_row, exist, static_cast<int>(columns), sums, times);
        } else {
            store_rows(static_cast<T*>(gradient) + to, gradient_row, own_row, exist, static_cast<int>(columns), sums, times);
        }
    }
    if (group == 0) wait_for_cores();  // the turn that the other warpgroup has passed on
}

}  // namespace rtk
