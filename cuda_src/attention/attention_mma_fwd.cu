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

template <typename T>
struct ForwardArguments {
    const T *q, *k, *v;
    const float* sinks;
    const void* bias;
    const i32 *lengths, *kv_limit, *cu_q, *cu_k;
    T* out;
    float* lse;
    i64 pairs, heads, group, tiles, section, lq, lkv, d_qk, d_v, q_batch, q_row, q_head, k_batch, k_row, k_head,
        v_batch, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head, bias_type, bias_batch, bias_head,
        bias_row, bias_column, limit_batch, left, right, scale_factor, softcap_inverse;
};

// SUMS: bits of the products whose sums are fp16 (T is fp16): 1 of scores, 2 of each tile's values, which are then added
// in fp32.
template <typename T, int DQK, int DV, int MT, int BN, int SUMS>
__global__ void __launch_bounds__(kForwardThreads, 2)
    attention_mma_fwd(const __grid_constant__ ForwardArguments<T> args) {
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
        const QueryBlock own =
            query_block<BM, BN>(args.tiles, args.section, args.pairs, args.heads, args.lq, args.lkv, args.cu_q,
                                args.cu_k, args.lengths, args.left, args.right, args.kv_limit != nullptr);
        if (!own.exists()) return;
        begin = own.begin, end = own.end;
        if (threadIdx.x == 0) {
            walk.k = args.k + own.first_key(args.k_batch, args.k_row, args.k_head, args.group);
            walk.v = args.v + own.first_key(args.v_batch, args.v_row, args.v_head, args.group);
            walk.block = own;
        }
        __syncthreads();
        if (begin < end)
            QTile::template fetch<BM, kForwardThreads>(
                q_tile, args.q + own.first_query(args.q_batch, args.q_row, args.q_head), args.q_row,
                own.sequence.lq - own.i0, static_cast<int>(args.d_qk) / 8);
    }
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.block.sequence.keys - j0, stage = tile & 1;
        QTile::template fetch<BN, kForwardThreads>(k_tiles + stage * kKBytes, walk.k + j0 * args.k_row, args.k_row,
                                                   rows, static_cast<int>(args.d_qk) / 8);
        VTile::template fetch<BN, kForwardThreads>(v_tiles + stage * kVBytes, walk.v + j0 * args.v_row, args.v_row,
                                                   rows, static_cast<int>(args.d_v) / 8);
        ptx::cp_async_commit();
    };
    if (begin < end) fetch(begin);
    const ScoreRule rule{args.scale_factor, args.softcap_inverse};
    const bool plain = args.bias == nullptr && rule.softcap() == 0.0f;  // the products are the scores

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
        if constexpr ((SUMS & 1) != 0) {
            rows_by_rows_f16<QTile, DQK / 16>(s, q_tile, qk.row, k_tile, qk.lane);
        } else {
#pragma unroll
            for (int m = 0; m < MT; ++m) clear_sums(s[m]);
            rows_by_rows<T, QTile, DQK / 16>(s, q_tile, qk.row, k_tile, 0, qk.lane);
        }

        const int j0 = tile * BN;
        const bool whole = walk.block.sees_whole(j0, BN);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const WarpRows mine(16 * MT);
            const int i = walk.block.i0 + mine.row + 16 * m;
            if (!plain) {
                cap_scores(s[m], rule);
                if (kTakesBias && args.bias != nullptr) {
                    const i64 offset = walk.block.batch * args.bias_batch + walk.block.head * args.bias_head;
                    add_bias(s[m], BiasRows(args.bias, args.bias_type, offset, args.bias_row, args.bias_column),
                             Mask(walk.block.sequence, args.left, args.right), i, j0, mine.lane);
                }
            }
            if (!whole) {
                const i32* const limits =
                    args.kv_limit == nullptr ? nullptr : args.kv_limit + walk.block.batch * args.limit_batch;
                mask_scores(s[m], SeenKeys{Mask(walk.block.sequence, args.left, args.right), limits}, i, j0, mine.lane);
            }
            float correction[2];
            if (softmax[m].template add_lazily<(SUMS & 2) == 0>(s[m], rule.factor(), correction))
                scale_rows(sums[m], correction);
        }

        const WarpRows pv(16 * MT);
        if constexpr ((SUMS & 2) != 0) {
            u32 a[BN / 16][MT][4];
#pragma unroll
            for (int step = 0; step < BN / 16; ++step)
#pragma unroll
                for (int m = 0; m < MT; ++m) as_left<T>(a[step][m], s[m][2 * step], s[m][2 * step + 1]);
            by_columns_f16<VTile>(sums, a, v_tile, pv.lane);
        } else {
#pragma unroll
            for (int step = 0; step < BN / 16; ++step) {
                u32 a[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) as_left<T>(a[m], s[m][2 * step], s[m][2 * step + 1]);
                by_columns<T, VTile>(sums, a, v_tile, 16 * step, pv.lane);
            }
        }
    }

    const WarpRows mine(16 * MT);
    const QueryBlock& own = walk.block;
    const int rows = own.sequence.lq - own.i0;
    const float sink = args.sinks == nullptr ? negative_infinity() : args.sinks[own.head] * kLog2e;
    T* const out = args.out + own.first_query(args.out_batch, args.out_row, args.out_head);
    float* const lse = args.lse + own.first_query(args.lse_batch, 1, args.lse_head);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float times[2], logs[2];
        softmax[m].finish(rule.factor(), sink, times, logs);
        store_rows<T>(out, args.out_row, sums[m], times, mine.row + 16 * m, rows, static_cast<int>(args.d_v),
                      mine.lane);
        store_logs(lse, logs, mine.row + 16 * m, rows, mine.lane);
    }
}

}  // namespace rtk
