// A score's gradient, for the backward kernels.
#pragma once
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"

namespace rtk {

// Computes p and ds (still without the factor of products) from dp and the product of a query and a key, where products
// are the scores. log_sum: lse of the query, in log2; not `counts`: masked.
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

}  // namespace rtk
