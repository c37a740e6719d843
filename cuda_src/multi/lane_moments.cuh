// Lanes of a warp that walk over tensors of several types: eight consecutive elements each, 256 a warp, in fp32 between
// loading and storing. Moments are kept as STATE says: kFull (fp32), kHalf (bf16), or codes times a scale of their block:
// kDynamic (dynamic_codes.cuh, the largest magnitude of 256 elements), kFp8 (e4m3, the largest magnitude of 256 elements
// divided by 448), kPacked (4 bits, the largest magnitude of 128 elements). Codes of 4 bits are those of the dynamic map
// for signed moments and (code + 1) / 16 for those that are never negative, which have no zero; two share a byte, the
// first in its upper half.
#pragma once
#include "common/philox.cuh"
#include "common/vec.cuh"
#include "multi/dynamic_codes.cuh"
#include "ptx/math.cuh"

namespace rtk {

enum : int { kFull = 0, kDynamic = 1, kFp8 = 2, kPacked = 3, kHalf = 4 };
inline constexpr int kEach = 8, kBlock = kWarp * kEach;

// Eight elements of a lane as they are in memory, of 1, 2 or 4 bytes each; `here` of them exist. The type is a run-time
// kind (list.cuh), the same for the whole block, so that there is one copy of the arithmetic.
template <int BYTES>
struct LaneElements {
    u32 w[2 * BYTES];

    // COUNT items of SIZE bytes, of which `here` exist.
    template <int SIZE, int COUNT = kEach>
    RTK_DEVICE void load(const u8* p, int here, bool vectors) {
        if (vectors && here == COUNT) {
            constexpr int kPart = SIZE * COUNT > 16 ? 16 : SIZE * COUNT;
#pragma unroll
            for (int i = 0; i < SIZE * COUNT / kPart; ++i) {
                const Raw<kPart> raw = ptx::ld_stream<kPart>(p + i * kPart);
#pragma unroll
                for (int k = 0; k < kPart / 4; ++k) w[i * kPart / 4 + k] = raw.w[k];
            }
            return;
        }
        constexpr int kPerWord = 4 / SIZE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i % kPerWord == 0) w[i / kPerWord] = 0;
            if (i < here) w[i / kPerWord] |= ptx::ld_stream<SIZE>(p + i * SIZE).w[0] << 8 * SIZE * (i % kPerWord) % 32;
        }
    }
    template <int SIZE, int COUNT = kEach>
    RTK_DEVICE void store(u8* p, int here, bool vectors) const {
        if (vectors && here == COUNT) {
            constexpr int kPart = SIZE * COUNT > 16 ? 16 : SIZE * COUNT;
#pragma unroll
            for (int i = 0; i < SIZE * COUNT / kPart; ++i) {
                Raw<kPart> raw;
#pragma unroll
                for (int k = 0; k < kPart / 4; ++k) raw.w[k] = w[i * kPart / 4 + k];
                ptx::st<kPart>(p + i * kPart, raw);
            }
            return;
        }
        constexpr int kPerWord = 4 / SIZE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i < here) ptx::st<SIZE>(p + i * SIZE, Raw<SIZE>{{w[i / kPerWord] >> 8 * SIZE * (i % kPerWord) % 32}});
    }
    RTK_DEVICE void load_kind(int kind, const u8* p, int here, bool vectors) {
        if (kind == 0) {
            load<4>(p, here, vectors);
        } else {
            load<2>(p, here, vectors);
        }
    }
    RTK_DEVICE void store_kind(int kind, u8* p, int here, bool vectors) const {
        if (kind == 0) {
            store<4>(p, here, vectors);
        } else {
            store<2>(p, here, vectors);
        }
    }
    template <typename T>
    RTK_DEVICE void get(float (&f)[kEach]) const {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < kEach; i += kPerWord) {
            float some[kPerWord];
            unpack<T, kPerWord>(Raw<4>{{w[i / kPerWord]}}, some);
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) f[i + k] = some[k];
        }
    }
    template <typename T>
    RTK_DEVICE void put(const float (&f)[kEach]) {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < kEach; i += kPerWord) {
            float some[kPerWord];
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) some[k] = f[i + k];
            w[i / kPerWord] = pack<T, kPerWord>(some).w[0];
        }
    }
};

