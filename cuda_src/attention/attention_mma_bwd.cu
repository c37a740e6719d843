// Attention backward with mma.sync, deterministic: one kernel accumulates dK and dV of 64 keys over all queries,
// another one dQ of 64 queries over all keys. Both recompute scores and dP from q, k, v and dout (seven products
// instead of five), so no accumulator is shared between blocks and there are no atomics.
//
//   p[i, j]  = exp(s[i, j] - lse[i])                  dp = dout v^T
//   ds[i, j] = p * (dp - delta[i]) * ds/dproduct      delta[i] = sum of dout * out - dlse[i]
//   dv = p^T dout        dk = scale * ds^T q          dq = scale * ds k
//
// attention_mma_stats runs first and writes two arrays shaped like lse: lse * log2(e) (+inf where a query saw no key,
// so that every p is 0) and delta. Four warps; the tiles that a block loops over have two stages, as in the forward
// kernel. P and dS are rounded to T before the products; accumulation is fp32.
#include "attention/grads.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "attention/mma_walk.cuh"
#include "attention/scores.cuh"
#include "common/reduce.cuh"

namespace rtk {

inline constexpr int kBackwardThreads = 128;
inline constexpr int kBackwardRows = 64;

// A warp for each row (query and head) of a sequence; grid: blocks of rows, heads, sequences.
template <typename T>
__global__ void __launch_bounds__(128)
    attention_mma_stats(const T* out, const T* dout, const float* lse, const float* dlse, const i32* cu_q, float* stats,
                        i64 lq, i64 d_v, i64 out_batch, i64 out_row, i64 out_head, i64 dout_batch, i64 dout_row,
                        i64 dout_head, i64 lse_batch, i64 lse_head, i64 count) {
    const int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
    const Sequence sequence = sequence_at(batch, lq, 0, cu_q, nullptr, nullptr);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 i = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (i >= sequence.lq) return;
    const T* const a = out + batch * out_batch + (sequence.q_row + i) * out_row + head * out_head;
    const T* const b = dout + batch * dout_batch + (sequence.q_row + i) * dout_row + head * dout_head;
    float sum = 0.0f;
    for (i64 column = lane * 8; column < d_v; column += kWarp * 8) {
        float x[8], y[8];
        load_keep<T, 8>(a + column, x);
        load_keep<T, 8>(b + column, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum += x[c] * y[c];
    }
    sum = warp_reduce<Sum>(sum);
    if (lane == 0) {
        const i64 at = batch * lse_batch + head * lse_head + sequence.q_row + i;
        stats[at] = lse[at] == negative_infinity() ? -negative_infinity() : lse[at] * kLog2e;
        stats[count + at] = sum - (dlse == nullptr ? 0.0f : dlse[at]);
    }
}

// dsinks[h] = -sum over queries of exp(sinks[h] - lse) * delta; one block per head. Packed rows that belong to no
// sequence are skipped.
template <typename T>
__global__ void __launch_bounds__(256)
    attention_mma_dsinks(const T* sinks, const float* stats, const i32* cu_q, float* dsinks, i64 batch, i64 lq,
                         i64 lse_batch, i64 lse_head, i64 count) {
    __shared__ GroupScratch<1> scratch;
    const int head = static_cast<int>(blockIdx.x);
    const float sink = static_cast<float>(sinks[head]) * kLog2e;
    float sum = 0.0f;
    for (int b = 0; b < static_cast<int>(batch); ++b) {
        const Sequence sequence = sequence_at(b, lq, 0, cu_q, nullptr, nullptr);
        const i64 first = b * lse_batch + head * lse_head + sequence.q_row;
        for (int i = static_cast<int>(threadIdx.x); i < sequence.lq; i += static_cast<int>(blockDim.x))
            sum -= ptx::ex2(sink - stats[first + i]) * stats[count + first + i];
    }
    sum = block_reduce<Sum>(sum, scratch);
    if (threadIdx.x == 0) dsinks[head] = sum;
}

template <typename T>
struct GradTensors {
    const T *q, *k, *v, *dout;
    const float* stats;
    const void* bias;
    const i32 *lengths, *kv_limit, *cu_q, *cu_k;
};

template <typename T>
struct QueryGrads {
    T* dq;
    i64 dq_batch, dq_row, dq_head;
};

template <typename T>
struct KeyGrads {
    T *dk, *dv;
    i64 dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head;
};

struct GradNumbers {
    i64 pairs, heads, group, tiles, section, lq, lkv, d_qk, d_v, q_batch, q_row, q_head, k_batch, k_row, k_head,
        v_batch, v_row, v_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, count, bias_type, bias_batch,
        bias_head, bias_row, bias_column, limit_batch, left, right, scale_factor, softcap_inverse;
};

template <typename T>
struct QueryGradArguments : GradTensors<T>, QueryGrads<T>, GradNumbers {};

template <typename T>
struct KeyGradArguments : GradTensors<T>, KeyGrads<T>, GradNumbers {};

// dQ of 64 queries of a head, 16 per warp. Grid and loop over keys as in the forward kernel.
template <typename T, int DQK, int DV, int BN>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    attention_mma_dq(const __grid_constant__ QueryGradArguments<T> args) {
    using QTile = MmaTile<DQK>;
    using VTile = MmaTile<DV>;
    constexpr int BM = kBackwardRows, kPart = BN < 32 ? BN : 32, kKeyTiles = kPart / 8;
    constexpr u32 kQBytes = BM * QTile::kPitch, kGBytes = BM * VTile::kPitch;
    constexpr u32 kKBytes = BN * QTile::kPitch, kVBytes = BN * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const g_tile = q_tile + kQBytes;
    u8* const k_tiles = g_tile + kGBytes;
    u8* const v_tiles = k_tiles + 2 * kKBytes;

    __shared__ __align__(16) struct {
        const T *k, *v;
        QueryBlock block;
    } walk;
    int begin, end;  // tiles of keys
    float log_sum[2], delta[2];
    {
        const QueryBlock own =
            query_block<BM, BN>(args.tiles, args.section, args.pairs, args.heads, args.lq, args.lkv, args.cu_q,
                                args.cu_k, args.lengths, args.left, args.right, args.kv_limit != nullptr);
        if (!own.exists()) return;
        begin = own.begin, end = own.end;
        const int i0 = own.i0, rows = own.sequence.lq - i0;
        if (threadIdx.x == 0) {
            walk.k = args.k + own.first_key(args.k_batch, args.k_row, args.k_head, args.group);
            walk.v = args.v + own.first_key(args.v_batch, args.v_row, args.v_head, args.group);
            walk.block = own;
        }
        __syncthreads();
        if (begin < end) {
            QTile::template fetch<BM, kBackwardThreads>(q_tile,
                                                        args.q + own.first_query(args.q_batch, args.q_row, args.q_head),
                                                        args.q_row, rows, static_cast<int>(args.d_qk) / 8);
            VTile::template fetch<BM, kBackwardThreads>(
                g_tile, args.dout + own.first_query(args.dout_batch, args.dout_row, args.dout_head), args.dout_row,
                rows, static_cast<int>(args.d_v) / 8);
        }
        const WarpRows mine(16);
        const float* const stats =
            args.stats + own.batch * args.lse_batch + own.head * args.lse_head + own.sequence.q_row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = i0 + mine.row + mine.lane / 4 + 8 * r;
            log_sum[r] = i < own.sequence.lq ? stats[i] : -negative_infinity();
            delta[r] = i < own.sequence.lq ? stats[args.count + i] : 0.0f;
        }
    }
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.block.sequence.keys - j0, stage = tile & 1;
        QTile::template fetch<BN, kBackwardThreads>(k_tiles + stage * kKBytes, walk.k + j0 * args.k_row, args.k_row,
                                                    rows, static_cast<int>(args.d_qk) / 8);
        VTile::template fetch<BN, kBackwardThreads>(v_tiles + stage * kVBytes, walk.v + j0 * args.v_row, args.v_row,
                                                    rows, static_cast<int>(args.d_v) / 8);
        ptx::cp_async_commit();
    };
    if (begin < end) fetch(begin);
    const ScoreRule rule{args.scale_factor, args.softcap_inverse};
    const bool plain = args.bias == nullptr && rule.softcap() == 0.0f;

