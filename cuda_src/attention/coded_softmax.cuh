// Softmax probabilities as 8-bit codes: the largest one of a row so far is 255 (u8) or 448 (e4m3).
#pragma once
#include "attention/softmax_state.cuh"
#include "common/convert.cuh"

namespace rtk {

inline constexpr int kInt8 = 0, kE4m3 = 1, kMxE4m3 = 2;                // of q and k
inline constexpr int kValues16 = 0, kValuesE4m3 = 1, kValuesInt8 = 2;  // of v, and of probabilities (u8 for int8)
inline constexpr int kValuesWhole = 3;  // e4m3 with a scale per column, not per 64 keys

template <int PV>
struct ProbabilityCodes {
    static constexpr float kLargest = PV != kValuesInt8 ? 448.0f : 255.0f;
    static constexpr float kLog2 = PV != kValuesInt8 ? 8.807354922057604f : 7.994353436858858f;
    static constexpr float kShift = 8388608.0f;  // adding 2^23 rounds to an integer, which is in the low bits

    // Turns scores of two rows (softmax_state.cuh), a score counting as 2^(factor[r] * s), into probabilities as pack()
    // takes them; what was accumulated before must be multiplied by correction[r]. Unlike LazySoftmax, no probability
    // exceeds the largest code, because it would saturate. The denominator sums the rounded u8 codes, or e4m3's
    // probabilities before rounding.
    template <int N>
    RTK_DEVICE static void add(SoftmaxState& state, float (&s)[N], const float (&factor)[2], float (&correction)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int j = 1; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            const float now = fmaxf(state.top[r], quad_max(largest));
            const float from = scaled_top(now, factor[r]);
            correction[r] = fall_of(state.top[r], factor[r], from);
            state.top[r] = now;
            const float offset = kLog2 - from;
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < N / 4; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[4 * j + 2 * r + c];
                    value = ptx::ex2(value * factor[r] + offset);
                    if constexpr (PV == kValuesInt8) {
                        value += kShift;
                        part += value - kShift;
                    } else {
                        part += value;
                    }
                }
            state.sum[r] = state.sum[r] * correction[r] + part;
        }
    }

    // Packs four probabilities as codes.
    RTK_DEVICE static u32 pack(float a, float b, float c, float d) {
        if constexpr (PV != kValuesInt8) {
            return to_fp8x2<e4m3>(a, b) | to_fp8x2<e4m3>(c, d) << 16;
        } else {
            const u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
            const u32 high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
            return __byte_perm(low, high, 0x5410);
        }
    }
};

}  // namespace rtk
