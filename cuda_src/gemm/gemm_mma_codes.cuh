// Operands of the mma.sync product (gemm/gemm_mma.cu) as stored in memory, and how a lane turns its words into those
// that the tensor core takes: copies, or exact conversions of 8- and 4-bit codes to 16-bit numbers, and of 4-bit
// integers to 8-bit.
//
// A word holds 32 / bits elements of consecutive k, the first one lowest. Converted words keep memory order if the
// other operand does (because it has more bits); otherwise both use the cheapest order.
#pragma once
#include "common/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_scaled.cuh"
#include "ptx/packed.cuh"

// 8-bit floats multiply at full speed on these targets; elsewhere that product is slow or absent, and fp16 is used.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define RTK_FP8_PRODUCTS 1
#else
#define RTK_FP8_PRODUCTS 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define RTK_INT4_PRODUCTS 1
#else
#define RTK_INT4_PRODUCTS 0
#endif

namespace rtk {

enum CodeKind : int { kE4m3, kE5m2, kInt8, kUint8, kInt4, kUint4, kE2m1 };

struct Int8Code {};
struct Uint8Code {};
struct Int4Code {};
struct Uint4Code {};
struct E2m1Code {};
struct AnyByteCode {};    // one of the 8-bit kinds, known at run time
struct AnyNibbleCode {};  // one of the 4-bit kinds

template <typename Code>
struct CodeTraits;
template <int kBitCount, int kKindOf, bool kIsSigned>
struct CodeTraitsOf {
    static constexpr int kBits = kBitCount, kKind = kKindOf;  // kKind: -1 if it is known at run time, or no code
    static constexpr bool kSigned = kIsSigned;
};
template <> struct CodeTraits<bf16> : CodeTraitsOf<16, -1, true> {};
template <> struct CodeTraits<fp16> : CodeTraitsOf<16, -1, true> {};
template <> struct CodeTraits<e4m3> : CodeTraitsOf<8, kE4m3, true> {};
template <> struct CodeTraits<e5m2> : CodeTraitsOf<8, kE5m2, true> {};
template <> struct CodeTraits<Int8Code> : CodeTraitsOf<8, kInt8, true> {};
template <> struct CodeTraits<Uint8Code> : CodeTraitsOf<8, kUint8, false> {};
template <> struct CodeTraits<Int4Code> : CodeTraitsOf<4, kInt4, true> {};
template <> struct CodeTraits<Uint4Code> : CodeTraitsOf<4, kUint4, false> {};
template <> struct CodeTraits<E2m1Code> : CodeTraitsOf<4, kE2m1, true> {};
template <> struct CodeTraits<AnyByteCode> : CodeTraitsOf<8, -1, true> {};
template <> struct CodeTraits<AnyNibbleCode> : CodeTraitsOf<4, -1, true> {};

// ---- products -------------------------------------------------------------------------------------------------------

struct FloatSums {
    float v[4];
    RTK_DEVICE float value(int i) const { return v[i]; }
    RTK_DEVICE i32 integer(int) const { return 0; }
    RTK_DEVICE void clear() { v[0] = v[1] = v[2] = v[3] = 0.0f; }
};
struct IntegerSums {
    i32 v[4];
    RTK_DEVICE float value(int i) const { return static_cast<float>(v[i]); }
    RTK_DEVICE i32 integer(int i) const { return v[i]; }
    RTK_DEVICE void clear() { v[0] = v[1] = v[2] = v[3] = 0; }
};
struct HalfSums {
    u32 v[2];
    RTK_DEVICE float value(int i) const { return ptx::cvt_f16_to_f32(static_cast<u16>(v[i / 2] >> (16 * (i % 2)))); }
    RTK_DEVICE i32 integer(int) const { return 0; }
    RTK_DEVICE void clear() { v[0] = v[1] = 0u; }
};

struct MathBf16 {
    using Sums = FloatSums;
    static constexpr int kBits = 16;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int, int) {
        ptx::mma_m16n8k16_bf16(d.v, a, b);
    }
};
struct MathF16 {
    using Sums = FloatSums;
    static constexpr int kBits = 16;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int, int) {
        ptx::mma_m16n8k16_f16(d.v, a, b);
    }
};
struct MathF16Sums {
    using Sums = HalfSums;
    static constexpr int kBits = 16;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int, int) {
        ptx::mma_m16n8k16_f16_sums(d.v, a, b);
    }
};
struct MathInt8 {
    using Sums = IntegerSums;
    static constexpr int kBits = 8;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int, int) {
        constexpr bool kSignedA = CodeTraits<A>::kSigned, kSignedB = CodeTraits<B>::kSigned;
        if constexpr (kSignedA && kSignedB) {
            ptx::mma_m16n8k32_s8(d.v, a, b);
        } else if constexpr (kSignedA) {
            ptx::mma_m16n8k32_s8_u8(d.v, a, b);
        } else if constexpr (kSignedB) {
            ptx::mma_m16n8k32_u8_s8(d.v, a, b);
        } else {
            ptx::mma_m16n8k32_u8(d.v, a, b);
        }
    }
};

