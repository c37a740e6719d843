// Host version of cuda_src/ptx/wgmma_types.cuh.
#pragma once
#include "ptx/wgmma.cuh"

namespace rtk {

struct s8 {
    u8 bits;
};

}  // namespace rtk

namespace rtk::ptx {

template <typename T>
RTK_DEVICE double emulated_element(u32 bits) {
    if constexpr (is_same<T, bf16>::value) {
        return emu::bf16_to_f32(bits & 0xffffu);
    } else if constexpr (is_same<T, fp16>::value) {
        return emu::f16_to_f32(bits & 0xffffu);
    } else if constexpr (is_same<T, e4m3>::value) {
        return emu::e4m3_to_f32(bits & 0xffu);
    } else if constexpr (is_same<T, e5m2>::value) {
        return emu::e5m2_to_f32(bits & 0xffu);
    } else if constexpr (is_same<T, s8>::value) {
        return static_cast<signed char>(bits);
    } else {
        return bits & 0xffu;
    }
}

// Element (i, k) of an operand: i is its row of m or n. Words of 4 bytes, in memory order.
template <typename T, bool kAcross>
RTK_DEVICE double emulated_element(const EmulatedMatrix& matrix, int i, int k) {
    constexpr int kPerPair = 2 / sizeof(T);  // pair() counts 16-bit elements
    const int row = kAcross ? k : i, column = kAcross ? i : k;
    const u32 word = matrix.pair(row, column / kPerPair & ~1);
    return emulated_element<T>(word >> 8 * sizeof(T) * (static_cast<u32>(column) % (4 / sizeof(T))));
}

template <typename A, typename B, bool kAcrossA, bool kAcrossB, typename Sum>
void emulated_typed_product(const EmulatedProduct& p) {
    constexpr int kDepth = 32 / sizeof(A), kPerWord = 4 / sizeof(A);
    const int lane = static_cast<int>(emu::lane()), t = lane % 4;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    Sum* sums = reinterpret_cast<Sum*>(p.sums);
    double a[2][kDepth];
    for (int r = 0; r < 2; ++r)
        for (int k = 0; k < kDepth; ++k)
            a[r][k] = p.in_registers ? emulated_element<A>(p.left[r][k / kPerWord] >> 8 * sizeof(A) * (k % kPerWord))
                                     : emulated_element<A, kAcrossA>(p.a, row + 8 * r, k);
    for (int j = 0; j < p.eights; ++j)
        for (int c = 0; c < 2; ++c) {
            double sum[2] = {0.0, 0.0};
            for (int k = 0; k < kDepth; ++k) {
                const double b = emulated_element<B, kAcrossB>(p.b, 8 * j + 2 * t + c, k);
                for (int r = 0; r < 2; ++r) sum[r] += a[r][k] * b;
            }
            for (int r = 0; r < 2; ++r) {
                Sum& d = sums[4 * j + 2 * r + c];
                d = static_cast<Sum>((p.add ? static_cast<double>(d) : 0.0) + sum[r]);
            }
        }
}

template <typename A, typename B, bool kAcrossA, bool kAcrossB, typename Sum, int N>
RTK_DEVICE void wgmma_typed(Sum (&d)[N], u64 a, u64 b, u32 add) {
    EmulatedProduct product{};
    product.sums = reinterpret_cast<float*>(d), product.eights = N / 4;
    product.a = emulated_matrix(a), product.b = emulated_matrix(b), product.add = add != 0;
    product.make = emulated_typed_product<A, B, kAcrossA, kAcrossB, Sum>;
    emulated_products_push(product);
}

template <typename A, typename B, int N>
RTK_DEVICE void wgmma_left(float (&d)[N], const u32 (&a)[4], u64 b, u32 add, RTK_EMU_CALLER) {
    EmulatedProduct product{};
    product.sums = d, product.eights = N / 4, product.b = emulated_matrix(b);
    product.in_registers = true, product.add = add != 0;
    emulated_left(product, a, RTK_EMU_SITE("wgmma_left"));
    product.make = emulated_typed_product<A, B, false, false, float>;
    emulated_products_push(product);
}

}  // namespace rtk::ptx
