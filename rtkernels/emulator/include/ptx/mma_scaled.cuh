// Host version of cuda_src/ptx/mma_scaled.cuh: exact to double precision, rounded once.
#pragma once
#include "common/abi.cuh"

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define RTK_HAS_BLOCK_SCALED_MMA 1
#else
#define RTK_HAS_BLOCK_SCALED_MMA 0
#endif

namespace rtk::ptx {

#if RTK_HAS_BLOCK_SCALED_MMA
// E elements per register, one scale for kBlock elements of k.
template <int E, int kBlock, typename Decode, typename Scale>
RTK_DEVICE void emulated_scaled_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b, int byte,
                                    int pair_a, int lane_b, Decode decode, Scale scale, emu::Site site) {
    const u64 mine[4] = {a[0] | static_cast<u64>(a[1]) << 32, a[2] | static_cast<u64>(a[3]) << 32,
                         b[0] | static_cast<u64>(b[1]) << 32, scale_a | static_cast<u64>(scale_b) << 32};
    u64 all[4][32];
    for (int i = 0; i < 4; ++i) __builtin_memcpy(all[i], emu::gather(0xffffffffu, mine[i], site), sizeof(all[i]));
    const int g = static_cast<int>(emu::lane()) / 4, t = static_cast<int>(emu::lane()) % 4;
    for (int r = 0; r < 2; ++r)
        for (int c = 0; c < 2; ++c) {
            double sum = d[2 * r + c];
            const u32 of_a = static_cast<u32>(all[3][4 * g + 2 * pair_a + r]) >> (8 * byte);
            const u32 of_b = static_cast<u32>(all[3][4 * (2 * t + c) + lane_b] >> 32) >> (8 * byte);
            for (int h = 0; h < 2; ++h)
                for (int k = 0; k < 4; ++k) {
                    const u32 left = static_cast<u32>(all[h][4 * g + k] >> (32 * r));
                    const u32 right = static_cast<u32>(all[2][4 * (2 * t + c) + k] >> (32 * h));
                    const int block = (4 * E * h + E * k) / kBlock;
                    const double both = scale(of_a >> (8 * block) & 0xffu) * scale(of_b >> (8 * block) & 0xffu);
                    for (int i = 0; i < E; ++i)
                        sum += static_cast<double>(decode(left >> (32 / E * i))) * decode(right >> (32 / E * i)) * both;
                }
            d[2 * r + c] = static_cast<float>(sum);
        }
}

RTK_DEVICE double emulated_e8m0(u32 bits) {
    return bits == 255u ? __builtin_nan("") : __builtin_ldexp(1.0, static_cast<int>(bits) - 127);
}
RTK_DEVICE double emulated_e2m1(u32 bits) {
    const double values[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    return (bits & 8u) != 0u ? -values[bits & 7u] : values[bits & 7u];
}

#define RTK_EMU_MMA_SCALED(name, E, kBlock, decoded, scaled)                                                        \
    RTK_DEVICE void name(float(&d)[4], const u32(&a)[4], const u32(&b)[2], u32 scale_a, u32 scale_b, int byte,      \
                         int pair_a, int lane_b, RTK_EMU_CALLER) {                                                  \
        emulated_scaled_mma<E, kBlock>(                                                                             \
            d, a, b, scale_a, scale_b, byte, pair_a, lane_b, [](u32 bits) { return decoded; },                      \
            [](u32 bits) { return scaled; }, RTK_EMU_SITE(#name));                                                  \
    }
RTK_EMU_MMA_SCALED(mma_m16n8k32_e4m3_e8m0, 4, 32, emu::e4m3_to_f32(bits & 0xffu), emulated_e8m0(bits))
RTK_EMU_MMA_SCALED(mma_m16n8k64_e2m1_e8m0, 8, 32, emulated_e2m1(bits), emulated_e8m0(bits))
RTK_EMU_MMA_SCALED(mma_m16n8k64_e2m1_ue4m3, 8, 16, emulated_e2m1(bits), static_cast<double>(emu::e4m3_to_f32(bits & 0x7fu)))
#undef RTK_EMU_MMA_SCALED
#endif

}  // namespace rtk::ptx