// Which random numbers a tensor gets in a step.
struct Origin {
    u64 seed, stream, step;
};

// bf16 bits of eight numbers, rounded by 16 random bits each. `place`: of the first in its whole tensor.
RTK_DEVICE void round_stochastically(const Origin& origin, u64 place, const float (&f)[kEach], LaneElements<4>& out) {
    const u64 offset = origin.stream << 32 | (origin.step & 0xffffffffull);
    RandomWords words = {};
    if (place % kEach == 0) {
        words = philox(origin.seed, place / kEach, offset);
    } else {  // a shard that begins in between: one element at a time, pushed in from the end
#pragma unroll 1
        for (u64 at = place; at < place + kEach; ++at) {
            const RandomWords these = philox(origin.seed, at / kEach, offset);
            const u32 low = at & 2 ? these.w[1] : these.w[0], high = at & 2 ? these.w[3] : these.w[2];
            const u32 word = at & 4 ? high : low, bits = at & 1 ? word >> 16 : word & 0xffffu;
#pragma unroll
            for (int k = 0; k < 4; ++k) words.w[k] = words.w[k] >> 16 | (k < 3 ? words.w[(k + 1) % 4] : bits) << 16;
        }
    }
    u32 number[kEach];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const u32 bits = i % 2 ? words.w[i / 2] >> 16 : words.w[i / 2] & 0xffffu;
        number[i] = __float_as_uint(f[i]) + bits;
        largest = ptx::max_nan(largest, fabsf(f[i]));
    }
    if (!(largest <= 3.4028234e38f)) {  // infinities stay, and NaN stays NaN
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const u32 exact = __float_as_uint(f[i]), magnitude = exact & 0x7fffffffu;
            if (magnitude >= 0x7f800000u) number[i] = magnitude > 0x7f800000u ? exact | 0x400000u : exact;
        }
    }
#pragma unroll
    for (int i = 0; i < kEach; i += 2) out.w[i / 2] = __byte_perm(number[i], number[i + 1], 0x7632u);
}

// The largest magnitude among LANES neighbouring lanes; NaN if there is one.
template <int LANES>
RTK_DEVICE float lanes_amax(const float (&f)[kEach]) {
    float largest = 0.0f;
#pragma unroll
    for (float v : f) largest = ptx::max_nan(largest, fabsf(v));
    u32 bits = __float_as_uint(largest);
    if constexpr (LANES == kWarp) return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
    return __uint_as_float(bits);
}

// Codes of two moments in both directions, shared by a block of 256 threads.
template <int STATE>
struct MomentMaps {
    RTK_DEVICE void fill(int) {}
};

template <>
struct MomentMaps<kDynamic> {
    DynamicMap<8, true> first;
    DynamicMap<8, false> second;

    RTK_DEVICE void fill(int thread) {
        if (thread < 128) {
            first.fill(thread);
        } else {
            second.fill(thread - 128);
        }
    }
    // Of one of eight elements, in two words.
    template <bool SIGNED>
    RTK_DEVICE float value(const u32* words, int i) const {
        const u32 word = words[i / 4], byte = static_cast<u32>(i % 4);
        if constexpr (SIGNED) return first.value(word, byte);
        return second.value(word, byte);
    }
    // The codes of eight numbers.
    template <bool SIGNED>
    RTK_DEVICE void codes(const float (&f)[kEach], float inverse, u32* words) const {
        u32 some[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if constexpr (SIGNED) {
                some[i] = first.code(f[i] * inverse);
            } else {
                some[i] = second.code(f[i] * inverse);
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const u32* const four = some + 4 * k;
            words[k] = __byte_perm(__byte_perm(four[0], four[1], 0x40u), __byte_perm(four[2], four[3], 0x40u), 0x5410u);
        }
    }
};

template <>
struct MomentMaps<kPacked> {
    DynamicMap<4, true> map;

