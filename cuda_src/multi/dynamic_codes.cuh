// Codes of a dynamic map of 8 or 4 bits: BITS - 1 decades, the last of which is 0.1 .. 1, with cells of equal width in
// each. A code stands for the middle of a cell. The signed map has 1, 2, 4, .. cells in its decades, for both signs; the
// unsigned one, of numbers that are not negative, 2, 4, .. Both also have 0 and 1. Codes are in the order of their
// values: 0 is code 127 of the signed map of 8 bits and code 0 of the unsigned one.
//
// Both directions are straight lines, one per decade. Counted from zero, the cells of decade d begin at 2^k (k = d - 1,
// or d without signs), and the line of decade d + 1 has twice its offset and a fifth of its slope. So a number's place
// among the cells is the smallest of all lines, and two of them suffice for numbers between two powers of 2. The border
// between decades is not the edge of a cell, since cells below it are narrower: it lies 0.2 cells above the edge. Lines
// are lowered by these 0.2, so that 2^k is the border, and raised again for all other borders, but not past a power of 2.
#pragma once
#include "common/abi.cuh"

namespace rtk {

template <int BITS, bool SIGNED>
struct DynamicMap {
    static constexpr int kLast = BITS - 1;      // the decade up to 1
    static constexpr int kDecades = BITS + 1;   // with those of zero and one
    static constexpr int kLowest = 127 - 24;    // exponent of numbers that are below all borders
    static constexpr int kBinades = 25;         // 2^-24 up to 1
    static constexpr int kEntries = BITS == 8 ? kDecades + kBinades : 1 << BITS;
    static constexpr u32 kOne = (1u << BITS) - 1, kZero = kOne / 2;

    float2 decode[BITS == 8 ? kDecades : 1];  // magnitude = x * place + y, by the exponent of the place
    float2 encode[BITS == 8 ? kBinades : 1];  // the line at the beginning of a binade: place = x * number + y
    float values[BITS == 8 ? 1 : 1 << BITS];  // of all codes

    // Called by kEntries threads or more, `thread` of them; to be followed by a barrier.
    RTK_DEVICE void fill(int thread) {
        if constexpr (BITS < 8) {
            const int distance = thread - static_cast<int>(kZero);
            const float place = fabsf(static_cast<float>(distance)) + 0.5f;
            const float2 line = decoding(static_cast<int>(__float_as_uint(place) >> 23) - 126);
            const float magnitude = fmaf(place, line.x, line.y);
            if (thread < kEntries) values[thread] = distance < 0 ? -magnitude : magnitude;
        } else {
            if (thread < kDecades) decode[thread] = decoding(thread);
            const int b = thread - kDecades;
            if (b < 0 || b >= kBinades) return;
            const float begin = __uint_as_float(static_cast<u32>(kLowest + b) << 23);
            constexpr float kFirstEnd = static_cast<float>(ten(1 - kLast));
            float2 smallest = encoding<0>();
            if (2.0f * begin > kFirstEnd) {
                smallest = encoding<1>();
                each_decade<2>([&](auto d) {
                    const float2 line = encoding<decltype(d)::kDecade>();
                    if (fmaf(begin, line.x, line.y) < fmaf(begin, smallest.x, smallest.y)) smallest = line;
                });
            }
            encode[b] = smallest;
        }
    }

