// Online softmax of rows that arrive in tiles of columns, in the register layout of matrix products.
//
// Scores are laid out as mma m16n8 and wgmma m64nN leave them: s[4j + 2r + c] is row g + 8r, column 8j + 2t + c of lane
// 4g + t. A thread holds parts of two rows; the four lanes of a quad share them. Scores are kept unscaled: a score
// counts as 2^(factor * s), factor = scale * log2(e) > 0, so that each costs one multiply-add and one ex2.
//
// A score of -inf is masked. Rows that have seen no key have a maximum of -inf; 0 is used in its place to avoid inf -
// inf. NaN and +inf give NaN, as in any softmax.
#pragma once
#include "common/abi.cuh"
#include "ptx/math.cuh"

namespace rtk {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

RTK_DEVICE float negative_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// Over the four lanes that share rows; all of them get the result.
RTK_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
RTK_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A maximum in units of log2, 0 without keys. Rounded, not part of a multiply-add: see fall_of.
RTK_DEVICE float scaled_top(float top, float factor) {
    return top == negative_infinity() ? 0.0f : __fmul_rn(top, factor);
}
// 2^-rise where a maximum becomes the one that is `scaled` (scaled_top). Exactly 1 if it stays: tiles of keys that a row
// does not see, which are read for other rows, must not change its bits. In a multiply-add, the rounding would remain.
RTK_DEVICE float fall_of(float top, float factor, float scaled) { return ptx::ex2(__fmul_rn(top, factor) - scaled); }

// The smaller of the two, NaN if x is NaN.
RTK_DEVICE float fmin_nan(float x, float limit) { return x > limit ? limit : x; }

// tanh with a relative error of about 2^-21, by ex2; exact limits at +-inf. tanh.approx (2^-11) is as coarse as bf16.
RTK_DEVICE float tanh_by_ex2(float x) {
    const float magnitude = fabsf(x);
    const float e = ptx::ex2(-2.0f * kLog2e * magnitude);
    // Near 0, 1 - e cancels; the series is exact to fp32 there.
    const float square = magnitude * magnitude;
    const float series = magnitude * (1.0f + square * (-0.33333334f + square * (0.13333334f - square * 0.053968254f)));
    const float ratio = (1.0f - e) * ptx::rcp(1.0f + e);
    return copysignf(magnitude < 0.15f ? series : ratio, x);
}

struct SoftmaxState {
    float top[2];  // maxima so far, unscaled, over all four lanes
    float sum[2];  // this lane's part of the softmax sums

    RTK_DEVICE SoftmaxState() {
        top[0] = top[1] = negative_infinity();
        sum[0] = sum[1] = 0.0f;
    }

    // Replaces scores by probabilities relative to the maximum so far; what was accumulated before, here and in the
    // output, must be multiplied by correction[r]. All lanes of a warp must call this. LAG: probabilities stay relative
    // to an earlier maximum as long as none of them exceeds 2^LAG.
    template <int LAG = 0, int N>
    RTK_DEVICE void add(float (&s)[N], float factor, float (&correction)[2]) {
        const float both[2] = {factor, factor};
        add<LAG>(s, both, correction);
    }
    // The same with one factor per row.
    template <int LAG = 0, int N>
    RTK_DEVICE void add(float (&s)[N], const float (&factor)[2], float (&correction)[2]) {
        static_assert(N % 4 == 0, "two rows of pairs");
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int j = 1; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            float now = fmaxf(top[r], quad_max(largest));
            if constexpr (LAG > 0) now = (now - top[r]) * factor[r] > LAG ? now : top[r];
            const float from = scaled_top(now, factor[r]);
            correction[r] = fall_of(top[r], factor[r], from);
            top[r] = now;
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < N / 4; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[4 * j + 2 * r + c];
                    value = ptx::ex2(value * factor[r] - from);
                    part += value;
                }
            sum[r] = sum[r] * correction[r] + part;
        }
    }

    // After the last tile: returns the factor of the output, and log(sum of exp) in `lse`. `sink` is one more score,
    // scaled, in units of log2; -inf for none. All lanes of a warp must call this.
    RTK_DEVICE void finish(float factor, float sink, float (&times)[2], float (&lse)[2]) {
        const float both[2] = {factor, factor};
        finish(both, sink, times, lse);
    }
    RTK_DEVICE void finish(const float (&factor)[2], float sink, float (&times)[2], float (&lse)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = quad_sum(sum[r]);
            const float scaled = top[r] == negative_infinity() ? top[r] : top[r] * factor[r];
            const float highest = fmaxf(scaled, sink);
            const float from = highest == negative_infinity() ? 0.0f : highest;
            const float correction = ptx::ex2(scaled - from);
            total = total * correction + ptx::ex2(sink - from);
            times[r] = total == 0.0f ? 0.0f : correction / total;
            lse[r] = total == 0.0f ? negative_infinity() : (from + log2f(total)) * kLn2;
        }
    }
};

}  // namespace rtk
