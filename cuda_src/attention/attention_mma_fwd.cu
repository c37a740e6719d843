// Attention forward by mma.sync: out = softmax(scores) v for BM = 64 * MT queries of one head per block.
//
// Four warps with 16 * MT queries each keep sums of the output in registers and walk over tiles of BN keys. Q stays in
// shared memory; K and V have two stages each, and one barrier per tile: behind it, the copies of the next tile start into
// the stage that everybody has left. Keys behind the last one are zeros, so what memory holds there does not matter.
// Tiles that every query of the block sees whole are not masked (masks.cuh). Products and sums are fp32, P is rounded to T.
//
// Grid: one block for each tile of queries, head and sequence. Blocks are numbered so that `section` heads, whose K and V
// stay in L2 together, are finished before the next ones begin, tiles with the longest walks first.
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"

namespace rtk {

inline constexpr int kForwardThreads = 128;

// What a block knows of its walk, in shared memory: registers are for sums.
template <typename T>
struct Walk {
    const T *k, *v;  // first keys and values of the sequence and head
    Sequence sequence;
    Interval all;  // keys that all queries of the block see
    int batch, head, i0;
};

template <typename T, int DQK, int DV, int MT, int BN>
__global__ void __launch_bounds__(kForwardThreads, 2)
    attention_mma_fwd(const T* q, const T* k, const T* v, const float* sinks, const void* bias, const i32* lengths,
                      const i32* kv_limit, const i32* cu_q, const i32* cu_k, T* out, float* lse, i64 pairs, i64 heads,
                      i64 group, i64 tiles, i64 section, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 q_batch, i64 q_row,
                      i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 out_batch,
                      i64 out_row, i64 out_head, i64 lse_batch, i64 lse_head, i64 bias_type, i64 bias_batch,
                      i64 bias_head, i64 bias_row, i64 bias_column, i64 limit_batch, i64 left, i64 right,
                      i64 scale_factor, i64 softcap_inverse) {
    using QTile = MmaTile<DQK>;
    using VTile = MmaTile<DV>;
    constexpr int BM = 64 * MT, kKeyTiles = BN / 8, kOutTiles = DV / 8;
    constexpr bool kTakesBias = MT * DV * BN < 2 * 128 * 64;  // there are registers for it
    constexpr u32 kQBytes = BM * QTile::kPitch, kKBytes = BN * QTile::kPitch, kVBytes = BN * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const k_tiles = shared + kQBytes;
    u8* const v_tiles = k_tiles + 2 * kKBytes;

    __shared__ __align__(16) Walk<T> walk;
    int begin = 0, end = 0;                                              // tiles of keys
    {
        const HeadTile own(tiles, section, pairs, heads);
        const int i0 = (static_cast<int>(tiles) - 1 - own.number) * BM, head = own.head, batch = own.batch;
        const Sequence sequence = sequence_at(batch, lq, lkv, cu_q, cu_k, lengths);
        if (i0 >= sequence.lq) return;
        const Mask mask(sequence, left, right);
        const Interval any = mask.keys_any(i0, i0 + BM);
        if (!any.empty()) begin = any.first / BN, end = (any.end + BN - 1) / BN;
        const int head_kv = head / static_cast<int>(group);
        if (threadIdx.x == 0) {
            walk.k = k + batch * k_batch + static_cast<i64>(sequence.k_row) * k_row + head_kv * k_head;
            walk.v = v + batch * v_batch + static_cast<i64>(sequence.k_row) * v_row + head_kv * v_head;
            walk.sequence = sequence;
            walk.batch = batch, walk.head = head, walk.i0 = i0;
            walk.all = kv_limit == nullptr ? mask.keys_all(i0, i0 + BM) : Interval{0, 0};
        }
        __syncthreads();
        if (begin < end) {
            q += batch * q_batch + (sequence.q_row + static_cast<i64>(i0)) * q_row + head * q_head;
            QTile::template fetch<BM, kForwardThreads>(q_tile, q, q_row, sequence.lq - i0, static_cast<int>(d_qk) / 8);
        }
    }
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.sequence.keys - j0, stage = tile & 1;
        QTile::template fetch<BN, kForwardThreads>(k_tiles + stage * kKBytes, walk.k + j0 * k_row, k_row, rows,
                                                   static_cast<int>(d_qk) / 8);
        VTile::template fetch<BN, kForwardThreads>(v_tiles + stage * kVBytes, walk.v + j0 * v_row, v_row, rows,
                                                   static_cast<int>(d_v) / 8);
        ptx::cp_async_commit();
    };
    if (begin < end) fetch(begin);
    const ScoreRule rule{scale_factor, softcap_inverse};
    const bool plain = bias == nullptr && rule.softcap() == 0.0f;  // the products are the scores

