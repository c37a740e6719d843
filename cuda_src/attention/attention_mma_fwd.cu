// Attention forward with mma.sync: out = softmax(scores) v for BM = 64 * MT queries of one head per block.
//
// Four warps own 16 * MT queries each, accumulate the output in registers and loop over tiles of BN keys. Q stays in
// shared memory; K and V have two stages each, with one barrier per tile: after it, copies of the next tile start into
// the stage that every warp has left. Keys past the last one are zero-filled, so whatever memory holds there does not
// matter. Tiles that are visible to every query of the block are not masked (masks.cuh). Products and sums are fp32, P
// is rounded to T.
//
// Grid: one block per tile of queries, head and sequence. Blocks are ordered so that a group of `section` heads
// finishes before the next group begins, because their K and V fit into L2 together; within a group, tiles with the
// most keys come first.
#include "attention/mma_tile.cuh"
#include "attention/mma_walk.cuh"
#include "attention/scores.cuh"

namespace rtk {

inline constexpr int kForwardThreads = 128;

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
    constexpr bool kTakesBias = MT * DV * BN < 2 * 128 * 64;  // enough registers for it
    constexpr u32 kQBytes = BM * QTile::kPitch, kKBytes = BN * QTile::kPitch, kVBytes = BN * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const k_tiles = shared + kQBytes;
    u8* const v_tiles = k_tiles + 2 * kKBytes;

    __shared__ __align__(16) struct {
        const T *k, *v;  // first keys and values of the sequence and head
        QueryBlock block;
    } walk;
    int begin, end;  // tiles of keys
    {
        const QueryBlock own = query_block<BM, BN>(tiles, section, pairs, heads, lq, lkv, cu_q, cu_k, lengths, left, right,
                                                   kv_limit != nullptr);
        if (!own.exists()) return;
        begin = own.begin, end = own.end;
        if (threadIdx.x == 0) {
            walk.k = k + own.first_key(k_batch, k_row, k_head, group);
            walk.v = v + own.first_key(v_batch, v_row, v_head, group);
            walk.block = own;
        }
        __syncthreads();
        if (begin < end)
            QTile::template fetch<BM, kForwardThreads>(q_tile, q + own.first_query(q_batch, q_row, q_head), q_row,
                                                       own.sequence.lq - own.i0, static_cast<int>(d_qk) / 8);
    }
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.block.sequence.keys - j0, stage = tile & 1;
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
        rows_by_rows<T, QTile, DQK / 16>(s, q_tile, qk.row, k_tile, 0, qk.lane);

        const int j0 = tile * BN;
        const bool whole = walk.block.sees_whole(j0, BN);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const WarpRows mine(16 * MT);
            const int i = walk.block.i0 + mine.row + 16 * m;
            if (!plain) {
                cap_scores(s[m], rule);
                if (kTakesBias && bias != nullptr) {
                    const i64 offset = walk.block.batch * bias_batch + walk.block.head * bias_head;
                    add_bias(s[m], BiasRows(bias, bias_type, offset, bias_row, bias_column),
                             Mask(walk.block.sequence, left, right), i, j0, mine.lane);
                }
            }
            if (!whole) {
                const i32* const limits = kv_limit == nullptr ? nullptr : kv_limit + walk.block.batch * limit_batch;
                mask_scores(s[m], SeenKeys{Mask(walk.block.sequence, left, right), limits}, i, j0, mine.lane);
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
            by_columns<T, VTile>(sums, a, v_tile, 16 * step, pv.lane);
        }
    }

    const WarpRows mine(16 * MT);
    const QueryBlock& own = walk.block;
    const int rows = own.sequence.lq - own.i0;
    const float sink = sinks == nullptr ? negative_infinity() : sinks[own.head] * kLog2e;
    out += own.first_query(out_batch, out_row, out_head);
    lse += own.first_query(lse_batch, 1, lse_head);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float times[2], logs[2];
        softmax[m].finish(rule.factor(), sink, times, logs);
        store_rows<T>(out, out_row, sums[m], times, mine.row + 16 * m, rows, static_cast<int>(d_v), mine.lane);
        store_logs(lse, logs, mine.row + 16 * m, rows, mine.lane);
    }
}

}  // namespace rtk
