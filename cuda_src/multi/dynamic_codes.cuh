// Codes of a dynamic map of 8 or 4 bits: BITS - 1 decades, the last of which is 0.1 .. 1, with cells of equal width in
// each. A code stands for the middle of a cell. The signed map has 1, 2, 4, .. cells in its decades, for both signs; the
// unsigned one, of numbers that are not negative, 2, 4, .. Both also have 0 and 1. Codes are in the order of their
// values: 0 is code 127 of the signed map of 8 bits and code 0 of the unsigned one.
//
// Both directions are closed forms. `place` is 1 more than the code of an unsigned number, and 1 more than twice the
// distance from the zero of a signed one, so that its exponent is the number of the decade: 0 for zero, BITS for one.
#pragma once
#include "common/abi.cuh"

namespace rtk {

inline constexpr int kBinades = 32;  // 2^-31 up to 1

template <int BITS>
struct DynamicMap {
    static constexpr int kLast = BITS - 1;     // the decade up to 1
    static constexpr int kDecades = BITS + 1;  // with those of zero and one
    static constexpr u32 kOne = (1u << BITS) - 1, kZero = kOne / 2;

    float2 decode[kDecades];  // value = x * place + y
    float2 encode[kDecades];  // index = x * value + y, rounded
    float2 binade[kBinades];  // the first threshold above the beginning of a binade, and the decade below it
    float one;                // from here on, the code is that of 1

    // Called by kDecades + kBinades threads or more, `thread` of them; to be followed by a barrier.
    template <bool SIGNED>
    RTK_DEVICE void fill(int thread) {
        // The least value that is nearer to a code of this decade than to those below.
        auto threshold = [](int decade) {
            const double cells = SIGNED ? (1 << decade) / 2 : 1 << decade;
            const double lowest = decade > kLast ? 1.0 : power(decade - kLast) * (0.1 + 0.45 / cells);
            return decade == 1 ? lowest / 2 : (lowest + power(decade - BITS) * (1.0 - 0.9 / cells)) / 2;
        };
        if (thread < kDecades) {
            const double cells = SIGNED ? (1 << thread) / 2 : 1 << thread, ten = power(thread - kLast);
            double times = 0.9 * ten / cells, plus = ten * (0.45 / cells - 0.8);
            if (thread == 0) times = 0.0, plus = 0.0;
            if (thread == BITS) times = 1.0 / cells, plus = 0.0;
            if (SIGNED) times /= 2, plus -= times;
            decode[thread] = make_float2(static_cast<float>(times), static_cast<float>(plus));
            double scale = cells / (0.9 * ten), start = cells - cells / 9 - 0.5;
            if (thread == 0) scale = 0.0, start = SIGNED ? 0.0 : 1.0;
            encode[thread] = make_float2(static_cast<float>(scale), static_cast<float>(start));
            if (thread == BITS) one = static_cast<float>(threshold(BITS));
        } else if (thread < kDecades + kBinades) {
            const int b = thread - kDecades;
            const double begin = 1.0 / static_cast<double>(1ll << (kBinades - 1 - b));
            int decade = 0;
            while (decade < kLast && static_cast<float>(threshold(decade + 1)) <= begin) ++decade;
            binade[b] = make_float2(decade < kLast ? static_cast<float>(threshold(decade + 1)) : 4.0f,
                                    __uint_as_float(static_cast<u32>(decade)));
        }
    }

    // Of a code between 0 and kOne.
    template <bool SIGNED>
    RTK_DEVICE float value(u32 code) const {
        const int distance = static_cast<int>(code) - static_cast<int>(kZero);
        const u32 place = SIGNED ? 2u * static_cast<u32>(distance < 0 ? -distance : distance) + 1u : code + 1u;
        const float number = __uint_as_float(0x4b000000u | place) - 8388608.0f;
        const float2 line = decode[(__float_as_uint(number) >> 23) - 127u];
        const float magnitude = fmaf(number, line.x, line.y);
        return SIGNED && distance < 0 ? -magnitude : magnitude;
    }

    // Of a number whose magnitude is at most 1, about.
    template <bool SIGNED>
    RTK_DEVICE u32 code(float number) const {
        const float y = SIGNED ? fabsf(number) : number;
        const int exponent = static_cast<int>(__float_as_uint(y) >> 23) - (127 - (kBinades - 1));
        const float2 step = binade[min(max(exponent, 0), kBinades - 1)];
        const u32 decade = __float_as_uint(step.y) + (y >= step.x ? 1u : 0u);
        const float2 line = encode[decade];
        const u32 rounded = __float_as_uint(fmaf(y, line.x, line.y) + 8388608.0f) & 0x3ffu;  // the lowest bits
        const u32 index = min(rounded, ((SIGNED ? 1u : 2u) << decade) - 1u);
        if constexpr (SIGNED) {
            if (number < 0.0f) return kZero - index;
            return y >= one ? kOne : kZero + index;
        }
        return y >= one ? kOne : index - 1u;
    }

   private:
    RTK_DEVICE static double power(int exponent) {
        double p = 1.0;
        for (int i = exponent; i < 0; ++i) p *= 10.0;
        for (int i = 0; i < exponent; ++i) p *= 10.0;
        return exponent < 0 ? 1.0 / p : p;
    }
};

}  // namespace rtk
