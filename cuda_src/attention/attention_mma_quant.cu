// Attention forward with mma.sync, 8-bit queries and keys, and 16-bit or 8-bit values: out = softmax(scores) v for 128
// queries of one head per block (64 unless keys are int8 and values 16-bit), structured like attention_mma_fwd.cu.
// Codes are multiplied as they are; with one scale per row of q and k (or per block of rows),
//   score[i, j] = scale * scale_q[i] * scale_k[j] * (q[i] . k[j])
//
// QK: int8 (exact sums) or e4m3; or e4m3 with an e8m0 scale for 32 elements of a row (MX), by which the product of these
// 32 is multiplied before it is added, in fp32: score[i, j] = scale * sum over b of scale_q[i, b] scale_k[j, b] (q . k)_b.
// PV: 16-bit values [keys, d_v] as T, or transposed codes [d_v, keys] with one scale per
// column and block of 64 keys. In the second case the softmax probabilities are quantised as well: the largest one of a
// row so far is 255 (u8) or 448 (e4m3). Each tile's product then starts from zero and is scaled and added in fp32. The
// softmax denominator sums the rounded u8 codes.
//
// The columns of a score tile are keys in a permuted order (KeyOrder), so that scores become an 8-bit left operand
// without shuffles: the rows of a key tile are loaded in that order. Sums over a row do not depend on it.
//
// Tiles, stages and grid are those of attention_mma_fwd.cu: four warps of 32 (or 16) queries, 64 keys, two stages.
#include "attention/coded_softmax.cuh"
#include "attention/mma_tile.cuh"
#include "attention/mma_walk.cuh"
#include "common/block_formats.cuh"

