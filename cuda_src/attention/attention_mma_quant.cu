// Attention forward by mma.sync with 8-bit queries and keys, and values of 16 or 8 bits: out = softmax(scores) v for 128 queries of
// one head per block (64 unless there are int8 keys and 16-bit values), as attention_mma_fwd does it. Codes are multiplied as they are; with a scale per row of q and k
// (or per block of rows),
//   score[i, j] = scale * scale_q[i] * scale_k[j] * (q[i] . k[j])
//
// QK: int8 (sums are exact) or e4m3. PV: 16-bit values [keys, d_v] as T; or codes, transposed: rows of keys, [d_v, keys], with scales
// per column and block of 64 keys. Powers are then codes too, 255 (u8) or 448 (e4m3) for the largest one of a row so far; each
// tile's product has fresh sums, which are scaled and added in fp32. Sums of powers are those of the rounded u8 codes.
//
// So that scores become a left operand of 8 bits without an exchange, columns of a score tile are keys in another order (KeyOrder):
// rows of a tile of keys are fetched in that order. The sums over a row do not depend on it.
//
// Tiles, stages and the grid are those of attention_mma_fwd.cu: four warps of 32 (16) queries, 64 keys, two stages.
#include "attention/grads.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"

namespace rtk {

inline constexpr int kQuantThreads = 128, kQuantKeys = 64;
inline constexpr int kInt8 = 0, kE4m3 = 1;                         // of q and k
inline constexpr int kValues16 = 0, kValuesE4m3 = 1, kValuesInt8 = 2;

// Which key of a tile is column 8n + 2t + c of the scores, and which one lies in a row of the tile in shared memory.
template <bool CODES>
struct KeyOrder {
    RTK_DEVICE static int of_score(int n, int t, int c) { return CODES ? n / 2 * 16 + 4 * t + n % 2 * 2 + c : 8 * n + 2 * t + c; }
    RTK_DEVICE static int of_row(int row) {
        return CODES ? (row & ~15) + (row % 8 / 2) * 4 + row % 2 + (row / 8 % 2) * 2 : row;
    }
};

template <int QK>
struct ScoreSum {
    using type = i32;
};
template <>
struct ScoreSum<kE4m3> {
    using type = float;
};

RTK_DEVICE void mma_codes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    ptx::mma_m16n8k32_s8(d, a, b);
}
#if RTK_HAS_FP8_CVT
RTK_DEVICE void mma_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    ptx::mma_m16n8k32_e4m3(d, a, b);
}
#endif
RTK_DEVICE void mma_powers(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    ptx::mma_m16n8k32_u8_s8(d, a, b);
}

// Scores (in log2) of a tile become powers, the largest so far of each row counting 2^code_log2; correction[r] is for what was
// summed before. Unlike LazySoftmax, no power is larger: codes would saturate.
template <bool ROUNDED, int N>
RTK_DEVICE void add_coded(SoftmaxState& state, float (&s)[N][4], float code_log2, float (&correction)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < N; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        const float now = fmaxf(state.top[r], quad_max(largest));
        const float from = now == negative_infinity() ? 0.0f : now;
        correction[r] = ptx::ex2(state.top[r] - from);
        state.top[r] = now;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& value = s[n][2 * r + c];
                value = ptx::ex2(value - from + code_log2);
                if constexpr (ROUNDED) value = rintf(value);
                part += value;
            }
        state.sum[r] = state.sum[r] * correction[r] + part;
    }
}

// Four powers as codes.
template <int PV>
RTK_DEVICE u32 four_codes(float a, float b, float c, float d) {
    if constexpr (PV == kValuesE4m3) {
        return to_fp8x2<e4m3>(a, b) | to_fp8x2<e4m3>(c, d) << 16;
    } else {
        return static_cast<u32>(__float2int_rn(a)) | static_cast<u32>(__float2int_rn(b)) << 8 |
               static_cast<u32>(__float2int_rn(c)) << 16 | static_cast<u32>(__float2int_rn(d)) << 24;
    }
}

