// Elements of floating-point and integer types: values in the type that arithmetic uses (float, or i64 for integers and
// bool), and stores of a type known at run time, one element at a time.
#pragma once
#include "common/vec.cuh"

namespace rtk {

template <typename T>
struct value_of {
    using type = i64;
};
template <>
struct value_of<bf16> {
    using type = float;
};
template <>
struct value_of<fp16> {
    using type = float;
};
template <>
struct value_of<float> {
    using type = float;
};

template <typename T>
using ValueOf = typename value_of<T>::type;
template <typename T>
inline constexpr bool kIsFloat = is_same<typename value_of<T>::type, float>::value;

template <typename T, int N>
RTK_DEVICE void values(const Raw<sizeof(T) * N>& raw, float (&v)[N]) {
    unpack<T, N>(raw, v);
}

template <typename T, int N>
RTK_DEVICE void values(const Raw<sizeof(T) * N>& raw, i64 (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (sizeof(T) == 8) {
            v[i] = static_cast<i64>(static_cast<u64>(raw.w[2 * i + 1]) << 32 | raw.w[2 * i]);
        } else if constexpr (sizeof(T) == 4) {
            v[i] = static_cast<i32>(raw.w[i]);
        } else {
            static_assert(is_same<T, u8>::value, "u8, i32 or i64");
            v[i] = raw.w[i / 4] >> (i % 4 * 8) & 0xffu;
        }
    }
}

// The `type` arguments of kernels that store (rtkernels/ops/shared/strided.py: STORED).
inline constexpr int kStoreBf16 = 0, kStoreFp16 = 1, kStoreFp32 = 2, kStoreI64 = 3, kStoreI32 = 4, kStoreU8 = 5;

RTK_DEVICE void store_value(void* y, int type, i64 at, float value) {
    const float v[1] = {value};
    if (type == kStoreFp32) {
        store<float, 1>(static_cast<float*>(y) + at, v);
    } else if (type == kStoreBf16) {
        store<bf16, 1>(static_cast<bf16*>(y) + at, v);
    } else {
        store<fp16, 1>(static_cast<fp16*>(y) + at, v);
    }
}

RTK_DEVICE void store_value(void* y, int type, i64 at, i64 value) {
    if (type == kStoreI64) {
        static_cast<i64*>(y)[at] = value;
    } else if (type == kStoreI32) {
        static_cast<i32*>(y)[at] = static_cast<i32>(value);
    } else {
        static_cast<u8*>(y)[at] = static_cast<u8>(value);
    }
}

}  // namespace rtk