namespace rtk {

inline constexpr int kQuantThreads = 128;
inline constexpr int kQuantKeys = 64;

// Maps column 8n + 2t + c of the scores to its key of the tile, and a row of the tile in shared memory to its key.
template <bool CODES>
struct KeyOrder {
    RTK_DEVICE static int of_score(int n, int t, int c) { return CODES ? n / 2 * 16 + 4 * t + n % 2 * 2 + c : 8 * n + 2 * t + c; }
    RTK_DEVICE static int of_row(int row) {
        return CODES ? (row & ~15) + (row % 8 / 2) * 4 + row % 2 + (row / 8 % 2) * 2 : row;
    }
};

// Operands and accumulators of the two products.
template <int QK>
struct ScoreProduct {
    using Operand = CodesS8;
    using Sum = i32;
};
template <>
struct ScoreProduct<kE4m3> {
    using Operand = e4m3;
    using Sum = float;
};
template <>
struct ScoreProduct<kMxE4m3> : ScoreProduct<kE4m3> {};
template <int PV>
struct ValueProduct {
    using Operand = CodesU8S8;
    using Sum = i32;
};
template <>
struct ValueProduct<kValuesE4m3> : ScoreProduct<kE4m3> {};

struct QuantArguments {
    const u8 *q, *k, *v;
    const float *scale_q, *scale_k, *scale_v;
    const i32 *lengths, *cu_q, *cu_k;
    void* out;
    float* lse;
    i64 pairs, heads, group, tiles, section, lq, lkv, d_qk, d_v, q_batch, q_row, q_head, k_batch, k_row, k_head,
        v_batch, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head, sq_batch, sq_head, sq_shift,
        sk_batch, sk_head, sk_shift, sv_batch, sv_head, sv_block, left, right, out_fp16;
    double scale;
};

template <typename T, int QK, int PV, int D>
__global__ void __launch_bounds__(kQuantThreads, (QK == kInt8 && PV == kValues16) || D > 64 ? 2 : 3)
    attention_mma_quant(const __grid_constant__ QuantArguments args) {
    constexpr bool kCodes = PV != kValues16, kMx = QK == kMxE4m3;
    constexpr int kParts = D / 32;  // scales of a row, of MX
    constexpr int MT = QK == kInt8 && !kCodes ? 2 : 1, BM = 64 * MT, BN = kQuantKeys, kKeyTiles = BN / 8, kOutTiles = D / 8;
    using QTile = MmaTile<D / 2>;                    // two codes in the place of a 16-bit element
    using VTile = MmaTile<kCodes ? BN / 2 : D>;      // codes: D rows of BN keys
    using Order = KeyOrder<kCodes>;
    constexpr u32 kQBytes = BM * QTile::kPitch, kKBytes = BN * QTile::kPitch, kVBytes = (kCodes ? D : BN) * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const k_tiles = shared + kQBytes;
    u8* const v_tiles = k_tiles + 2 * kKBytes;
    __shared__ __align__(16) float key_scales[2][BN];
    __shared__ __align__(16) float value_scales[2][kCodes ? D : 4];
    __shared__ __align__(16) struct {
        const u8 *k, *v;
        const float *scale_k, *scale_v;
        QueryBlock block;
    } walk;
    __shared__ float row_factors[kMx ? kParts : 1][BM];
    __shared__ __align__(16) float part_scales[2][kMx ? kParts : 1][kMx ? BN : 4];
    const int parts = kMx ? static_cast<int>(args.d_qk) / 32 : 1;
    int begin, end;  // tiles of keys
    {
        const QueryBlock own = query_block<BM, BN>(args.tiles, args.section, args.pairs, args.heads, args.lq, args.lkv,
                                                   args.cu_q, args.cu_k, args.lengths, args.left, args.right, false);
        if (!own.exists()) return;
        begin = own.begin, end = own.end;
        if (threadIdx.x == 0) {
            // 16-bit values have strides in elements, and rows of packed sequences; codes are stored sequence by
            // sequence.
            const i64 head_kv = own.head / static_cast<int>(args.group);
            walk.k = args.k + own.first_key(args.k_batch, args.k_row, args.k_head, args.group);
            walk.v = args.v + (kCodes ? own.batch * args.v_batch + head_kv * args.v_head
                                      : 2 * own.first_key(args.v_batch, args.v_row, args.v_head, args.group));
            const i64 first_scale = own.first_key(args.sk_batch, parts, args.sk_head, args.group);
            walk.scale_k = kMx ? reinterpret_cast<const float*>(reinterpret_cast<const u8*>(args.scale_k) + first_scale)
                               : args.scale_k + first_scale;
            walk.scale_v = args.scale_v + own.batch * args.sv_batch + head_kv * args.sv_head;
            walk.block = own;
        }
        __syncthreads();
        if (begin < end) {
            const u8* const q = args.q + own.first_query(args.q_batch, args.q_row, args.q_head);
            QTile::template fetch<BM, kQuantThreads>(q_tile, reinterpret_cast<const u16*>(q), args.q_row / 2,
                                                     own.sequence.lq - own.i0, static_cast<int>(args.d_qk) / 16);
        }
        const int i = own.i0 + static_cast<int>(threadIdx.x);
        const i64 first_scale = own.batch * args.sq_batch + own.head * args.sq_head + own.sequence.q_row * parts;
        const float factor = static_cast<float>(args.scale) * kLog2e;
        if (threadIdx.x < BM) {  // read after the barrier of the first tile
            if constexpr (kMx) {
                const u8* const bytes = reinterpret_cast<const u8*>(args.scale_q) + first_scale + i64{i} * parts;
#pragma unroll
                for (int b = 0; b < kParts; ++b)
                    row_factors[b][threadIdx.x] = i < own.sequence.lq && b < parts ? e8m0_value(bytes[b]) : 0.0f;
            } else {
                const float* const scale_q = args.scale_q + first_scale;
                row_factors[0][threadIdx.x] = i < own.sequence.lq ? scale_q[i >> args.sq_shift] * factor : 0.0f;
            }
        }
    }
    u32 coming = 0;  // of MX: the scales of this thread's key in the tile that is being loaded
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.block.sequence.keys - j0, stage = tile & 1;
        const int thread = static_cast<int>(this_thread());
        {
            constexpr int kVectors = QTile::kVectors, kStep = kQuantThreads / kVectors;
            const int row = thread / kVectors, vector = thread % kVectors;
            const ptx::SharedAddress to = ptx::shared_address(k_tiles + stage * kKBytes);
            const bool exists = vector < static_cast<int>(args.d_qk) / 16;
#pragma unroll
            for (int i = 0; i < BN; i += kStep) {
                const int key = Order::of_row(row + i);
                ptx::cp_async_16_or_zero(to + QTile::offset(row + i, vector),
                                         walk.k + (j0 + key) * args.k_row + vector * 16, exists && key < rows);
            }
        }
        u8* const v_tile = v_tiles + stage * kVBytes;
        if constexpr (kCodes) {
            VTile::template fetch<D, kQuantThreads>(v_tile, reinterpret_cast<const u16*>(walk.v + j0), args.v_row / 2,
                                                    static_cast<int>(args.d_v), (min(rows, BN) + 15) / 16);
            if (thread < D)
                ptx::cp_async_4_or_zero(ptx::shared_address(&value_scales[stage][thread]),
                                        walk.scale_v + tile * args.sv_block + thread, thread < args.d_v);
        } else {
            VTile::template fetch<BN, kQuantThreads>(v_tile, reinterpret_cast<const u16*>(walk.v) + j0 * args.v_row,
                                                     args.v_row, rows, static_cast<int>(args.d_v) / 8);
        }
        if constexpr (kMx) {
            coming = 0;
            if (thread < BN && thread < rows) {
                const u8* const bytes = reinterpret_cast<const u8*>(walk.scale_k) + i64{j0 + thread} * parts;
#pragma unroll
                for (int b = 0; b < kParts; ++b)
                    if (b < parts) coming |= static_cast<u32>(bytes[b]) << (8 * b);
            }
        } else if (thread < BN) {
            ptx::cp_async_4_or_zero(ptx::shared_address(&key_scales[stage][thread]),
                                    walk.scale_k + ((j0 + thread) >> args.sk_shift), thread < rows);
        }
        ptx::cp_async_commit();
    };
    if (begin < end) fetch(begin);

