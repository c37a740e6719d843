// Gates of linear attention in fp32: time steps, log decays and strengths from what projections give, and their slopes.
#pragma once
#include "common/any_type.cuh"
#include "common/math.cuh"

namespace rtk {

// log(1 + e^x) and its slope, sigmoid(x), without branches. With e = e^-|x| and s = e / (2 + e), log(1 + e) = 2 atanh(s);
// the polynomial in s^2 has a relative error of 4e-9.
struct Softplus {
    float value, slope;
};
RTK_DEVICE Softplus softplus_slope(float x) {
    const float e = expf(-fabsf(x)), s = e * ptx::rcp(2.0f + e), z = s * s, open = ptx::rcp(1.0f + e);
    float p = 0.281577796f;
    p = fmaf(p, z, 0.279651582f);
    p = fmaf(p, z, 0.400245965f);
    p = fmaf(p, z, 0.666663229f);
    p = fmaf(p, z, 2.0f);
    return {fmaf(s, p, ptx::max_nan(x, 0.0f)), x < 0.0f ? e * open : open};
}
RTK_DEVICE float softplus(float x) { return softplus_slope(x).value; }

// `rate` is exp(A_log); `bound` is negative, or 0 if there is none.
RTK_DEVICE float log_decay(float x, float rate, float bound) {
    return bound < 0.0f ? bound * sigmoid<false>(rate * x) : -rate * softplus(x);
}

// The slope of sigmoid; 0 at infinities.
RTK_DEVICE float sigmoid_slope(float x) {
    const float e = expf(-fabsf(x)), rest = 1.0f / (1.0f + e);
    return e * rest * rest;
}

// Slopes of log_decay in x and in A_log, times `by`. A gradient of 0 stays 0 for any x, as in rows of no sequence.
struct DecaySlopes {
    float x, log_rate;
};
RTK_DEVICE DecaySlopes decay_slopes(float by, float x, float rate, float bound) {
    if (!(bound < 0.0f)) {
        const Softplus at = softplus_slope(x);
        return {by == 0.0f ? 0.0f : by * -rate * at.slope, by == 0.0f ? 0.0f : by * -rate * at.value};
    }
    if (by == 0.0f) return {0.0f, 0.0f};
    const float slope = by * bound * sigmoid_slope(rate * x) * rate;
    return {slope, slope == 0.0f ? 0.0f : slope * x};
}

RTK_DEVICE float strength_of(float x, bool by_sigmoid, float factor) { return factor * (by_sigmoid ? sigmoid<false>(x) : x); }

// The columns of a tile of rows that the threads of a block own, N neighbours each, and the rows between them.
struct GateLanes {
    int width, lanes, lane;  // threads of a row, rows at a time, this thread's row among them
    i64 column;
    bool inside;

    RTK_DEVICE GateLanes(i64 columns, i64 tile, int n) {
        const i64 vectors = columns / n;
        const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
        width = static_cast<int>(vectors < threads ? vectors : threads), lanes = threads / width, lane = thread / width;
        const i64 vector = tile * width + thread % width;
        column = vector * n, inside = lane < lanes && vector < vectors;
    }
};

// What a thread needs of A_log [heads] and dt_bias [columns], of types known at run time, for N neighbouring columns.
template <int N>
struct GateFactors {
    float rate[N], bias[N];

    RTK_DEVICE GateFactors(const void* a_log, int a_type, const void* dt_bias, int bias_type, i64 column, i64 inner) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            rate[i] = expf(load_any(a_log, a_type, (column + i) / inner));
            bias[i] = dt_bias == nullptr ? 0.0f : load_any(dt_bias, bias_type, column + i);
        }
    }
};

// `flags` of kernels with gates: whether beta is a logit, then three bits each of the types of g, beta, A_log and dt_bias
// (common/any_type.cuh) from bit 4 on.
RTK_DEVICE int gate_type(i64 flags, int which) { return static_cast<int>(flags >> (4 + 3 * which)) & 7; }
inline constexpr int kGateG = 0, kGateBeta = 1, kGateRate = 2, kGateBias = 3;

}  // namespace rtk