template <typename T, int QK, int PV, int D>
__global__ void __launch_bounds__(kQuantThreads, (QK == kInt8 && PV == kValues16) || D > 64 ? 2 : 3)
    attention_mma_quant(const u8* q, const u8* k, const u8* v, const float* scale_q, const float* scale_k, const float* scale_v,
                        const i32* lengths, const i32* cu_q, const i32* cu_k, T* out, float* lse, i64 pairs, i64 heads,
                        i64 group, i64 tiles, i64 section, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 q_batch, i64 q_row,
                        i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 out_batch,
                        i64 out_row, i64 out_head, i64 lse_batch, i64 lse_head, i64 sq_batch, i64 sq_head, i64 sq_shift,
                        i64 sk_batch, i64 sk_head, i64 sk_shift, i64 sv_batch, i64 sv_head, i64 sv_block, i64 left,
                        i64 right, double scale) {
    constexpr bool kCodes = PV != kValues16;
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
        Sequence sequence;
        Interval all;  // keys that all queries of the block see
        int batch, head, i0;
    } walk;
    __shared__ float row_factors[BM];
    int begin = 0, end = 0;  // tiles of keys
    {
        const HeadTile own(tiles, section, pairs, heads);
        const int i0 = (static_cast<int>(tiles) - 1 - own.number) * BM, head = own.head, batch = own.batch;
        const Sequence sequence = sequence_at(batch, lq, lkv, cu_q, cu_k, lengths);
        if (i0 >= sequence.lq) return;
        const Mask mask(sequence, left, right);
        const Interval any = mask.keys_any(i0, i0 + BM);
        if (!any.empty()) begin = any.first / BN, end = (any.end + BN - 1) / BN;
        if (threadIdx.x == 0) {
            const i64 head_kv = head / static_cast<int>(group);
            walk.k = k + batch * k_batch + static_cast<i64>(sequence.k_row) * k_row + head_kv * k_head;
            // 16-bit values have strides in elements, and rows of packed sequences; codes have one sequence after the other.
            walk.v = kCodes ? v + batch * v_batch + head_kv * v_head
                            : v + 2 * (batch * v_batch + static_cast<i64>(sequence.k_row) * v_row + head_kv * v_head);
            walk.scale_k = scale_k + batch * sk_batch + head_kv * sk_head + sequence.k_row;
            walk.scale_v = scale_v + batch * sv_batch + head_kv * sv_head;
            walk.sequence = sequence;
            walk.batch = batch, walk.head = head, walk.i0 = i0;
            walk.all = mask.keys_all(i0, i0 + BM);
        }
        __syncthreads();
        if (begin < end) {
            q += batch * q_batch + (sequence.q_row + static_cast<i64>(i0)) * q_row + head * q_head;
            QTile::template fetch<BM, kQuantThreads>(q_tile, reinterpret_cast<const u16*>(q), q_row / 2, sequence.lq - i0,
                                                     static_cast<int>(d_qk) / 16);
        }
        const int i = i0 + static_cast<int>(threadIdx.x);
        scale_q += batch * sq_batch + head * sq_head + sequence.q_row;
        if (threadIdx.x < BM)  // read behind the barrier of the first tile
            row_factors[threadIdx.x] = i < sequence.lq ? scale_q[i >> sq_shift] * (static_cast<float>(scale) * kLog2e) : 0.0f;
    }
    auto fetch = [&](int tile) {
        const int j0 = tile * BN, rows = walk.sequence.keys - j0, stage = tile & 1;
        const int thread = static_cast<int>(this_thread());
        {
            constexpr int kVectors = QTile::kVectors, kStep = kQuantThreads / kVectors;
            const int row = thread / kVectors, vector = thread % kVectors;
            const ptx::SharedAddress to = ptx::shared_address(k_tiles + stage * kKBytes);
            const bool exists = vector < static_cast<int>(d_qk) / 16;
#pragma unroll
            for (int i = 0; i < BN; i += kStep) {
                const int key = Order::of_row(row + i);
                ptx::cp_async_16_or_zero(to + QTile::offset(row + i, vector), walk.k + (j0 + key) * k_row + vector * 16,
                                         exists && key < rows);
            }
        }
        u8* const v_tile = v_tiles + stage * kVBytes;
        if constexpr (kCodes) {
            VTile::template fetch<D, kQuantThreads>(v_tile, reinterpret_cast<const u16*>(walk.v + j0), v_row / 2,
                                                    static_cast<int>(d_v), (min(rows, BN) + 15) / 16);
            if (thread < D)
                ptx::cp_async_4_or_zero(ptx::shared_address(&value_scales[stage][thread]),
                                        walk.scale_v + tile * sv_block + thread, thread < d_v);
        } else {
            VTile::template fetch<BN, kQuantThreads>(v_tile, reinterpret_cast<const u16*>(walk.v) + j0 * v_row, v_row, rows,
                                                     static_cast<int>(d_v) / 8);
        }
        if (thread < BN)
            ptx::cp_async_4_or_zero(ptx::shared_address(&key_scales[stage][thread]),
                                    walk.scale_k + ((j0 + thread) >> sk_shift), thread < rows);
        ptx::cp_async_commit();
    };
    if (begin < end) fetch(begin);

    float sums[MT][kOutTiles][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) clear_sums(sums[m]);
    LazySoftmax softmax[MT];
    constexpr float kCode = PV == kValuesE4m3 ? 448.0f : 255.0f;
    constexpr float kCodeLog2 = PV == kValuesE4m3 ? 8.807354922057604f : 7.994353436858858f;

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const k_tile = k_tiles + (tile & 1) * kKBytes;
        const u8* const v_tile = v_tiles + (tile & 1) * kVBytes;

        typename ScoreSum<QK>::type products[MT][kKeyTiles][4];
        const WarpRows qk(16 * MT);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) products[m][n][e] = 0;
