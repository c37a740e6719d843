// Attention forward on sm_90a: out = softmax(mask(scale q k^T)) v and lse, in one pass over keys.
//
// Tensors are [sequence, row, head, column] in any strides, or packed rows (problem.py). A block takes tiles of 64
// kGroups rows from a counter: as many queries of one head, or where sequences are short, `rows` queries of `bundle`
// heads that share keys, heads of a query side by side. kGroups consumer warpgroups own 64 rows each; one warp of
// another warpgroup issues TMA loads of q and of tiles of BN keys and values, last keys first, through two stages each.
//
// A warpgroup multiplies q by the keys of tile j while the values of tile j + 1 (the previous step) are multiplied by
// their softmax probabilities, which come from registers; then it computes the probabilities of tile j. Warpgroups take
// turns on the tensor cores (ping-pong, by named barriers): one warpgroup computes softmax while another one issues
// MMAs.
//
// Numerics: scores, maxima, sums and outputs are fp32. Probabilities are rounded to T for the product with the values;
// the denominator sums the unrounded ones. out is rounded once. The bits do not depend on which block takes a tile.
//
// EXTRAS (with bundles of one head, as are sinks): 1 for a soft-cap, a limit per query, or a scale that is not positive, 2 for a bias as well; scores are then
// computed element by element.
#include "attention/sm90_bias.cuh"
#include "attention/sm90_forward.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <int kGroups>
struct AttentionRegisters {
    static constexpr int kProducer = kGroups == 3 ? 32 : 40, kConsumer = kGroups == 3 ? 160 : 232;
};

template <typename T>
struct ForwardArguments {
    T* out;
    float* lse;
    const void *sinks, *bias;
    const i32 *lengths, *kv_limit, *cu_q, *cu_k;
    u32* counter;
    i64 batches, heads, heads_per_kv, lq, lkv, d_v, out_batch, out_row, out_head, lse_batch, lse_head, left, right,
        heads_together, bundle, rows, sinks_kind, bias_kind, bias_batch, bias_head, bias_row, bias_column, limit_batch;
    double scale, softcap;
};

