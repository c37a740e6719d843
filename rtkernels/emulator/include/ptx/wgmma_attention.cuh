// Host version of cuda_src/ptx/wgmma_attention.cuh.
#pragma once
#include "ptx/wgmma.cuh"

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
    static_assert(kAcrossB, "the only form that the emulator knows");
    wgmma_registers<T>(d, a, b, add);
}

}  // namespace rtk::ptx
