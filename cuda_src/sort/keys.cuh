// Order-preserving keys: unsigned integers that compare as the elements do. NaN comes last, all NaNs are equal, and so
// are the two zeros; descending order complements keys, so that equal elements keep their order.
#pragma once
#include "common/values.cuh"

namespace rtk {

template <typename T>
struct key_of {
    using type = u32;
    static constexpr int kBits = sizeof(T) * 8;
};
template <>
struct key_of<i64> {
    using type = u64;
    static constexpr int kBits = 64;
};
template <typename T>
using KeyOf = typename key_of<T>::type;

// The key's lowest kBits bits are set.
template <typename T>
RTK_DEVICE KeyOf<T> key_of_raw(const Raw<sizeof(T)>& raw, bool descending) {
    KeyOf<T> k;
    if constexpr (sizeof(T) == 8) {
        k = (static_cast<u64>(raw.w[1]) << 32 | raw.w[0]) ^ 0x8000000000000000ull;
    } else if constexpr (is_same<T, i32>::value) {
        k = raw.w[0] ^ 0x80000000u;
    } else if constexpr (is_same<T, u8>::value) {
        k = raw.w[0] & 0xffu;
    } else {
        constexpr u32 kSign = 1u << (sizeof(T) * 8 - 1), kAll = kSign | (kSign - 1u);
        float v[1];
        values<T, 1>(raw, v);
        const u32 bits = raw.w[0] & kAll;
        k = v[0] != v[0] ? kAll : v[0] == 0.0f ? kSign : bits & kSign ? ~bits & kAll : bits | kSign;
    }
    if (descending) {
        if constexpr (sizeof(T) == 8) {
            k = ~k;
        } else {
            k = ~k & static_cast<u32>((1ull << key_of<T>::kBits) - 1ull);
        }
    }
    return k;
}

template <typename T>
RTK_DEVICE KeyOf<T> key(const T* x, bool descending) {
    return key_of_raw<T>(ptx::ld_keep<sizeof(T)>(x), descending);
}

// One of N elements that were loaded together.
template <typename T, int N>
RTK_DEVICE Raw<sizeof(T)> element(const Raw<sizeof(T) * N>& raw, int i) {
    Raw<sizeof(T)> one;
    if constexpr (sizeof(T) == 8) {
        one.w[0] = raw.w[2 * i], one.w[1] = raw.w[2 * i + 1];
    } else {
        constexpr int kEach = 4 / sizeof(T);
        one.w[0] = raw.w[i / kEach] >> (i % kEach * 8 * sizeof(T));
    }
    return one;
}

}  // namespace rtk