    float sums[DQK / 8][4];
    clear_sums(sums);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const k_tile = k_tiles + (tile & 1) * kKBytes;
        const u8* const v_tile = v_tiles + (tile & 1) * kVBytes;
#pragma unroll 1
        for (int key = 0; key < BN; key += kPart) {
            float s[kKeyTiles][4], dp[kKeyTiles][4];
            clear_sums(s);
            clear_sums(dp);
            const WarpRows mine(16);
            rows_by_rows<T, QTile, DQK / 16>(s, q_tile, mine.row, k_tile, key, mine.lane);
            rows_by_rows<T, VTile, DV / 16>(dp, g_tile, mine.row, v_tile, key, mine.lane);
            const int j0 = tile * BN + key + mine.lane % 4 * 2;
            const bool whole = walk.block.sees_whole(tile * BN + key, kPart);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = walk.block.i0 + mine.row + mine.lane / 4 + 8 * r;
                int first = 0, end_here = i < walk.block.sequence.lq ? kPart : 0;  // valid keys of this part, from j0 on
                if (!whole) {
                    const i32* const limits =
                        args.kv_limit == nullptr ? nullptr : args.kv_limit + walk.block.batch * args.limit_batch;
                    const SeenKeys seen{Mask(walk.block.sequence, args.left, args.right), limits};
                    first = seen.lo(i) - j0, end_here = min(end_here, seen.hi(i) - j0);
                }
                if (plain) {
#pragma unroll
                    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            grad_of_product(s[n][2 * r + c], dp[n][2 * r + c], log_sum[r], delta[r], rule,
                                            8 * n + c >= first && 8 * n + c < end_here);
                } else {
                    const i64 offset = walk.block.batch * args.bias_batch + walk.block.head * args.bias_head;
                    const BiasRows added(args.bias, args.bias_type, offset, args.bias_row, args.bias_column);
#pragma unroll
                    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            grad_of_score(s[n][2 * r + c], dp[n][2 * r + c], log_sum[r], delta[r], rule, added, i,
                                          j0 + 8 * n + c, 8 * n + c >= first && 8 * n + c < end_here);
                }
            }
            const WarpRows after(16);
#pragma unroll
            for (int step = 0; step < kPart / 16; ++step) {
                u32 a[4];
                as_left<T>(a, dp[2 * step], dp[2 * step + 1]);
                by_columns<T, QTile>(sums, a, k_tile, key + 16 * step, after.lane);
            }
        }
    }
    const WarpRows mine(16);
    const QueryBlock& own = walk.block;
    store_rows<T>(args.dq + own.first_query(args.dq_batch, args.dq_row, args.dq_head), args.dq_row, sums, rule.scale(),
                  mine.row, own.sequence.lq - own.i0, static_cast<int>(args.d_qk), mine.lane);
}