#pragma unroll
        for (int step = 0; step < D / 32; ++step) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) QTile::left(a[m], q_tile, qk.row + 16 * m, step, qk.lane);
#pragma unroll
            for (int n = 0; n < kKeyTiles / 2; ++n) {
                u32 b[4];
                QTile::right(b, k_tile, 16 * n, step, qk.lane);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_codes(products[m][2 * n], a[m], b[0], b[1]);
                    mma_codes(products[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        const int j0 = tile * BN;
        const bool whole = walk.all.first <= j0 && j0 + BN <= walk.all.end;
        u32 p[MT][BN / (kCodes ? 32 : 16)][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const WarpRows mine(16 * MT);
            const int t = mine.lane % 4;
            float s[kKeyTiles][4];
            const float* const factors = row_factors + mine.row + 16 * m + mine.lane / 4;
            const float row_factor[2] = {factors[0], factors[8]};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                const float2 by = *reinterpret_cast<const float2*>(&key_scales[tile & 1][Order::of_score(n, t, 0)]);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[n][e] = static_cast<float>(products[m][n][e]) * row_factor[e / 2] * (e % 2 == 0 ? by.x : by.y);
            }
            if (!whole) {
                const Mask mask(walk.sequence, left, right);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = walk.i0 + mine.row + 16 * m + mine.lane / 4 + 8 * r;
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
                add_coded<PV == kValuesInt8>(softmax[m], s, kCodeLog2, correction);
#pragma unroll
                for (int step = 0; step < BN / 32; ++step)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int n = 4 * step + i / 2 * 2, r = i % 2;
                        p[m][step][i] =
                            four_codes<PV>(s[n][2 * r], s[n][2 * r + 1], s[n + 1][2 * r], s[n + 1][2 * r + 1]);
                    }
            } else {
                rescale = softmax[m].add_lazily(s, 1.0f, correction);
#pragma unroll
                for (int step = 0; step < BN / 16; ++step) as_left<T>(p[m][step], s[2 * step], s[2 * step + 1]);
            }
            if (rescale) scale_rows(sums[m], correction);
        }

        const WarpRows pv(16 * MT);
        if constexpr (kCodes) {
#pragma unroll
            for (int n = 0; n < kOutTiles / 2; ++n) {
                using Part = typename ScoreSum<PV == kValuesE4m3 ? kE4m3 : kInt8>::type;
                Part part[MT][2][4];
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int e = 0; e < 4; ++e) part[m][h][e] = 0;
#pragma unroll
                for (int step = 0; step < BN / 32; ++step) {
                    u32 b[4];
                    VTile::right(b, v_tile, 16 * n, step, pv.lane);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            if constexpr (PV == kValuesE4m3) {
                                mma_codes(part[m][h], p[m][step], b[2 * h], b[2 * h + 1]);
                            } else {
                                mma_powers(part[m][h], p[m][step], b[2 * h], b[2 * h + 1]);
                            }
                        }
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
            for (int step = 0; step < BN / 16; ++step)
#pragma unroll
                for (int n = 0; n < kOutTiles / 2; ++n) {
                    u32 b[4];
                    VTile::right_transposed(b, v_tile, 16 * step, n, pv.lane);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        mma_step<T>(sums[m][2 * n], p[m][step], b[0], b[1]);
                        mma_step<T>(sums[m][2 * n + 1], p[m][step], b[2], b[3]);
                    }
                }
        }
    }

    const WarpRows mine(16 * MT);
    out += walk.batch * out_batch + (walk.sequence.q_row + static_cast<i64>(walk.i0)) * out_row + walk.head * out_head;
    lse += walk.batch * lse_batch + walk.head * lse_head + walk.sequence.q_row;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float times[2], logs[2];
        softmax[m].finish(1.0f, negative_infinity(), times, logs);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = mine.row + 16 * m + mine.lane / 4 + 8 * r;
            if (walk.i0 + row >= walk.sequence.lq) continue;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const int column = 8 * n + mine.lane % 4 * 2;
                const float pair_of[2] = {sums[m][n][2 * r] * times[r], sums[m][n][2 * r + 1] * times[r]};
                if (column < d_v) store<T, 2>(out + row * out_row + column, pair_of);
            }
            if (mine.lane % 4 == 0) lse[walk.i0 + row] = logs[r] - (kCodes ? logf(kCode) : 0.0f);
        }
    }
}

}  // namespace rtk