#if RTK_INT4_PRODUCTS
struct MathInt4 {
    using Sums = IntegerSums;
    static constexpr int kBits = 4;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int, int) {
        constexpr bool kSignedA = CodeTraits<A>::kSigned, kSignedB = CodeTraits<B>::kSigned;
        if constexpr (kSignedA && kSignedB) {
            ptx::mma_m16n8k64_s4(d.v, a, b);
        } else if constexpr (kSignedA) {
            ptx::mma_m16n8k64_s4_u4(d.v, a, b);
        } else if constexpr (kSignedB) {
            ptx::mma_m16n8k64_u4_s4(d.v, a, b);
        } else {
            ptx::mma_m16n8k64_u4(d.v, a, b);
        }
    }
};
#else
struct MathInt4 : MathInt8 {};
#endif

#if RTK_FP8_PRODUCTS
struct MathFp8 {
    using Sums = FloatSums;
    static constexpr int kBits = 8;
    template <typename A, typename B>
    RTK_DEVICE static void multiply(Sums& d, const u32 (&a)[4], const u32 (&b)[2], int kind_a, int kind_b) {
        const bool e5m2_a = (CodeTraits<A>::kKind < 0 ? kind_a : CodeTraits<A>::kKind) == kE5m2;
        const bool e5m2_b = (CodeTraits<B>::kKind < 0 ? kind_b : CodeTraits<B>::kKind) == kE5m2;
        if (e5m2_a) {
            if (e5m2_b) {
                ptx::mma_m16n8k32_e5m2(d.v, a, b);
            } else {
                ptx::mma_m16n8k32_e5m2_e4m3(d.v, a, b);
            }
        } else if (e5m2_b) {
            ptx::mma_m16n8k32_e4m3_e5m2(d.v, a, b);
        } else {
            ptx::mma_m16n8k32_e4m3(d.v, a, b);
        }
    }
};
#else
struct MathFp8 : MathF16 {};
#endif

#if RTK_HAS_BLOCK_SCALED_MMA
// Products that take block scales: kScaleVector of them per row and product. `word`: see ptx/mma_scaled.cuh.
#define RTK_SCALED_PRODUCT(name, bits, vector, instruction)                                                             \
    struct name {                                                                                                       \
        using Sums = FloatSums;                                                                                         \
        static constexpr int kBits = bits, kScaleVector = vector;                                                       \
        RTK_DEVICE static void multiply(Sums& d, const u32(&a)[4], const u32(&b)[2], u32 word_a, u32 word_b, int byte,  \
                                        int block_m, int block_n) {                                                     \
            ptx::instruction(d.v, a, b, word_a, word_b, byte, block_m % 2, block_n % 4);                                \
        }                                                                                                               \
    };
RTK_SCALED_PRODUCT(MathMxFp8, 8, 1, mma_m16n8k32_e4m3_e8m0)
RTK_SCALED_PRODUCT(MathMxFp4, 4, 2, mma_m16n8k64_e2m1_e8m0)
RTK_SCALED_PRODUCT(MathNvFp4, 4, 4, mma_m16n8k64_e2m1_ue4m3)
#undef RTK_SCALED_PRODUCT
#endif

template <typename Math>
RTK_DEVICE constexpr int scale_vector(...) {
    return 0;
}
template <typename Math, int kVector = Math::kScaleVector>
RTK_DEVICE constexpr int scale_vector(int) {
    return kVector;
}

// ---- conversions ----------------------------------------------------------------------------------------------------

inline constexpr u32 kMinusZeros = 0x80008000u;  // the third operand of a multiply-add that only multiplies