    float sums[MT][kOutTiles][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) clear_sums(sums[m]);
    LazySoftmax softmax[MT];
    using Codes = ProbabilityCodes<PV>;

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        if constexpr (kMx) {  // nobody reads this stage since the barrier of the tile before
            if (threadIdx.x < BN)
#pragma unroll
                for (int b = 0; b < kParts; ++b)
                    part_scales[tile & 1][b][threadIdx.x] = e8m0_value(coming >> (8 * b) & 0xffu);
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const k_tile = k_tiles + (tile & 1) * kKBytes;
        const u8* const v_tile = v_tiles + (tile & 1) * kVBytes;

        typename ScoreProduct<QK>::Sum products[MT][kKeyTiles][4];
        const WarpRows qk(16 * MT);
#pragma unroll
        for (int m = 0; m < MT; ++m) clear_sums(products[m]);
        if constexpr (kMx) {
#pragma unroll
            for (int b = 0; b < kParts; ++b) {
                u32 left[4];
                QTile::left(left, q_tile, qk.row, b, qk.lane);
                const float* const factors = row_factors[b] + qk.row + qk.lane / 4;
                const float of_row[2] = {factors[0], factors[8]};
#pragma unroll
                for (int n = 0; n < kKeyTiles / 2; ++n) {
                    u32 right[4];
                    QTile::right(right, k_tile, 16 * n, b, qk.lane);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                        mma_step<e4m3>(part, left, right[2 * h], right[2 * h + 1]);
                        const float2 by =
                            *reinterpret_cast<const float2*>(&part_scales[tile & 1][b][16 * n + 8 * h + qk.lane % 4 * 2]);
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            products[0][2 * n + h][e] += part[e] * of_row[e / 2] * (e % 2 == 0 ? by.x : by.y);
                    }
                }
            }
        } else {
            rows_by_rows<typename ScoreProduct<QK>::Operand, QTile, D / 32>(products, q_tile, qk.row, k_tile, 0, qk.lane);
        }

