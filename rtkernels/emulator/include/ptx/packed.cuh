// Host version of cuda_src/ptx/packed.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// kInfinity: the bits of infinity, above which magnitudes are NaN.
template <u32 kInfinity>
RTK_DEVICE u32 finite_or_nan_half(u32 v) {
    return (v & 0x7fffu) < kInfinity ? v : 0x7fffu;
}
template <u32 kInfinity>
RTK_DEVICE u32 max_magnitude_half(u32 a, u32 b) {
    const u32 magnitude = b & 0x7fffu;
    return magnitude > kInfinity || magnitude < a ? a : magnitude;
}

// Bits of a float in the order of the floats, NaN below all of them.
template <u32 kInfinity>
RTK_DEVICE int rank_of_half(u32 v) {
    const int magnitude = static_cast<int>(v & 0x7fffu);
    if (magnitude > static_cast<int>(kInfinity)) return -0x10000;
    return (v & 0x8000u) != 0u ? -1 - magnitude : magnitude;
}
template <u32 kInfinity>
RTK_DEVICE u32 max_half(u32 a, u32 b) {
    const int rank_a = rank_of_half<kInfinity>(a), rank_b = rank_of_half<kInfinity>(b);
    if (rank_a == rank_b && rank_a == -0x10000) return 0x7fffu;
    return rank_a < rank_b ? b : a;
}

template <u32 kInfinity>
RTK_DEVICE u32 max_nan_half(u32 a, u32 b) {
    return (a & 0x7fffu) > kInfinity || (b & 0x7fffu) > kInfinity ? 0x7fffu : max_half<kInfinity>(a, b);
}

#define RTK_EMU_PACKED(type, infinity)                                                                              \
    RTK_DEVICE u32 finite_or_nan_##type(u32 v) {                                                                    \
        return finite_or_nan_half<infinity>(v & 0xffffu) | (finite_or_nan_half<infinity>(v >> 16) << 16);           \
    }                                                                                                               \
    RTK_DEVICE u32 max_magnitude_##type(u32 a, u32 b) {                                                             \
        return max_magnitude_half<infinity>(a & 0xffffu, b & 0xffffu) |                                             \
               (max_magnitude_half<infinity>(a >> 16, b >> 16) << 16);                                              \
    }                                                                                                               \
    RTK_DEVICE u32 max_##type(u32 a, u32 b) {                                                                       \
        return max_half<infinity>(a & 0xffffu, b & 0xffffu) | (max_half<infinity>(a >> 16, b >> 16) << 16);         \
    }                                                                                                               \
    RTK_DEVICE u32 max_nan_##type(u32 a, u32 b) {                                                                   \
        return max_nan_half<infinity>(a & 0xffffu, b & 0xffffu) | (max_nan_half<infinity>(a >> 16, b >> 16) << 16); \
    }
RTK_EMU_PACKED(bf16x2, 0x7f80u)
RTK_EMU_PACKED(f16x2, 0x7c00u)
#undef RTK_EMU_PACKED

RTK_DEVICE u32 max_magnitudes_bf16x2(u32 a, u32 b) {
    return max_bf16x2(a & 0x7fff7fffu, b & 0x7fff7fffu) | ((a ^ b) & 0x80008000u);
}

// Products of two such numbers and their sum with a third are exact in double precision except for sums of very
// different magnitudes, where double rounding does not change the result for these operands.
RTK_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int i = 0; i < 32; i += 16) {
        auto value = [&](u32 v) { return static_cast<double>(emu::bf16_to_f32(v >> i & 0xffffu)); };
        out |= emu::f32_to_bf16(static_cast<float>(value(a) * value(b) + value(c))) << i;
    }
    return out;
}
RTK_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int i = 0; i < 32; i += 16) {
        auto value = [&](u32 v) { return static_cast<double>(emu::f16_to_f32(v >> i & 0xffffu)); };
        out |= emu::f32_to_f16(static_cast<float>(value(a) * value(b) + value(c))) << i;
    }
    return out;
}

}  // namespace rtk::ptx