template <bool kBf16>
RTK_DEVICE u32 fma_pair(u32 a, u32 b, u32 c) {
    return kBf16 ? ptx::fma_bf16x2(a, b, c) : ptx::fma_f16x2(a, b, c);
}

RTK_DEVICE constexpr u32 both_halves(u32 half) { return half * 0x10001u; }

// Bytes i and i + 1 of a word as the upper bytes of two halves.
template <int kFirst>
RTK_DEVICE u32 upper_bytes(u32 word) {
    return __byte_perm(word, 0u, kFirst == 0 ? 0x1404 : 0x3424);
}

// Words of four 8-bit floats. The exponent field is moved to that of the 16-bit type, and a multiplication removes the
// difference of the biases: exact, subnormals included. NaN, and infinities of e5m2, are rare and repaired behind one
// branch for all words.
template <bool kBf16, bool kIsE5m2, int N>
RTK_DEVICE void floats_of_bytes(const u32 (&word)[N], u32 (&out)[N][2]) {
    if constexpr (!kBf16 && kIsE5m2) {  // e5m2 is the upper byte of fp16
#pragma unroll
        for (int n = 0; n < N; ++n) out[n][0] = upper_bytes<0>(word[n]), out[n][1] = upper_bytes<2>(word[n]);
        return;
    }
#if RTK_HAS_FP8_CVT
    if constexpr (!kBf16) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            out[n][0] = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(word[n]));
            out[n][1] = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(word[n] >> 16));
        }
        return;
    }
#endif
    constexpr int kShift = kBf16 ? (kIsE5m2 ? 3 : 4) : 1;
    constexpr u32 kMask = both_halves(0x7f00u >> kShift);
    constexpr u32 kTimes = both_halves(kBf16 ? (kIsE5m2 ? 0x7780u : 0x7b80u) : 0x5c00u);  // 2^112, 2^120, 2^8
    constexpr u32 kSpecial = kIsE5m2 ? 0x7c7c7c7cu : 0x7f7f7f7fu, kCarry = kIsE5m2 ? 0x04040404u : 0x01010101u;
    u32 special = 0u;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        special |= ((word[n] & kSpecial) + kCarry) & 0x80808080u;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 bytes = i == 0 ? upper_bytes<0>(word[n]) : upper_bytes<2>(word[n]);
            out[n][i] = fma_pair<kBf16>((bytes >> kShift & kMask) | (bytes & kMinusZeros), kTimes, kMinusZeros);
        }
    }
    if (special != 0u) {
        constexpr u32 kSet = kBf16 && kIsE5m2 ? 0x7f80u : 0x7fffu;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const u32 here = ((word[n] & kSpecial) + kCarry) & 0x80808080u;
            out[n][0] |= (upper_bytes<0>(here) >> 15) * kSet;
            out[n][1] |= (upper_bytes<2>(here) >> 15) * kSet;
        }
    }
}

// Four 8-bit integers, through the mantissa of a number large enough that its last bit counts ones.
template <bool kBf16, bool kIsSigned>
RTK_DEVICE void integers_of_bytes(u32 word, u32 (&out)[2]) {
    if constexpr (kIsSigned) word ^= 0x80808080u;
    if constexpr (kBf16) {
        const float minus = kIsSigned ? 8388736.0f : 8388608.0f;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 + i)) - minus;
        out[0] = ptx::cvt_bf16x2(v[0], v[1]);
        out[1] = ptx::cvt_bf16x2(v[2], v[3]);
    } else {
        constexpr u32 kMinus = both_halves(kIsSigned ? 0xe480u : 0xe400u);  // -1152, -1024
        out[0] = ptx::fma_f16x2(__byte_perm(word, 0x64646464u, 0x4140), both_halves(0x3c00u), kMinus);
        out[1] = ptx::fma_f16x2(__byte_perm(word, 0x64646464u, 0x4342), both_halves(0x3c00u), kMinus);
    }
}