    float sums[MT][kOutTiles][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) clear_sums(sums[m]);
    LazySoftmax softmax[MT];

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const k_tile = k_tiles + (tile & 1) * kKBytes;
        const u8* const v_tile = v_tiles + (tile & 1) * kVBytes;

        float s[MT][kKeyTiles][4];
        const WarpRows qk(16 * MT);
#pragma unroll
        for (int m = 0; m < MT; ++m) clear_sums(s[m]);
#pragma unroll
        for (int step = 0; step < DQK / 16; ++step) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) QTile::left(a[m], q_tile, qk.row + 16 * m, step, qk.lane);
#pragma unroll
            for (int n = 0; n < kKeyTiles / 2; ++n) {
                u32 b[4];
                QTile::right(b, k_tile, 16 * n, step, qk.lane);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_step<T>(s[m][2 * n], a[m], b[0], b[1]);
                    mma_step<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        const int j0 = tile * BN;
        const bool whole = walk.all.first <= j0 && j0 + BN <= walk.all.end;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const WarpRows mine(16 * MT);
            const int i = walk.i0 + mine.row + 16 * m;
            if (!plain) {
                cap_scores(s[m], rule);
                if (kTakesBias && bias != nullptr) {
                    const i64 offset = walk.batch * bias_batch + walk.head * bias_head;
                    add_bias(s[m], BiasRows(bias, bias_type, offset, bias_row, bias_column),
                             Mask(walk.sequence, left, right), i, j0, mine.lane);
                }
            }
            if (!whole) {
                const i32* const limits = kv_limit == nullptr ? nullptr : kv_limit + walk.batch * limit_batch;
                mask_scores(s[m], SeenKeys{Mask(walk.sequence, left, right), limits}, i, j0, mine.lane);
            }
            float correction[2];
            if (softmax[m].add_lazily(s[m], rule.factor(), correction)) scale_rows(sums[m], correction);
        }

        const WarpRows pv(16 * MT);
#pragma unroll
        for (int step = 0; step < BN / 16; ++step) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) as_left<T>(a[m], s[m][2 * step], s[m][2 * step + 1]);
#pragma unroll
            for (int n = 0; n < kOutTiles / 2; ++n) {
                u32 b[4];
                VTile::right_transposed(b, v_tile, 16 * step, n, pv.lane);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_step<T>(sums[m][2 * n], a[m], b[0], b[1]);
                    mma_step<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    const WarpRows mine(16 * MT);
    const float sink = sinks == nullptr ? negative_infinity() : sinks[walk.head] * kLog2e;
    out += walk.batch * out_batch + static_cast<i64>(walk.sequence.q_row) * out_row + walk.head * out_head;
    lse += walk.batch * lse_batch + walk.head * lse_head + walk.sequence.q_row;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float times[2], logs[2];
        softmax[m].finish(rule.factor(), sink, times, logs);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = walk.i0 + mine.row + 16 * m + mine.lane / 4 + 8 * r;
            if (i >= walk.sequence.lq) continue;
            T* const to = out + i * out_row;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const int column = 8 * n + mine.lane % 4 * 2;
                const float pair_of[2] = {sums[m][n][2 * r] * times[r], sums[m][n][2 * r + 1] * times[r]};
                if (column < d_v) store<T, 2>(to + column, pair_of);
            }
            if (mine.lane % 4 == 0) lse[i] = logs[r];
        }
    }
}

}  // namespace rtk
