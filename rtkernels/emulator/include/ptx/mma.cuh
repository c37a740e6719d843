// Host version of cuda_src/ptx/mma.cuh. Products and their sum are exact to double precision and rounded once; the
// hardware keeps fewer bits while it adds, so the last bits of fp32 results differ.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// E elements per register; Decode gives the value of an element's bits, Sum is wide enough for the sum.
template <int E, typename Sum, typename T, typename DecodeA, typename DecodeB>
RTK_DEVICE void emulated_mma(T (&d)[4], const u32 (&a)[4], const u32 (&b)[2], DecodeA decode_a, DecodeB decode_b,
                             emu::Site site) {
    const u64 mine[3] = {a[0] | static_cast<u64>(a[1]) << 32, a[2] | static_cast<u64>(a[3]) << 32,
                         b[0] | static_cast<u64>(b[1]) << 32};
    u64 all[3][32];  // registers of all lanes: a[0..1], a[2..3], b
    for (int i = 0; i < 3; ++i) __builtin_memcpy(all[i], emu::gather(0xffffffffu, mine[i], site), sizeof(all[i]));
    const int g = static_cast<int>(emu::lane()) / 4, t = static_cast<int>(emu::lane()) % 4;
    for (int r = 0; r < 2; ++r)
        for (int c = 0; c < 2; ++c) {
            Sum sum = d[2 * r + c];
            for (int h = 0; h < 2; ++h)
                for (int k = 0; k < 4; ++k) {
                    const u32 left = static_cast<u32>(all[h][4 * g + k] >> (32 * r));
                    const u32 right = static_cast<u32>(all[2][4 * (2 * t + c) + k] >> (32 * h));
                    for (int i = 0; i < E; ++i)
                        sum += static_cast<Sum>(decode_a(left >> (32 / E * i))) * decode_b(right >> (32 / E * i));
                }
            d[2 * r + c] = static_cast<T>(sum);
        }
}

