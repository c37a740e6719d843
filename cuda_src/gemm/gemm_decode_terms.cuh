// Options and terms of products for decoding steps (gemm_stream.cu, gemm_decode.cu).
#pragma once
#include "gemm/gemm_skinny_finish.cuh"

namespace rtk {

inline constexpr i64 kDecodeGated = 1, kConstantWeights = 2, kSignedCodes = 4, kScaleByRow = 8;

// What a sum is multiplied by, and what is added to it: first to the sum, then to the result.
struct DecodeTerms {
    float scale, bias, residual;
};

// Not inlined, like the activation below: rare code amid the common path takes long to fetch.
__device__ __noinline__ DecodeTerms decode_terms(const float* scale, const void* bias, const void* residual, i64 scale_at,
                                                 int row, i64 at, int types) {
    DecodeTerms terms = {1.0f, 0.0f, 0.0f};
    if (scale != nullptr) terms.scale = scale[scale_at];
    if (bias != nullptr) terms.bias = skinny_load(bias, row, types & 15);
    if (residual != nullptr) terms.residual = skinny_load(residual, at, types >> 4 & 15);
    return terms;
}

RTK_DEVICE float decode_number(u32 bits, int type) {
    if (type == kTypeFp32) return __uint_as_float(bits);
    return type == kTypeBf16 ? __uint_as_float(bits << 16) : ptx::cvt_f16_to_f32(static_cast<u16>(bits));
}

__device__ __noinline__ float decode_activation(float x, int act) { return skinny_activation(x, act); }

}  // namespace rtk
