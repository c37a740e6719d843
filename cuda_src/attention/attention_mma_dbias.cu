// Gradient of an additive bias [batches, bias heads, queries, keys]; each of the first two dimensions is 1 or that of
// the attention. dbias[i, j] = sum of p (dp - delta) over the sequences and heads that share the element (names as in
// attention_mma_bwd.cu), without the slope of a soft cap, because the bias is added after the cap. Deterministic: a
// block owns 64 queries by BN keys and sums sequences and heads in order, in fp32 registers; nothing is shared between
// blocks.
//
// Four warps of 16 queries each. Shared memory holds the tiles of q, dout, k and v of one sequence and head at a time.
// Masked elements are 0.
// Grid: tiles of keys, tiles of queries, elements of the first two dimensions of the bias.
#include "attention/grads.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"

namespace rtk {

template <typename T>
struct BiasGradArguments {
    const T *q, *k, *v, *dout;
    const float* stats;
    const void* bias;
    const i32 *lengths, *kv_limit;
    void* dbias;
    i64 batch, heads, group, bias_batches, bias_heads, lq, lkv, d_qk, d_v, q_batch, q_row, q_head, k_batch, k_row,
        k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, count, bias_type,
        bias_batch, bias_head, bias_row, bias_column, limit_batch, left, right, scale_factor, softcap_inverse;
};

template <typename T, int D, int BN>
__global__ void __launch_bounds__(128) attention_mma_dbias(const __grid_constant__ BiasGradArguments<T> args) {
    using Tile = MmaTile<D>;
    constexpr int BM = 64, kThreads = 128, kKeyTiles = BN / 8;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const g_tile = q_tile + BM * Tile::kPitch;
    u8* const k_tile = g_tile + BM * Tile::kPitch;
    u8* const v_tile = k_tile + BN * Tile::kPitch;
    const int j0 = static_cast<int>(blockIdx.x) * BN, i0 = static_cast<int>(blockIdx.y) * BM;
    const int own_batch = static_cast<int>(blockIdx.z / args.bias_heads),
              own_head = static_cast<int>(blockIdx.z % args.bias_heads);
    const int first_batch = args.bias_batches == 1 ? 0 : own_batch,
              end_batch = args.bias_batches == 1 ? static_cast<int>(args.batch) : own_batch + 1;
    const int first_head = args.bias_heads == 1 ? 0 : own_head,
              end_head = args.bias_heads == 1 ? static_cast<int>(args.heads) : own_head + 1;
    const ScoreRule rule{args.scale_factor, args.softcap_inverse};
    const WarpRows mine(16);
    float sums[kKeyTiles][4];
    clear_sums(sums);
#pragma unroll 1
    for (int b = first_batch; b < end_batch; ++b) {
        const Sequence sequence = sequence_at(b, args.lq, args.lkv, nullptr, nullptr, args.lengths);
        const Mask mask(sequence, args.left, args.right);
        const Interval any = mask.keys_any(i0, i0 + BM);
        if (any.empty() || j0 >= any.end || j0 + BN <= any.first) continue;
        const SeenKeys seen{mask, args.kv_limit == nullptr ? nullptr : args.kv_limit + b * args.limit_batch};
#pragma unroll 1
        for (int h = first_head; h < end_head; ++h) {
            const i64 kv = h / static_cast<int>(args.group);
            __syncthreads();  // everybody is done with the previous tiles
            Tile::template fetch<BM, kThreads>(q_tile, args.q + b * args.q_batch + i0 * args.q_row + h * args.q_head,
                                               args.q_row, sequence.lq - i0, static_cast<int>(args.d_qk) / 8);
            Tile::template fetch<BM, kThreads>(
                g_tile, args.dout + b * args.dout_batch + i0 * args.dout_row + h * args.dout_head, args.dout_row,
                sequence.lq - i0, static_cast<int>(args.d_v) / 8);
            Tile::template fetch<BN, kThreads>(k_tile, args.k + b * args.k_batch + j0 * args.k_row + kv * args.k_head,
                                               args.k_row, sequence.keys - j0, static_cast<int>(args.d_qk) / 8);
            Tile::template fetch<BN, kThreads>(v_tile, args.v + b * args.v_batch + j0 * args.v_row + kv * args.v_head,
                                               args.v_row, sequence.keys - j0, static_cast<int>(args.d_v) / 8);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            float s[kKeyTiles][4], dp[kKeyTiles][4];
            clear_sums(s);
            clear_sums(dp);
            rows_by_rows<T, Tile, D / 16>(s, q_tile, mine.row, k_tile, 0, mine.lane);
            rows_by_rows<T, Tile, D / 16>(dp, g_tile, mine.row, v_tile, 0, mine.lane);
            const BiasRows added(args.bias, args.bias_type, b * args.bias_batch + h * args.bias_head, args.bias_row,
                                 args.bias_column);
            const float* const of_head = args.stats + b * args.lse_batch + h * args.lse_head;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = i0 + mine.row + mine.lane / 4 + 8 * r, j = j0 + mine.lane % 4 * 2;
                if (i >= sequence.lq) continue;
                const float log_sum = of_head[i], delta = of_head[args.count + i];
                const int first = seen.lo(i), end = seen.hi(i);
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int key = j + 8 * n + c;
                        const bool counts = key >= first && key < end;
                        const float before = dp[n][2 * r + c];
                        grad_of_score(s[n][2 * r + c], dp[n][2 * r + c], log_sum, delta, rule, added, i, key, counts);
                        if (counts) sums[n][2 * r + c] += s[n][2 * r + c] * (before - delta);
                    }
            }
        }
    }
    const i64 first_row = (static_cast<i64>(own_batch) * args.bias_heads + own_head) * args.lq;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = i0 + mine.row + mine.lane / 4 + 8 * r;
        if (i >= args.lq) continue;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = j0 + 8 * n + mine.lane % 4 * 2 + c;
                if (key < args.lkv)
                    store_any(args.dbias, static_cast<int>(args.bias_type), (first_row + i) * args.lkv + key,
                              sums[n][2 * r + c]);
            }
    }
}

}  // namespace rtk