// Elements i and i + 4 of a word, as 16-bit numbers. e2m1 in fp16 comes times 2^-14 if kRaw.
template <bool kBf16, int kKindOf, bool kRaw>
RTK_DEVICE u32 pair_of_nibbles(u32 word, int i) {
    if constexpr (kKindOf == kE2m1) {
        const u32 top = word << (12 - 4 * i);
        const u32 bits = (top >> (kBf16 ? 6 : 3) & both_halves(kBf16 ? 0x01c0u : 0x0e00u)) | (top & kMinusZeros);
        if constexpr (!kBf16 && kRaw) return bits;
        return fma_pair<kBf16>(bits, both_halves(kBf16 ? 0x7e80u : 0x7400u), kMinusZeros);  // times 2^126, 2^14
    } else {
        constexpr bool kIsSigned = kKindOf == kInt4;
        constexpr u32 kBase = (kBf16 ? 0x4300u : 0x6400u) | (kIsSigned ? 8u : 0u);  // 128 or 1024, and the sign flipped
        const u32 bits = (word >> (4 * i) & 0x000f000fu) ^ both_halves(kBase);
        return fma_pair<kBf16>(bits, both_halves(kBf16 ? 0x3f80u : 0x3c00u), both_halves(kBase | 0x8000u));
    }
}

template <bool kBf16, int kKindOf, bool kOrdered, bool kRaw>
RTK_DEVICE void numbers_of_nibbles(u32 word, u32 (&out)[4]) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = pair_of_nibbles<kBf16, kKindOf, kRaw>(word, i);
    if constexpr (kOrdered) {
        out[0] = __byte_perm(pair[0], pair[1], 0x5410);
        out[1] = __byte_perm(pair[2], pair[3], 0x5410);
        out[2] = __byte_perm(pair[0], pair[1], 0x7632);
        out[3] = __byte_perm(pair[2], pair[3], 0x7632);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = pair[i];
    }
}

// Eight 4-bit integers as bytes; signed ones times 16, which avoids sign extension.
template <bool kIsSigned, bool kOrdered>
RTK_DEVICE void bytes_of_nibbles(u32 word, u32 (&out)[2]) {
    constexpr u32 kMask = kIsSigned ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    const u32 low = (kIsSigned ? word << 4 : word) & kMask, high = (kIsSigned ? word : word >> 4) & kMask;
    out[0] = kOrdered ? __byte_perm(low, high, 0x5140) : low;
    out[1] = kOrdered ? __byte_perm(low, high, 0x7362) : high;
}

// Words of codes as words of the product's type. kRaw: see pair_of_nibbles.
template <typename Code, typename Math, bool kOrdered, bool kRaw, int N>
RTK_DEVICE void expand_words(const u32 (&word)[N], int kind, u32 (&out)[N][Math::kBits / CodeTraits<Code>::kBits]) {
    using Traits = CodeTraits<Code>;
    constexpr bool kBf16 = is_same<Math, MathBf16>::value;
    const auto each = [&](const auto& convert) {
#pragma unroll
        for (int n = 0; n < N; ++n) convert(word[n], out[n]);
    };
    if constexpr (Math::kBits == Traits::kBits) {
        each([](u32 w, auto& to) { to[0] = w; });
    } else if constexpr (Math::kBits == 8) {
        each([](u32 w, auto& to) { bytes_of_nibbles<Traits::kSigned, kOrdered>(w, to); });
    } else if constexpr (Traits::kBits == 8) {
        switch (Traits::kKind < 0 ? kind : Traits::kKind) {
            case kE4m3: floats_of_bytes<kBf16, false>(word, out); break;
            case kE5m2: floats_of_bytes<kBf16, true>(word, out); break;
            case kInt8: each([](u32 w, auto& to) { integers_of_bytes<kBf16, true>(w, to); }); break;
            default: each([](u32 w, auto& to) { integers_of_bytes<kBf16, false>(w, to); }); break;
        }
    } else {
        switch (Traits::kKind < 0 ? kind : Traits::kKind) {
            case kInt4: each([](u32 w, auto& to) { numbers_of_nibbles<kBf16, kInt4, kOrdered, kRaw>(w, to); }); break;
            case kUint4: each([](u32 w, auto& to) { numbers_of_nibbles<kBf16, kUint4, kOrdered, kRaw>(w, to); }); break;
            default: each([](u32 w, auto& to) { numbers_of_nibbles<kBf16, kE2m1, kOrdered, kRaw>(w, to); }); break;
        }
    }
}

// The power of two by which the product of two such operands is too large (negative: too small).
template <typename Code, typename Math, bool kRaw>
RTK_DEVICE constexpr int excess_of() {
    if (CodeTraits<Code>::kKind == kInt4 && Math::kBits == 8) return 4;
    if (CodeTraits<Code>::kKind == kE2m1 && kRaw && !is_same<Math, MathBf16>::value) return -14;
    return 0;
}

}  // namespace rtk