// dK and dV (PARTS: 1 and 2, 3 for both) of 64 keys of a head, 16 per warp, summed over the query heads of the group
// and, for each head, over tiles of BQ queries. Scores are transposed: rows are keys.
template <typename T, int DQK, int DV, int BQ, int PARTS>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    attention_mma_dkv(const __grid_constant__ KeyGradArguments<T> args) {
    constexpr bool kMakesK = PARTS & 1, kMakesV = PARTS & 2;
    using QTile = MmaTile<DQK>;
    using VTile = MmaTile<DV>;
    constexpr int BM = kBackwardRows, kPart = BQ < 32 ? BQ : 32, kQueryTiles = kPart / 8;
    constexpr u32 kKBytes = BM * QTile::kPitch, kVBytes = BM * VTile::kPitch;
    constexpr u32 kQBytes = BQ * QTile::kPitch, kGBytes = BQ * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const k_tile = shared;
    u8* const v_tile = k_tile + kKBytes;
    u8* const q_tiles = v_tile + kVBytes;
    u8* const g_tiles = q_tiles + 2 * kQBytes;

    __shared__ __align__(16) struct {
        const T *q, *dout;  // of the first query head
        Sequence sequence;
        int batch, head_kv, j0, rows_k;
        Interval all;  // queries that see all keys of the block
        const float* stats;
        int begin;
    } walk;
    __shared__ __align__(8) float numbers[2][2][BQ];  // per stage: lse in log2, delta
    static_assert(2 * BQ <= kBackwardThreads, "a number for each thread");
    int length = 0, steps = 0;  // tiles of queries, for one head and for all
    {
        const HeadTile own(args.tiles, args.section, args.pairs, args.heads / args.group);
        const int j0 = own.number * BM;  // with a causal mask, the first keys meet the most queries
        const int head_kv = own.head, batch = own.batch;
        const Sequence sequence = sequence_at(batch, args.lq, args.lkv, args.cu_q, args.cu_k, args.lengths);
        const int rows_k =
            args.cu_k == nullptr ? static_cast<int>(args.lkv) : args.cu_k[batch + 1] - args.cu_k[batch];  // used or not
        if (j0 >= rows_k) return;
        const Mask mask(sequence, args.left, args.right);
        const Interval any = mask.queries_any(j0, j0 + BM);
        const int begin = any.empty() ? 0 : any.first / BQ;
        if (!any.empty()) length = (any.end + BQ - 1) / BQ - begin;
        steps = length * static_cast<int>(args.group);
        if (threadIdx.x == 0) {
            const i64 head = head_kv * args.group;
            walk.q = args.q + batch * args.q_batch + static_cast<i64>(sequence.q_row) * args.q_row + head * args.q_head;
            walk.dout = args.dout + batch * args.dout_batch + static_cast<i64>(sequence.q_row) * args.dout_row +
                        head * args.dout_head;
            walk.stats = args.stats + batch * args.lse_batch + head * args.lse_head + sequence.q_row;
            walk.sequence = sequence;
            walk.all = args.kv_limit == nullptr ? mask.queries_all(j0, j0 + BM) : Interval{0, 0};
            walk.batch = batch, walk.head_kv = head_kv, walk.j0 = j0, walk.rows_k = rows_k, walk.begin = begin;
        }
        __syncthreads();
        if (steps > 0) {
            const i64 first = sequence.k_row + static_cast<i64>(j0);
            const T* const k = args.k + batch * args.k_batch + first * args.k_row + head_kv * args.k_head;
            const T* const v = args.v + batch * args.v_batch + first * args.v_row + head_kv * args.v_head;
            QTile::template fetch<BM, kBackwardThreads>(k_tile, k, args.k_row, sequence.keys - j0,
                                                        static_cast<int>(args.d_qk) / 8);
            VTile::template fetch<BM, kBackwardThreads>(v_tile, v, args.v_row, sequence.keys - j0,
                                                        static_cast<int>(args.d_v) / 8);
        }
    }
    auto fetch = [&](int step) {
        const int head = step / length, i0 = (walk.begin + step - head * length) * BQ, stage = step & 1;
        const int rows = walk.sequence.lq - i0;
        QTile::template fetch<BQ, kBackwardThreads>(q_tiles + stage * kQBytes,
                                                    walk.q + i0 * args.q_row + head * args.q_head, args.q_row, rows,
                                                    static_cast<int>(args.d_qk) / 8);
        VTile::template fetch<BQ, kBackwardThreads>(g_tiles + stage * kGBytes,
                                                    walk.dout + i0 * args.dout_row + head * args.dout_head,
                                                    args.dout_row, rows, static_cast<int>(args.d_v) / 8);
        const int thread = static_cast<int>(threadIdx.x), row = thread % BQ;
        if (thread < 2 * BQ) {
            const float* const from = walk.stats + head * args.lse_head + i0 + row + (thread < BQ ? 0 : args.count);
            ptx::cp_async_4_partial(ptx::shared_address(&numbers[stage][thread / BQ][row]), from, row < rows ? 4 : 0);
        }
        ptx::cp_async_commit();
    };
    if (steps > 0) fetch(0);
    const ScoreRule rule{args.scale_factor, args.softcap_inverse};
    const bool plain = args.bias == nullptr && rule.softcap() == 0.0f;

    float sums_k[kMakesK ? DQK / 8 : 1][4], sums_v[kMakesV ? DV / 8 : 1][4];
    clear_sums(sums_k);
    clear_sums(sums_v);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) fetch(step + 1);
        const u8* const q_tile = q_tiles + (step & 1) * kQBytes;
        const u8* const g_tile = g_tiles + (step & 1) * kGBytes;
