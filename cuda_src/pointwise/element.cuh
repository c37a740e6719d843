// Elements of any dtype between memory and the type that arithmetic on them uses: float for the floating types, i32 for
// integers up to 32 bits and for bool (0 or 1), i64 for int64. A conversion between dtypes rounds, wraps or tests for zero
// as torch's does.
#pragma once
#include "common/convert.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

using i8 = signed char;
using i16 = short;
using boolean = bool;

template <typename T>
struct ElementTraits {
    using Compute = i32;
    static constexpr bool kFloat = false;
};
template <>
struct ElementTraits<i64> {
    using Compute = i64;
    static constexpr bool kFloat = false;
};
struct FloatTraits {
    using Compute = float;
    static constexpr bool kFloat = true;
};
template <>
struct ElementTraits<float> : FloatTraits {};
template <>
struct ElementTraits<bf16> : FloatTraits {};
template <>
struct ElementTraits<fp16> : FloatTraits {};

template <typename T>
using Compute = typename ElementTraits<T>::Compute;

// N consecutive elements as stored in memory.
template <typename T, int N>
struct RawElements {
    static constexpr int kBytes = sizeof(T) * N, kParts = kBytes > 16 ? kBytes / 16 : 1, kEach = N / kParts;
    Raw<kBytes / kParts> part[kParts];

    // `p` is aligned to 16 bytes or to all N of them.
    RTK_DEVICE void load(const T* p) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) part[j] = ptx::ld_stream<kBytes / kParts>(p + j * kEach);
    }

    // The element at `p`, N times.
    RTK_DEVICE void load_repeated(const T* p) {
        const Raw<sizeof(T)> one = ptx::ld_stream<sizeof(T)>(p);
        u32 word = one.w[0];
        if constexpr (sizeof(T) == 1) word = (word & 0xffu) * 0x01010101u;
        if constexpr (sizeof(T) == 2) word = (word & 0xffffu) * 0x00010001u;
#pragma unroll
        for (auto& some : part) {
#pragma unroll
            for (int w = 0; w < static_cast<int>(sizeof(some.w) / 4); ++w) {
                some.w[w] = word;
                if constexpr (sizeof(T) == 8) some.w[w] = one.w[w % 2];
            }
        }
    }

    RTK_DEVICE void unpack_to(Compute<T> (&value)[N]) const {
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
            Compute<T> some[kEach];
            unpack_part(part[j], some);
#pragma unroll
            for (int i = 0; i < kEach; ++i) value[j * kEach + i] = some[i];
        }
    }

    RTK_DEVICE static void unpack_part(const Raw<kBytes / kParts>& raw, Compute<T> (&value)[kEach]) {
        if constexpr (ElementTraits<T>::kFloat) {
            unpack<T, kEach>(raw, value);
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                if constexpr (sizeof(T) == 8) {
                    value[i] = static_cast<i64>(static_cast<u64>(raw.w[2 * i + 1]) << 32 | raw.w[2 * i]);
                } else if constexpr (sizeof(T) == 4) {
                    value[i] = static_cast<i32>(raw.w[i]);
                } else {
                    constexpr int kPerWord = 4 / sizeof(T);
                    const u32 bits = raw.w[i / kPerWord] >> (i % kPerWord * 8 * static_cast<int>(sizeof(T)));
                    if constexpr (is_same<T, bool>::value) {
                        value[i] = (bits & 0xffu) != 0;
                    } else {
                        value[i] = static_cast<T>(bits);
                    }
                }
            }
        }
    }
};

template <typename T, int N>
RTK_DEVICE void load_elements(const T* p, Compute<T> (&value)[N]) {
    RawElements<T, N> raw;
    raw.load(p);
    raw.unpack_to(value);
}

template <typename T>
RTK_DEVICE Compute<T> load_one(const T* p) {
    Compute<T> one[1];
    load_elements<T, 1>(p, one);
    return one[0];
}

template <typename T, int N>
RTK_DEVICE void store_elements(T* p, const Compute<T> (&value)[N]) {
    constexpr int kBytes = sizeof(T) * N;
    if constexpr (kBytes > 16) {
        constexpr int kHalf = N / 2;
        Compute<T> low[kHalf], high[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) low[i] = value[i], high[i] = value[i + kHalf];
        store_elements<T, kHalf>(p, low);
        store_elements<T, kHalf>(p + kHalf, high);
    } else if constexpr (ElementTraits<T>::kFloat) {
        ptx::st<kBytes>(p, pack<T, N>(value));
    } else {
        Raw<kBytes> raw;
#pragma unroll
        for (u32& word : raw.w) word = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (sizeof(T) == 8) {
                raw.w[2 * i] = static_cast<u32>(value[i]);
                raw.w[2 * i + 1] = static_cast<u32>(static_cast<u64>(value[i]) >> 32);
            } else if constexpr (sizeof(T) == 4) {
                raw.w[i] = static_cast<u32>(value[i]);
            } else {
                constexpr int kPerWord = 4 / sizeof(T);
                constexpr u32 kMask = (1u << (8 * sizeof(T))) - 1u;
                const u32 bits = static_cast<u32>(value[i]) & kMask;
                raw.w[i / kPerWord] |= bits << (i % kPerWord * 8 * static_cast<int>(sizeof(T)));
            }
        }
        ptx::st<kBytes>(p, raw);
    }
}

// Converts a value as an element of T would hold it, except for the rounding to 16-bit floats, which a store does.
template <typename T, typename V>
RTK_DEVICE Compute<T> converted(V value) {
    if constexpr (is_same<T, bool>::value) {
        return value != V(0) ? 1 : 0;
    } else if constexpr (ElementTraits<T>::kFloat) {
        return static_cast<float>(value);
    } else if constexpr (is_same<T, u8>::value) {
        return static_cast<u8>(static_cast<i64>(value));
    } else {
        return static_cast<T>(value);
    }
}

// The same for an operand that torch converts to the common dtype T before it computes: with that rounding.
template <typename T, typename From>
RTK_DEVICE Compute<T> promoted(Compute<From> value) {
    if constexpr (is_same<T, From>::value) {
        return value;
    } else if constexpr (ElementTraits<T>::kFloat && sizeof(T) == 2) {
        return round_to<T>(static_cast<float>(value));
    } else {
        return converted<T>(value);
    }
}

// A number from the host: the bits of a double for floating types, else an integer.
template <typename T>
RTK_DEVICE Compute<T> number(i64 bits) {
    if constexpr (ElementTraits<T>::kFloat) {
        return static_cast<float>(__longlong_as_double(bits));
    } else {
        return static_cast<Compute<T>>(bits);
    }
}

}  // namespace rtk