    RTK_DEVICE void fill(int thread) { map.fill(thread); }
    template <bool SIGNED>
    RTK_DEVICE float value(const u32* words, int i) const {
        const u32 code = words[0] >> (8 * (i / 2) + 4 * (1 - i % 2)) & 15u;
        if constexpr (SIGNED) return map.value(code);
        return (__uint_as_float(0x4b000000u | code) - 8388607.0f) * 0.0625f;
    }
    template <bool SIGNED>
    RTK_DEVICE void codes(const float (&f)[kEach], float inverse, u32* words) const {
        u32 bytes[kEach / 2];
#pragma unroll
        for (int i = 0; i < kEach; i += 2)
            bytes[i / 2] = one<SIGNED>(f[i] * inverse) << 4 | (one<SIGNED>(f[i + 1] * inverse) & 15u);
        words[0] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x40u), __byte_perm(bytes[2], bytes[3], 0x40u), 0x5410u);
    }

   private:
    // A code in the lowest 4 bits; others are set, too.
    template <bool SIGNED>
    RTK_DEVICE u32 one(float number) const {
        if constexpr (SIGNED) return map.code(number);
        return __float_as_uint(__fadd_rd(fmaxf(fmaf(number, 16.0f, -0.5f), 0.0f), 8388608.0f));
    }
};

// Moments of a lane and the scale of its block.
template <int STATE, bool SIGNED>
struct Moments {
    static constexpr bool kScaled = STATE != kFull && STATE != kHalf;
    static constexpr int kBits = STATE == kFull ? 32 : STATE == kHalf ? 16 : STATE == kPacked ? 4 : 8;
    static constexpr int kSize = kBits < 8 ? 1 : kBits / 8, kItems = kEach * kBits / (8 * kSize);
    static constexpr int kLanes = STATE == kPacked ? kWarp / 2 : kWarp;  // that share a scale
    LaneElements<kSize> raw;
    float scale;

    RTK_DEVICE static int items(int here) { return kBits < 8 ? (here + 1) / 2 : here; }

    // Eight elements from `first` on, of which `here` exist; a scale exists if the first element of its block does.
    RTK_DEVICE void load(const u8* p, const float* scales, int first, int here, int count, bool vectors) {
        raw.template load<kSize, kItems>(p + first * kBits / 8, items(here), vectors);
        if constexpr (kScaled) {
            const int block = first / (kLanes * kEach);
            scale = block * kLanes * kEach < count ? scales[block] : 0.0f;
        }
    }
    RTK_DEVICE void store(u8* p, float* scales, int first, int here, bool vectors) const {
        raw.template store<kSize, kItems>(p + first * kBits / 8, items(here), vectors);
        if constexpr (kScaled)
            if (first % (kLanes * kEach) == 0 && here > 0) scales[first / (kLanes * kEach)] = scale;
    }
    RTK_DEVICE void get(const MomentMaps<STATE>& maps, float (&f)[kEach]) const {
        if constexpr (STATE == kFull) {
            raw.template get<float>(f);
        } else if constexpr (STATE == kHalf) {
            raw.template get<bf16>(f);
        } else if constexpr (STATE == kFp8) {
            raw.template get<e4m3>(f);
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i) f[i] = maps.template value<SIGNED>(raw.w, i);
        }
        if constexpr (kScaled) {
#pragma unroll
            for (float& v : f) v *= scale;
        }
    }
    RTK_DEVICE void put(const MomentMaps<STATE>& maps, const float (&f)[kEach]) {
        if constexpr (STATE == kFull) {
            raw.template put<float>(f);
        } else if constexpr (STATE == kHalf) {
            raw.template put<bf16>(f);
        } else {
            scale = lanes_amax<kLanes>(f) * (STATE == kFp8 ? 1.0f / 448.0f : 1.0f);
            if (scale < 1e-36f) scale = 0.0f;  // its inverse would overflow
            const float inverse = scale == 0.0f ? 0.0f : ptx::rcp(scale);
            if constexpr (STATE == kFp8) {
                float scaled[kEach];
#pragma unroll
                for (int i = 0; i < kEach; ++i) scaled[i] = f[i] * inverse;
                raw.template put<e4m3>(scaled);  // saturates
            } else {
                maps.template codes<SIGNED>(f, inverse, raw.w);
            }
        }
    }
};

}  // namespace rtk
