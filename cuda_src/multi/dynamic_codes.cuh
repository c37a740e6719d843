// 8-bit codes of a dynamic map: seven decades, from 1e-7 .. 1e-6 up to 0.1 .. 1, with cells of equal width in each. A
// code stands for the middle of a cell. The signed map has 1, 2, 4, .. 64 cells in its decades, for both signs; the
// unsigned one, of numbers that are not negative, 2, 4, .. 128. Both also have 0 and 1. Codes are in the order of
// their values: 0 is code 127 of the signed map and code 0 of the unsigned one.
//
// Both directions are one look-up in shared memory. Magnitudes fall into bins by their exponents and upper 7 bits,
// which are narrower than cells: at most one boundary between codes lies in a bin. A bin's word has the code below the
// boundary in its upper half and 0xffff less the lower half of the boundary in its lower one, so that adding the lower
// half of a number carries into the code exactly if the number is above the boundary.
#pragma once
#include "common/abi.cuh"

namespace rtk {

template <bool SIGNED>
struct DynamicMap {
    static constexpr int kZero = SIGNED ? 127 : 0;          // code
    static constexpr int kBoundaries = SIGNED ? 128 : 255;  // between codes from zero up
    static constexpr u32 kFirstBin = (127 - 23) << 7;       // 2^-23, below all boundaries
    static constexpr int kBins = 23 * 128 + 1;              // the last one has 1

    float value[256];
    u32 bins[kBins];

    // The first of two steps, each called by all THREADS threads, with a barrier after each.
    template <int THREADS>
    RTK_DEVICE void fill_values() {
        for (int code = threadIdx.x; code < 256; code += THREADS) {
            const int distance = code < kZero ? kZero - code : code - kZero;
            const int place = SIGNED ? distance : distance + 1;  // 2^d to 2^(d + 1) - 1 are of one decade
            int decade = 0;
            while (2 << decade <= place) ++decade;
            const double cells = 1 << decade, cell = place - cells + 0.5;
            double ten = 1.0;  // the upper end of the decade
            for (int i = decade + (SIGNED ? 1 : 0); i < 7; ++i) ten *= 10.0;
            float magnitude = static_cast<float>((0.1 + 0.9 * cell / cells) / ten);
            if (distance == 0) magnitude = 0.0f;
            if (code == 255) magnitude = 1.0f;
            value[code] = code < kZero ? -magnitude : magnitude;
        }
    }
    template <int THREADS>
    RTK_DEVICE void fill_bins() {
        const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
        auto boundary = [&](int index) {
            const double sum = static_cast<double>(value[kZero + index]) + static_cast<double>(value[kZero + index + 1]);
            return __float_as_uint(static_cast<float>(sum / 2));
        };
        auto bin = [](u32 bits) { return static_cast<int>((bits >> 16) - kFirstBin); };
        for (int index = warp; index <= kBoundaries; index += THREADS / kWarp) {  // of a code, from zero on
            const u32 code = static_cast<u32>(index) << 16, above = index < kBoundaries ? boundary(index) : 0;
            const int begin = index == 0 ? 0 : bin(boundary(index - 1)) + 1, end = index < kBoundaries ? bin(above) : kBins;
            for (int i = begin + lane; i < end; i += kWarp) bins[i] = code;
            if (index < kBoundaries && lane == 0) bins[end] = code | (0xffffu - (above & 0xffffu));
        }
    }

    // Of eight codes.
    RTK_DEVICE void decode(const u32 (&codes)[2], float scale, float (&f)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = value[codes[i / 4] >> 8 * (i % 4) & 0xffu] * scale;
    }

    // Of eight numbers that are at most 1 in magnitude, about, after a multiplication; NaN counts as 0.
    RTK_DEVICE void encode(const float (&f)[8], float inverse, u32 (&codes)[2]) const {
        u32 sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float magnitude = __saturatef((SIGNED ? fabsf(f[i]) : f[i]) * inverse);
            const u32 number = max(__float_as_uint(magnitude), kFirstBin << 16);
            sums[i] = bins[(number >> 16) - kFirstBin] + (number & 0xffffu);  // the code is in byte 2
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const u32* const four = sums + 4 * k;
            codes[k] = __byte_perm(__byte_perm(four[0], four[1], 0x0062), __byte_perm(four[2], four[3], 0x0062), 0x5410);
            if constexpr (SIGNED) {
                const u32 low = __byte_perm(__float_as_uint(f[4 * k]), __float_as_uint(f[4 * k + 1]), 0x0073);
                const u32 high = __byte_perm(__float_as_uint(f[4 * k + 2]), __float_as_uint(f[4 * k + 3]), 0x0073);
                const u32 negative = (__byte_perm(low, high, 0x5410) >> 7 & 0x01010101u) * 0xffu;
                u32 down = codes[k] & negative;
                down -= down >> 7 & 0x01010101u;  // there is no code of -1
                codes[k] = 0x7f7f7f7fu + (codes[k] & ~negative) - down;
            }
        }
    }
};

}  // namespace rtk