#pragma unroll 1
        for (int query = 0; query < BQ; query += kPart) {
            const WarpRows mine(16);
            const int head = step / length;  // within the group
            const int i0 = (walk.begin + step - head * length) * BQ + query;
            float s[kQueryTiles][4], dp[kQueryTiles][4];
            clear_sums(s);
            clear_sums(dp);
            rows_by_rows<T, QTile, DQK / 16>(s, k_tile, mine.row, q_tile, query, mine.lane);
            if constexpr (kMakesK) rows_by_rows<T, VTile, DV / 16>(dp, v_tile, mine.row, g_tile, query, mine.lane);
            const int remaining = walk.sequence.lq - i0 - mine.lane % 4 * 2;  // queries from this lane's first one on
            const float* const of_queries = &numbers[step & 1][0][query + mine.lane % 4 * 2];
            const bool whole = walk.all.first <= i0 && i0 + kPart <= walk.all.end;
#pragma unroll
            for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int i = i0 + 8 * n + mine.lane % 4 * 2 + c, j = walk.j0 + mine.row + mine.lane / 4;
                    const float log_sum = of_queries[8 * n + c], delta = of_queries[BQ + 8 * n + c];
                    int first = 0, end = 16;  // valid keys of this warp, from j on
                    if (!whole) {
                        const i32* const limits =
                            args.kv_limit == nullptr ? nullptr : args.kv_limit + walk.batch * args.limit_batch;
                        const SeenKeys seen{Mask(walk.sequence, args.left, args.right), limits};
                        first = seen.lo(i) - j, end = 8 * n + c < remaining ? seen.hi(i) - j : 0;
                    }
                    if (plain) {
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            grad_of_product(s[n][2 * r + c], dp[n][2 * r + c], log_sum, delta, rule,
                                            8 * r >= first && 8 * r < end);
                    } else {
                        const i64 offset =
                            walk.batch * args.bias_batch + (walk.head_kv * args.group + head) * args.bias_head;
                        const BiasRows added(args.bias, args.bias_type, offset, args.bias_row, args.bias_column);
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            grad_of_score(s[n][2 * r + c], dp[n][2 * r + c], log_sum, delta, rule, added, i,
                                          j + 8 * r, 8 * r >= first && 8 * r < end);
                    }
                }
            const WarpRows after(16);