        const int j0 = tile * BN;
        const bool whole = walk.block.sees_whole(j0, BN);
        u32 p[BN / (kCodes ? 32 : 16)][MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const WarpRows mine(16 * MT);
            const int t = mine.lane % 4;
            float s[kKeyTiles][4];
            const float* const factors = row_factors[0] + mine.row + 16 * m + mine.lane / 4;
            const float whole_factor = static_cast<float>(args.scale) * kLog2e;
            const float row_factor[2] = {kMx ? whole_factor : factors[0], kMx ? whole_factor : factors[8]};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                const float2 by = kMx ? float2{1.0f, 1.0f} : *reinterpret_cast<const float2*>(&key_scales[tile & 1][Order::of_score(n, t, 0)]);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[n][e] = static_cast<float>(products[m][n][e]) * row_factor[e / 2] * (e % 2 == 0 ? by.x : by.y);
            }
            if (!whole) {
                const Mask mask(walk.block.sequence, args.left, args.right);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = walk.block.i0 + mine.row + 16 * m + mine.lane / 4 + 8 * r;
                    const int first = mask.lo(i) - j0, last = mask.hi(i) - j0;
#pragma unroll
                    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            const int key = Order::of_score(n, t, c);
                            if (key < first || key >= last) s[n][2 * r + c] = negative_infinity();
                        }
                }
            }
            float correction[2];
            bool rescale = true;
            if constexpr (kCodes) {
                const float one[2] = {1.0f, 1.0f};  // scores are in log2
                Codes::add(softmax[m], reinterpret_cast<float(&)[4 * kKeyTiles]>(s), one, correction);
#pragma unroll
                for (int step = 0; step < BN / 32; ++step)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int n = 4 * step + i / 2 * 2, r = i % 2;
                        p[step][m][i] =
                            Codes::pack(s[n][2 * r], s[n][2 * r + 1], s[n + 1][2 * r], s[n + 1][2 * r + 1]);
                    }
            } else {
                rescale = softmax[m].add_lazily(s, 1.0f, correction);
#pragma unroll
                for (int step = 0; step < BN / 16; ++step) as_left<T>(p[step][m], s[2 * step], s[2 * step + 1]);
            }
            if (rescale) scale_rows(sums[m], correction);
        }

        const WarpRows pv(16 * MT);
        if constexpr (kCodes) {
#pragma unroll
            for (int n = 0; n < kOutTiles / 2; ++n) {
                using Product = ValueProduct<PV>;
                typename Product::Sum part[MT][2][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) clear_sums(part[m]);
#pragma unroll
                for (int step = 0; step < BN / 32; ++step) {
                    u32 b[4];
                    VTile::right(b, v_tile, 16 * n, step, pv.lane);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            mma_step<typename Product::Operand>(part[m][h], p[step][m], b[2 * h], b[2 * h + 1]);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 by =
                        *reinterpret_cast<const float2*>(&value_scales[tile & 1][16 * n + 8 * h + pv.lane % 4 * 2]);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            sums[m][2 * n + h][e] += static_cast<float>(part[m][h][e]) * (e % 2 == 0 ? by.x : by.y);
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < BN / 16; ++step) by_columns<T, VTile>(sums, p[step], v_tile, 16 * step, pv.lane);
        }
    }

    const WarpRows mine(16 * MT);
    const QueryBlock& own = walk.block;
    const int rows = own.sequence.lq - own.i0;
    const i64 first_out = own.first_query(args.out_batch, args.out_row, args.out_head);
    float* const lse = args.lse + own.first_query(args.lse_batch, 1, args.lse_head);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float times[2], logs[2];
        softmax[m].finish(1.0f, negative_infinity(), times, logs);
        if constexpr (kCodes) {
#pragma unroll
            for (int r = 0; r < 2; ++r) logs[r] -= logf(Codes::kLargest);
        }
        if (kCodes && args.out_fp16 != 0) {
            store_rows(static_cast<fp16*>(args.out) + first_out, args.out_row, sums[m], times, mine.row + 16 * m, rows,
                       static_cast<int>(args.d_v), mine.lane);
        } else {
            store_rows(static_cast<T*>(args.out) + first_out, args.out_row, sums[m], times, mine.row + 16 * m, rows,
                       static_cast<int>(args.d_v), mine.lane);
        }
        store_logs(lse, logs, mine.row + 16 * m, rows, mine.lane);
    }
}

}  // namespace rtk
