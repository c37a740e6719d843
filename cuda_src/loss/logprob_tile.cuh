// Statistics of a tile of logits in the accumulators of a warpgroup (layout: ptx/wgmma.cuh): 64 rows of COLS columns, a
// row in four neighbouring lanes, two rows per thread. The parts are those of logprob.cuh.
#pragma once
#include "loss/logprob.cuh"

namespace rtk {

// Where the id of a row is relative to a tile: in [0, COLS), COLS if behind it, -1 if before it or ignored.
template <int COLS>
RTK_DEVICE int place_in_tile(const Ids& all, i64 row, i64 first) {
    const i64 id = all.load(row), local = id - first;
    if (id == all.ignore_index || local < 0) return -1;
    return static_cast<int>(local < COLS ? local : COLS);
}

// Over the four lanes of a row; every lane gets the result.
RTK_DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
RTK_DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The logits of a thread: as the tensor cores summed them, or rounded to T, packed in pairs.
template <typename T, bool ROUND, int COLS>
struct TileLogits {
    static constexpr int kPairs = COLS / 8;
    u32 packed[2][ROUND ? kPairs : 1];
    const float (&sums)[COLS / 2];

    RTK_DEVICE explicit TileLogits(const float (&all)[COLS / 2]) : sums(all) {
        if constexpr (ROUND) {
#pragma unroll
            for (int j = 0; j < kPairs; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float x[2] = {sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]};
                    packed[r][j] = pack<T, 2>(x).w[0];
                }
        }
    }
    RTK_DEVICE void pair(int r, int j, float (&x)[2]) const {
        if constexpr (ROUND) {
            unpack<T, 2>(Raw<4>{{packed[r][j]}}, x);
        } else {
            x[0] = sums[4 * j + 2 * r], x[1] = sums[4 * j + 2 * r + 1];
        }
    }
    // The largest of a row of this thread; a NaN is not kept.
    RTK_DEVICE float peak(int r) const {
        if constexpr (ROUND) {
            u32 top = packed[r][0];
#pragma unroll
            for (int j = 1; j < kPairs; ++j)
                top = is_same<T, bf16>::value ? ptx::max_bf16x2(top, packed[r][j]) : ptx::max_f16x2(top, packed[r][j]);
            float x[2];
            unpack<T, 2>(Raw<4>{{top}}, x);
            return fmaxf(x[0], x[1]);
        } else {
            float top = sums[2 * r];
#pragma unroll
            for (int j = 0; j < kPairs; ++j) top = fmaxf(top, fmaxf(sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]));
            return top;
        }
    }
};

// Where statistics of tiles are written: planes [tiles, rows] of top, sum and shifted, then the total and the largest
// score before the id, if wanted.
struct TilePlanes {
    float* tiles;
    i64 count, rows;
    bool totals, top1;

    RTK_DEVICE float* at(int plane, i64 tile, i64 row) const { return tiles + (plane * count + tile) * rows + row; }
};

// Called by a warpgroup for its 64 rows; `row` is this thread's first one, `row` + 8 the other. `existing` columns of
// the tile exist; the accumulators of others are overwritten. Scores are logits times `factor`, a positive one.
template <typename T, bool ROUND, int COLS>
RTK_DEVICE void finish_tile(float (&sums)[COLS / 2], const TilePlanes& planes, float* targets, i64 tile, i64 row,
                            const int (&place)[2], int existing, float factor) {
    constexpr int kPairs = COLS / 8, kTotal = 3;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, own = lane % 4 * 2;  // its first column of eight
    const int left = existing - own;  // columns from this thread's first one on
    if (existing < COLS) {
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i)
            if (i / 4 * 8 + i % 2 >= left) sums[i] = -kInfinity;
    }
    const TileLogits<T, ROUND, COLS> logits(sums);
    const bool has_ids = __any_sync(0xffffffffu, (place[0] >= 0 && place[0] < COLS) || (place[1] >= 0 && place[1] < COLS));
    const float slope = factor * 1.4426950408889634f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 at = row + 8 * r;
        const bool stores = lane % 4 == 0 && at < planes.rows;
        const float peak = row_max(logits.peak(r)), anchor = anchored(peak);
        // Exponents in base 2, as in RowParts::add_batch: rounded logits take one multiplication.
        const float base = anchor * slope, rest = ROUND ? fmaf(-anchor, slope, base) : 0.0f;
        float sum[2] = {0.0f, 0.0f}, shifted[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            float x[2];
            logits.pair(r, j, x);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float away = ROUND ? fmaf(x[c], slope, -base) : (x[c] - anchor) * slope;
                const float e = ptx::ex2(away);
                sum[c] += e;
                shifted[c] = fmaf(e, fmaxf(away, -1000.0f), shifted[c]);  // e is 0 long before
            }
        }
        const float correction = ROUND ? ptx::ex2(rest) : 1.0f;
        const float whole = row_sum(sum[0] + sum[1]), far = row_sum(shifted[0] + shifted[1]);
        if (stores) {
            *planes.at(0, tile, at) = peak * factor;
            *planes.at(1, tile, at) = whole * correction;
            *planes.at(2, tile, at) = fmaf(rest, whole, far) * correction * 0.6931471805599453f;
        }
        if (planes.totals) {
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                float x[2];
                logits.pair(r, j, x);
#pragma unroll
                for (int c = 0; c < 2; ++c) total += 8 * j + c < left ? x[c] : 0.0f;
            }
            total = row_sum(total);
            if (stores) *planes.at(kTotal, tile, at) = total * factor;
        }
        float before = place[r] == COLS ? peak : -kInfinity;
        if (has_ids) {
            float earlier = -kInfinity, target = 0.0f;
            const int column = place[r] - own;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                float x[2];
                logits.pair(r, j, x);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (8 * j + c < column) earlier = fmaxf(earlier, x[c]);
                    if (8 * j + c == column) target = x[c];
                }
            }
            earlier = row_max(earlier);
            if (place[r] >= 0 && place[r] < COLS) {
                before = earlier;
                if (place[r] % 8 / 2 == lane % 4 && place[r] < existing) targets[at] = target * factor;
            }
        }
        if (planes.top1 && stores) *planes.at(planes.totals ? kTotal + 1 : kTotal, tile, at) = before * factor;
    }
}

}  // namespace rtk