template <int E, typename Sum, typename T, typename Decode>
RTK_DEVICE void emulated_mma(T (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Decode decode, emu::Site site) {
    emulated_mma<E, Sum>(d, a, b, decode, decode, site);
}

#define RTK_EMU_MMA_MIXED(name, E, Sum, T, value_a, value_b)                                                     \
    RTK_DEVICE void name(T(&d)[4], const u32(&a)[4], const u32(&b)[2], RTK_EMU_CALLER) {                         \
        emulated_mma<E, Sum>(                                                                                    \
            d, a, b, [](u32 bits) { return value_a; }, [](u32 bits) { return value_b; }, RTK_EMU_SITE(#name));   \
    }
#define RTK_EMU_MMA(name, E, Sum, T, value)                                                           \
    RTK_DEVICE void name(T(&d)[4], const u32(&a)[4], const u32(&b)[2], RTK_EMU_CALLER) {              \
        emulated_mma<E, Sum>(d, a, b, [](u32 bits) { return value; }, RTK_EMU_SITE(#name));           \
    }
RTK_EMU_MMA(mma_m16n8k16_bf16, 2, double, float, emu::bf16_to_f32(bits & 0xffffu))
RTK_EMU_MMA(mma_m16n8k16_f16, 2, double, float, emu::f16_to_f32(bits & 0xffffu))
RTK_EMU_MMA(mma_m16n8k8_tf32, 1, double, float, emu::tf32_to_f32(bits))
#if RTK_HAS_FP8_CVT
RTK_EMU_MMA(mma_m16n8k32_e4m3, 4, double, float, emu::e4m3_to_f32(bits & 0xffu))
RTK_EMU_MMA(mma_m16n8k32_e5m2, 4, double, float, emu::e5m2_to_f32(bits & 0xffu))
RTK_EMU_MMA_MIXED(mma_m16n8k32_e4m3_e5m2, 4, double, float, emu::e4m3_to_f32(bits & 0xffu), emu::e5m2_to_f32(bits & 0xffu))
RTK_EMU_MMA_MIXED(mma_m16n8k32_e5m2_e4m3, 4, double, float, emu::e5m2_to_f32(bits & 0xffu), emu::e4m3_to_f32(bits & 0xffu))
#endif
#define RTK_EMU_MMA_K8(name, value)                                                                              \
    RTK_DEVICE void name(float(&d)[4], u32 a0, u32 a1, u32 b, RTK_EMU_CALLER) {                                  \
        emulated_mma<2, double>(d, {a0, a1, 0u, 0u}, {b, 0u}, [](u32 bits) { return value; }, RTK_EMU_SITE(#name)); \
    }
RTK_EMU_MMA_K8(mma_m16n8k8_bf16, emu::bf16_to_f32(bits & 0xffffu))
RTK_EMU_MMA_K8(mma_m16n8k8_f16, emu::f16_to_f32(bits & 0xffffu))
RTK_EMU_MMA(mma_m16n8k32_s8, 4, long long, i32, static_cast<signed char>(bits))
RTK_EMU_MMA(mma_m16n8k32_u8, 4, long long, i32, static_cast<int>(bits & 0xffu))
RTK_EMU_MMA_MIXED(mma_m16n8k32_s8_u8, 4, long long, i32, static_cast<signed char>(bits), static_cast<int>(bits & 0xffu))
RTK_EMU_MMA_MIXED(mma_m16n8k32_u8_s8, 4, long long, i32, static_cast<int>(bits & 0xffu), static_cast<signed char>(bits))
RTK_EMU_MMA(mma_m16n8k64_s4, 8, long long, i32, static_cast<int>(bits << 28) >> 28)
RTK_EMU_MMA(mma_m16n8k64_u4, 8, long long, i32, static_cast<int>(bits & 0xfu))
RTK_EMU_MMA_MIXED(mma_m16n8k64_s4_u4, 8, long long, i32, static_cast<int>(bits << 28) >> 28, static_cast<int>(bits & 0xfu))
RTK_EMU_MMA_MIXED(mma_m16n8k64_u4_s4, 8, long long, i32, static_cast<int>(bits & 0xfu), static_cast<int>(bits << 28) >> 28)

RTK_DEVICE void mma_m16n8k16_f16_sums(u32 (&d)[2], const u32 (&a)[4], const u32 (&b)[2], RTK_EMU_CALLER) {
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = emu::f16_to_f32(d[i / 2] >> (16 * (i % 2)) & 0xffffu);
    emulated_mma<2, double>(
        sums, a, b, [](u32 bits) { return emu::f16_to_f32(bits & 0xffffu); }, RTK_EMU_SITE("mma_m16n8k16_f16_sums"));
    for (int r = 0; r < 2; ++r) d[r] = emu::f32_to_f16(sums[2 * r]) | emu::f32_to_f16(sums[2 * r + 1]) << 16;
}

template <int N>
RTK_DEVICE void emulated_ldmatrix(u32 (&r)[N], const void* row, bool transposed, emu::Site site) {
    u64 rows[32];
    __builtin_memcpy(rows, emu::gather(0xffffffffu, reinterpret_cast<u64>(row), site), sizeof(rows));
    const int g = static_cast<int>(emu::lane()) / 4, t = static_cast<int>(emu::lane()) % 4;
    if (static_cast<int>(emu::lane()) < 8 * N) emu::load(row, 16);  // alignment and bounds of this lane's row
    auto element = [&](int matrix, int i, int j) {
        return static_cast<u32>(emu::load(reinterpret_cast<const u16*>(rows[8 * matrix + i]) + j, 2).lo);
    };
    for (int m = 0; m < N; ++m)
        r[m] = transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                          : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
}

RTK_DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row, RTK_EMU_CALLER) {
    emulated_ldmatrix(r, row, false, RTK_EMU_SITE("ldmatrix_x4"));
}
RTK_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row, RTK_EMU_CALLER) {
    emulated_ldmatrix(r, row, true, RTK_EMU_SITE("ldmatrix_x4_trans"));
}
RTK_DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row, RTK_EMU_CALLER) {
    emulated_ldmatrix(r, row, false, RTK_EMU_SITE("ldmatrix_x2"));
}

}  // namespace rtk::ptx
