// Parts of the backward kernels: products between tiles, and a score's gradient.
#pragma once
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"

namespace rtk {

// d += rows row.. + 15 of one tile by rows column.. + 8N - 1 of another, summed over STEPS steps of 16 columns.
template <typename T, typename Tile, int STEPS, int N>
RTK_DEVICE void rows_by_rows(float (&d)[N][4], const u8* left, int row, const u8* right, int column, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        Tile::left(a, left, row, step, lane);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 b[4];
            Tile::right(b, right, column + 16 * n, step, lane);
            mma_step<T>(d[2 * n], a, b[0], b[1]);
            mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// d += a by all columns of rows row.. + 15 of a tile, which are summed over.
template <typename T, typename Tile, int N>
RTK_DEVICE void by_columns(float (&d)[N][4], const u32 (&a)[4], const u8* tile, int row, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        Tile::right_transposed(b, tile, row, n, lane);
        mma_step<T>(d[2 * n], a, b[0], b[1]);
        mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
    }
}

// From a product of a query and a key and dp to p and ds (which the factor of products still misses), where products are
// the scores. log_sum: lse of the query, in log2; not `counts`: masked.
RTK_DEVICE void grad_of_product(float& product, float& dp, float log_sum, float delta, const ScoreRule& rule, bool counts) {
    const float p = counts ? ptx::ex2(product * rule.factor() - log_sum) : 0.0f;
    product = p;
    dp = p * (dp - delta);
}

// The same with a soft cap or a bias; query i, key j.
RTK_DEVICE void grad_of_score(float& product, float& dp, float log_sum, float delta, const ScoreRule& rule,
                              const BiasRows& bias, int i, int j, bool counts) {
    float score = fmin_nan(product * rule.scale(), rule.ceiling()), slope = 1.0f;  // a cut-off does not change the slope
    if (rule.softcap() > 0.0f) {
        const float t = tanh_by_ex2(product * rule.inverse_cap());
        score = rule.softcap() * t, slope = 1.0f - t * t;
    }
    if (bias.at != nullptr && counts) score += load_any(bias.at + i * bias.row + j * bias.column, bias.type, 0);
    const float p = counts ? ptx::ex2(score * kLog2e - log_sum) : 0.0f;
    product = p;
    dp = p * (dp - delta) * slope;
}

// Rows row.. + 15 of a result whose tile has `rows` rows; `times` multiplies sums.
template <typename T, int N>
RTK_DEVICE void store_rows(T* to, i64 stride, const float (&sums)[N][4], float times, int row, int rows, int width, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int here = row + lane / 4 + 8 * r;
        if (here >= rows) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = 8 * n + lane % 4 * 2;
            const float values[2] = {sums[n][2 * r] * times, sums[n][2 * r + 1] * times};
            if (column < width) store<T, 2>(to + here * stride + column, values);
        }
    }
}

}  // namespace rtk