template <typename T, int DQK, int DV, int BN, int kGroups, int EXTRAS>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    attention_sm90_fwd(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                       const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ForwardArguments<T> args) {
    constexpr int BM = 64 * kGroups, kConsumers = 4 * kGroups;  // warps
    using QTile = Boxed<BM, DQK>;
    using KTile = Boxed<BN, DQK>;
    using VTile = Boxed<BN, DV>;
    constexpr int kStages = 2;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress k_tiles = q_tile + QTile::kBytes, v_tiles = k_tiles + kStages * KTile::kBytes;
    const ptx::SharedAddress barriers = v_tiles + kStages * VTile::kBytes;
    const Pipeline<1> q_pipe{barriers};
    const Pipeline<kStages> k_pipe{barriers + Pipeline<1>::kBytes};
    const Pipeline<kStages> v_pipe{k_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress patch = v_pipe.barriers + Pipeline<kStages>::kBytes;  // see below
    u8* const handover_memory = memory + (patch + 8 - ptx::shared_address(memory));
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    constexpr bool kBundles = EXTRAS == 0 && DV < 256;  // otherwise registers are short
    const int bundle = kBundles ? static_cast<int>(args.bundle) : 1, rows = kBundles ? static_cast<int>(args.rows) : BM;
    const u32 tiles = static_cast<u32>(ceil_div(args.lq, rows)), bundles = static_cast<u32>(args.heads) / static_cast<u32>(bundle);
    const u32 count = tiles * bundles * static_cast<u32>(args.batches);
    DrawnSource<WarpHandover> source(args.counter, WarpHandover(handover_memory, warp == kConsumers));

    if (threadIdx.x == 0) {
        q_pipe.init(1, kConsumers);
        k_pipe.init(1, kConsumers);
        v_pipe.init(1, kConsumers);
        ptx::mbarrier_init(patch, 1);
        source.handover.init(kConsumers + 1);
        ptx::mbarrier_fence_init();
    }
    if (rows * bundle < BM) {  // rows that no load writes
        for (u32 at = rows * bundle * kTileRow + threadIdx.x * 16; at < QTile::kBoxBytes; at += blockDim.x * 16)
            for (int box = 0; box < QTile::kBoxes; ++box)
                ptx::st_shared_16(q_tile + box * QTile::kBoxBytes + at, Raw<16>{{0, 0, 0, 0}});
        ptx::fence_async_shared();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<AttentionRegisters<kGroups>::kProducer>();
        if (warp != kConsumers) return;
        PipelineState<1> q_state;
        PipelineState<kStages> k_state, v_state;
        u32 patched = 0;
        for (u32 index; (index = source.draw()) < count;) {
            const QueryTile tile(index, tiles, bundles, static_cast<u32>(args.batches),
                                 static_cast<u32>(args.heads_together));
            const Sequence sequence = sequence_at(tile.batch, args.lq, args.lkv, args.cu_q, args.cu_k, args.lengths);
            const Mask mask(sequence, args.left, args.right);
            const int row0 = tile.m * rows;
            const Interval any = mask.keys_any(row0, row0 + rows);
            if (row0 >= sequence.lq || any.empty()) continue;
            const int kv_head = tile.head * bundle / static_cast<int>(args.heads_per_kv),
                      batch = args.cu_q == nullptr ? tile.batch : 0;
            const int first = any.first / BN, last = (any.end - 1) / BN;

            q_pipe.acquire(q_state);
            if (lane == 0) {  // the map of bundles has heads before rows
                const int row = sequence.q_row + row0, head = tile.head * bundle;
                QTile::fetch(q_tile, q_map, q_pipe.expect(q_state, QTile::kBoxes * rows * bundle * kTileRow),
                             bundle == 1 ? row : head, bundle == 1 ? head : row, batch);
            }
            q_state.advance();
            auto fetch_keys = [&](int n) {
                k_pipe.acquire(k_state);
                if (lane == 0)
                    KTile::fetch(k_tiles + k_state.stage * KTile::kBytes, k_map, k_pipe.expect(k_state, KTile::kBytes),
                                 sequence.k_row + n * BN, kv_head, batch);
                k_state.advance();
            };
            fetch_keys(last);
#pragma unroll 1
            for (int n = last; n >= first; --n) {
                if (n > first) fetch_keys(n - 1);
                v_pipe.acquire(v_state);
                const ptx::SharedAddress to = v_tiles + v_state.stage * VTile::kBytes;
                const int row = sequence.k_row + n * BN;
                if ((args.lengths != nullptr || args.cu_k != nullptr) && n * BN + BN > sequence.keys) {
                    VTile::fetch_some(to, v_map, patch, patched, row, kv_head, batch, sequence.keys - n * BN);
                    v_pipe.commit_warp(v_state);
                } else if (lane == 0) {
                    VTile::fetch(to, v_map, v_pipe.expect(v_state, VTile::kBytes), row, kv_head, batch);
                }
                __syncwarp();
                v_state.advance();
            }
        }
        return;
    }

    ptx::registers_take<AttentionRegisters<kGroups>::kConsumer>();
    const int group = warp / 4, own_row = group * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    const bool speaks = lane == 0;
    const float factor = EXTRAS != 0 ? 1.0f : static_cast<float>(args.scale) * kLog2e;
    const bool vectors = EXTRAS == 2 && bias_in_vectors<T>(args.bias, args.bias_kind, args.bias_batch, args.bias_head,
                                                           args.bias_row, args.bias_column, args.lkv);
    // Ping-pong: a warpgroup issues its products after the one before it; the first one does not wait at the start.
    auto wait_for_cores = [&] { ptx::named_barrier_sync(1 + group, 256); };
    auto pass_cores = [&] { ptx::named_barrier_arrive(1 + (group + 1) % kGroups, 256); };
    if (group == kGroups - 1) pass_cores();

    ConsumerStates<kStages> pipe_states;
    for (u32 index; (index = source.draw()) < count;) {
        index = __shfl_sync(0xffffffffu, index, 0);  // shuffled so that the compiler knows it is uniform
        const QueryTile tile(index, tiles, bundles, static_cast<u32>(args.batches),
                             static_cast<u32>(args.heads_together));
        const Sequence sequence = sequence_at(tile.batch, args.lq, args.lkv, args.cu_q, args.cu_k, args.lengths);
        const WarpgroupRows own(Mask(sequence, args.left, args.right), tile.m * rows, rows, group, bundle);
        if (own.row0 >= sequence.lq) continue;

        SoftmaxState state;
        float o[DV / 2];
#pragma unroll
        for (float& x : o) x = 0.0f;

        const u8* bias_rows[2];  // both rows of this thread, at key 0
        BiasVectors<BN / 32 * 32> bias;
        if (EXTRAS == 2 && args.bias_kind != 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = min(tile.m * BM + own_row + 8 * r, static_cast<int>(args.lq) - 1);
                bias_rows[r] = static_cast<const u8*>(args.bias) +
                               (tile.batch * args.bias_batch + tile.head * args.bias_head + row * args.bias_row) *
                                   bias_bytes(args.bias_kind);
            }
        }
        auto load_bias = [&](int n) {
            if (EXTRAS == 2 && vectors) bias.load(bias_rows, n * BN, static_cast<int>(args.lkv));
        };

        // Turns scores of tile n into probabilities; `correction` rescales what was accumulated before.
        auto to_probabilities = [&](float(&s)[BN / 2], int n, float(&correction)[2]) {
            if constexpr (EXTRAS != 0) {
                const float scale = static_cast<float>(args.scale), softcap = static_cast<float>(args.softcap);
                if (EXTRAS == 2 && softcap == 0.0f) {
#pragma unroll
                    for (float& x : s) x *= scale * kLog2e;
                } else {
                    make_scores(s, scale, softcap);
                }
                if constexpr (EXTRAS == 2) {
                    if (vectors) {
                        bias.template add_to<T>(s);
                    } else if (args.bias_kind != 0) {
                        const i64 step = args.bias_column * bias_bytes(args.bias_kind);
                        const int column = n * BN + 2 * t;
                        const u8* const from[2] = {bias_rows[0] + column * step, bias_rows[1] + column * step};
                        add_bias_elements(s, args.bias_kind, from, step, static_cast<int>(args.lkv) - column);
                    }
                }
            }
            if ((EXTRAS != 0 && args.kv_limit != nullptr) || n * BN < own.all.first || n * BN + BN > own.all.end) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own.row0 + query_of(own_row + 8 * r, bundle);
                    int end = own.mask.hi(i);
                    if (EXTRAS != 0 && args.kv_limit != nullptr && i < sequence.lq)
                        end = min(end, args.kv_limit[tile.batch * args.limit_batch + i]);
                    mask_row(s, r, own.mask.lo(i) - n * BN - 2 * t, end - n * BN - 2 * t);
                }
            }
            state.add(s, factor, correction);
        };

        if (!own.any.empty()) {
            const int first = own.any.first / BN, last = (own.any.end - 1) / BN;
            multiply_tiles<T, T, QTile, KTile, VTile, EXTRAS == 0>(o, ConsumerPipes<kStages>{q_pipe, k_pipe, v_pipe}, pipe_states,
                                                                q_tile + group * 64 * kTileRow, k_tiles, v_tiles, first, last,
                                                                wait_for_cores, pass_cores, to_probabilities, load_bias);
        }

        ptx::forget(index);  // the position of this tile is computed again to save registers above
        const QueryTile at(index, tiles, bundles, static_cast<u32>(args.batches),
                           static_cast<u32>(args.heads_together));
        const Sequence here = sequence_at(at.batch, args.lq, args.lkv, args.cu_q, args.cu_k, args.lengths);
        const int row0 = at.m * rows;
        const float sink = args.sinks_kind == 0
                               ? negative_infinity()
                               : bias_at(args.sinks, static_cast<int>(args.sinks_kind), at.head) * kLog2e;
        float times[2], row_lse[2];
        state.finish(factor, sink, times, row_lse);
        T* to[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = own_row + 8 * r, query = query_of(row, bundle);
            const bool exists = query < rows && row0 + query < here.lq;
            const i64 head = at.head * bundle + row - query * bundle, i = here.q_row + static_cast<i64>(row0 + query);
            to[r] = exists ? args.out + at.batch * args.out_batch + head * args.out_head + i * args.out_row : nullptr;
            if (exists && t == 0) args.lse[at.batch * args.lse_batch + head * args.lse_head + i] = row_lse[r];
        }
        store_rows_at<T>(to, static_cast<int>(args.d_v), o, times);
    }
    if (group == 0) wait_for_cores();  // the turn that the last warpgroup has passed on
}

}  // namespace rtk