    // The value of the code in a byte of a word, or, of 4 bits, of the code alone.
    RTK_DEVICE float value(u32 word, u32 byte = 0) const {
        if constexpr (BITS < 8) return values[word];
        const float number = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | byte));  // 2^23 + code
        if constexpr (SIGNED) {
            const float distance = number - (8388608.0f + static_cast<float>(kZero));
            const float place = fabsf(distance) + 0.5f;
            const float2 line = decode[(__float_as_uint(place) >> 23) - 126u];
            return copysignf(fmaf(place, line.x, line.y), distance);
        } else {
            const float place = number - 8388607.0f;
            const float2 line = decode[(__float_as_uint(place) >> 23) - 127u];
            return fmaf(place, line.x, line.y);
        }
    }

    // The code of a number whose magnitude is at most 1, about, in the lowest byte; other bits are set, too.
    RTK_DEVICE u32 code(float number) const {
        const float y = fmaxf(SIGNED ? fabsf(number) : number, 0x1p-24f);
        float place;
        if constexpr (BITS == 8) {
            const float2 line = encode[(__float_as_uint(y) >> 23) - static_cast<u32>(kLowest)];
            place = fmaf(y, line.x, line.y);
            place = fminf(place, fmaf(place, 0.2f, fmaf(line.y, 1.8f, 0.2f)));
        } else {
            place = fmaf(y, encoding<0>().x, encoding<0>().y);
            each_decade<2>([&](auto d) {
                const float2 line = encoding<decltype(d)::kDecade>();
                place = fminf(place, fmaf(y, line.x, line.y));
            });
        }
        place = fminf(place + 0.2f, __uint_as_float(__float_as_uint(place) | 0x7fffffu));
        constexpr float kBorderOfOne = static_cast<float>(1.0 - 0.225 / cells(kLast));
        if (number >= kBorderOfOne) place = static_cast<float>(1 << (BITS - SIGNED));
        if constexpr (!SIGNED) return __float_as_uint(__fadd_rd(place, 8388607.0f));
        // Below zero, rounding down moves away from it: start one code higher.
        const u32 zero = 0x4b000000u + kZero + (__float_as_uint(number) >> 31);
        return __float_as_uint(__fadd_rd(copysignf(place, number), __uint_as_float(zero)));
    }

   private:
    RTK_DEVICE static constexpr double ten(int exponent) {
        double p = 1.0;
        for (int i = exponent; i < 0; ++i) p *= 10.0;
        for (int i = 0; i < exponent; ++i) p *= 10.0;
        return exponent < 0 ? 1.0 / p : p;
    }
    RTK_DEVICE static constexpr double cells(int decade) { return SIGNED ? (1 << decade) / 2 : 1 << decade; }
    RTK_DEVICE static constexpr double slope(int decade) { return cells(decade) * ten(kLast - decade) / 0.9; }

    // The line from numbers to places of a decade; 0: of the first one, with the border to zero, which is half the lowest
    // value, at a power of 2. Without signs the border between its two cells keeps its place.
    template <int DECADE>
    RTK_DEVICE static float2 encoding() {
        constexpr bool kFirst = DECADE == 0;
        constexpr double kSlope = !kFirst ? slope(DECADE) : SIGNED ? slope(1) : 0.8 / 0.3875 * ten(kLast - 1);
        constexpr double kOffset = !kFirst  ? cells(DECADE) * 8.0 / 9.0 - 0.2
                                   : SIGNED ? 1.0 - 0.275 / 0.9
                                            : 2.0 - 0.1625 * 0.8 / 0.3875;
        constexpr float kX = static_cast<float>(kSlope), kY = static_cast<float>(kOffset);
        return make_float2(kX, kY);
    }
    // The line from places to magnitudes. Places of signed codes are in the middle of their cells.
    RTK_DEVICE static float2 decoding(int decade) {
        float2 line = make_float2(0.0f, decade == 0 ? 0.0f : 1.0f);
        each_decade<1>([&](auto d) {
            constexpr int kDecade = decltype(d)::kDecade;
            constexpr double kTen = ten(kDecade - kLast), kAbove = SIGNED ? -0.8 : 0.45 / cells(kDecade) - 0.8;
            constexpr float kX = static_cast<float>(kTen * 0.9 / cells(kDecade));
            constexpr float kY = static_cast<float>(kTen * kAbove);
            if (decade == kDecade) line = make_float2(kX, kY);
        });
        return line;
    }
    template <int DECADE>
    struct Decade {
        static constexpr int kDecade = DECADE;
    };
    // Calls f(Decade<d>()) for all decades from FIRST on.
    template <int FIRST, typename F>
    RTK_DEVICE static void each_decade(F f) {
        if constexpr (FIRST <= kLast) {
            f(Decade<FIRST>());
            each_decade<FIRST + 1>(f);
        }
    }
};

}  // namespace rtk
