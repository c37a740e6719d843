// Host version of cuda_src/ptx/wgmma_attention.cuh.
#pragma once
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk::ptx {

template <typename T, bool kAcrossA, bool kAcrossB, int N>
RTK_DEVICE void wgmma_ss(float (&d)[N], u64 a, u64 b, u32 add) {
    EmulatedProduct product{};
    product.sums = d, product.eights = N / 4, product.a = emulated_matrix(a), product.b = emulated_matrix(b);
    product.across_a = kAcrossA, product.across = kAcrossB, product.add = add != 0;
    product.half = !is_same<T, bf16>::value;
    emulated_products_push(product);
}

template <typename T, bool kAcrossB, int N>
RTK_DEVICE void wgmma_rs(float (&d)[N], const u32 (&a)[4], u64 b, u32 add) {
    wgmma_registers<T, kAcrossB>(d, a, b, add);
}

template <typename A, typename B, typename Sum>
void emulated_codes_product(const EmulatedProduct& p) {
    const int t = static_cast<int>(emu::lane()) % 4;
    Sum* sums = reinterpret_cast<Sum*>(p.sums);
    for (int j = 0; j < p.eights; ++j)
        for (int c = 0; c < 2; ++c) {
            double sum[2] = {0.0, 0.0};
            for (int k = 0; k < 32; ++k) {
                const double b = emulated_element<B, false>(p.b, 8 * j + 2 * t + c, k);
                for (int r = 0; r < 2; ++r) sum[r] += emulated_element<A>(p.left[r][k / 4] >> 8 * (k % 4)) * b;
            }
            for (int r = 0; r < 2; ++r) {
                Sum& d = sums[4 * j + 2 * r + c];
                d = static_cast<Sum>((p.add ? static_cast<double>(d) : 0.0) + sum[r]);
            }
        }
}

template <typename A, typename B, typename Sum, int N>
RTK_DEVICE void emulated_rs_codes(Sum (&d)[N], const u32 (&a)[4], u64 b, u32 add, RTK_EMU_CALLER) {
    EmulatedProduct product{};
    product.sums = reinterpret_cast<float*>(d), product.eights = N / 4, product.b = emulated_matrix(b);
    product.add = add != 0, product.make = emulated_codes_product<A, B, Sum>;
    emulated_left(product, a, RTK_EMU_SITE("wgmma_rs_codes"));
    emulated_products_push(product);
}
template <int N>
RTK_DEVICE void wgmma_rs_e4m3(float (&d)[N], const u32 (&a)[4], u64 b, u32 add) {
    emulated_rs_codes<e4m3, e4m3>(d, a, b, add);
}
template <int N>
RTK_DEVICE void wgmma_rs_u8_s8(i32 (&d)[N], const u32 (&a)[4], u64 b, u32 add) {
    emulated_rs_codes<u8, s8>(d, a, b, add);
}

}  // namespace rtk::ptx