#pragma unroll
            for (int part = 0; part < kPart / 16; ++part) {
                u32 a[4];
                if constexpr (kMakesV) {
                    as_left<T>(a, s[2 * part], s[2 * part + 1]);
                    by_columns<T, VTile>(sums_v, a, g_tile, query + 16 * part, after.lane);
                }
                if constexpr (kMakesK) {
                    as_left<T>(a, dp[2 * part], dp[2 * part + 1]);
                    by_columns<T, QTile>(sums_k, a, q_tile, query + 16 * part, after.lane);
                }
            }
        }
    }
    const WarpRows mine(16);
    const i64 first_key = walk.sequence.k_row + static_cast<i64>(walk.j0);
    const int rows = walk.rows_k - walk.j0;
    if constexpr (kMakesK) {
        T* const dk = args.dk + walk.batch * args.dk_batch + first_key * args.dk_row + walk.head_kv * args.dk_head;
        store_rows<T>(dk, args.dk_row, sums_k, rule.scale(), mine.row, rows, static_cast<int>(args.d_qk), mine.lane);
    }
    if constexpr (kMakesV) {
        T* const dv = args.dv + walk.batch * args.dv_batch + first_key * args.dv_row + walk.head_kv * args.dv_head;
        store_rows<T>(dv, args.dv_row, sums_v, 1.0f, mine.row, rows, static_cast<int>(args.d_v), mine.lane);
    }
}

}  // namespace rtk
