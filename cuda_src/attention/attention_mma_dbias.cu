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

template <typename T, int D, int BN>
__global__ void __launch_bounds__(128)
    attention_mma_dbias(const T* q, const T* k, const T* v, const T* dout, const float* stats, const void* bias,
                        const i32* lengths, const i32* kv_limit, void* dbias, i64 batch, i64 heads, i64 group,
                        i64 bias_batches, i64 bias_heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 q_batch, i64 q_row,
                        i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 dout_batch,
                        i64 dout_row, i64 dout_head, i64 lse_batch, i64 lse_head, i64 count, i64 bias_type, i64 bias_batch,
                        i64 bias_head, i64 bias_row, i64 bias_column, i64 limit_batch, i64 left, i64 right,
                        i64 scale_factor, i64 softcap_inverse) {
    using Tile = MmaTile<D>;
    constexpr int BM = 64, kThreads = 128, kKeyTiles = BN / 8;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const g_tile = q_tile + BM * Tile::kPitch;
    u8* const k_tile = g_tile + BM * Tile::kPitch;
    u8* const v_tile = k_tile + BN * Tile::kPitch;
    const int j0 = static_cast<int>(blockIdx.x) * BN, i0 = static_cast<int>(blockIdx.y) * BM;
    const int own_batch = static_cast<int>(blockIdx.z / bias_heads), own_head = static_cast<int>(blockIdx.z % bias_heads);
    const int first_batch = bias_batches == 1 ? 0 : own_batch, end_batch = bias_batches == 1 ? static_cast<int>(batch) : own_batch + 1;
    const int first_head = bias_heads == 1 ? 0 : own_head, end_head = bias_heads == 1 ? static_cast<int>(heads) : own_head + 1;
    const ScoreRule rule{scale_factor, softcap_inverse};
    const WarpRows mine(16);
    float sums[kKeyTiles][4];
    clear_sums(sums);
#pragma unroll 1
    for (int b = first_batch; b < end_batch; ++b) {
        const Sequence sequence = sequence_at(b, lq, lkv, nullptr, nullptr, lengths);
        const Mask mask(sequence, left, right);
        const Interval any = mask.keys_any(i0, i0 + BM);
        if (any.empty() || j0 >= any.end || j0 + BN <= any.first) continue;
        const SeenKeys seen{mask, kv_limit == nullptr ? nullptr : kv_limit + b * limit_batch};
#pragma unroll 1
        for (int h = first_head; h < end_head; ++h) {
            const i64 kv = h / static_cast<int>(group);
            __syncthreads();  // everybody is done with the previous tiles
            Tile::template fetch<BM, kThreads>(q_tile, q + b * q_batch + i0 * q_row + h * q_head, q_row, sequence.lq - i0,
                                               static_cast<int>(d_qk) / 8);
            Tile::template fetch<BM, kThreads>(g_tile, dout + b * dout_batch + i0 * dout_row + h * dout_head, dout_row,
                                               sequence.lq - i0, static_cast<int>(d_v) / 8);
            Tile::template fetch<BN, kThreads>(k_tile, k + b * k_batch + j0 * k_row + kv * k_head, k_row, sequence.keys - j0,
                                               static_cast<int>(d_qk) / 8);
            Tile::template fetch<BN, kThreads>(v_tile, v + b * v_batch + j0 * v_row + kv * v_head, v_row, sequence.keys - j0,
                                               static_cast<int>(d_v) / 8);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            float s[kKeyTiles][4], dp[kKeyTiles][4];
            clear_sums(s);
            clear_sums(dp);
            rows_by_rows<T, Tile, D / 16>(s, q_tile, mine.row, k_tile, 0, mine.lane);
            rows_by_rows<T, Tile, D / 16>(dp, g_tile, mine.row, v_tile, 0, mine.lane);
            const BiasRows added(bias, bias_type, b * bias_batch + h * bias_head, bias_row, bias_column);
            const float* const of_head = stats + b * lse_batch + h * lse_head;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = i0 + mine.row + mine.lane / 4 + 8 * r, j = j0 + mine.lane % 4 * 2;
                if (i >= sequence.lq) continue;
                const float log_sum = of_head[i], delta = of_head[count + i];
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
    const i64 first_row = (static_cast<i64>(own_batch) * bias_heads + own_head) * lq;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = i0 + mine.row + mine.lane / 4 + 8 * r;
        if (i >= lq) continue;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = j0 + 8 * n + mine.lane % 4 * 2 + c;
                if (key < lkv)
                    store_any(dbias, static_cast<int>(bias_type), (first_row + i) * lkv + key, sums[n][2 * r + c]);
            }
    }
}

}  // namespace rtk
