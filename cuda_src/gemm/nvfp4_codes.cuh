// NVFP4 results: 16 values share a scale in e4m3 (never negative), amax / 6 rounded to nearest even; values divided by it
// become e2m1 codes: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, nearest, ties to the code whose lowest bit is 0.
#pragma once
#include "common/convert.cuh"

namespace rtk {

// amax: finite, not negative.
RTK_DEVICE u32 nvfp4_scale(float amax) { return encode_e4m3(amax / 6.0f) & 0x7fu; }

// The factor of values; with a scale of 0 it is 0.
RTK_DEVICE float nvfp4_inverse(u32 scale) { return scale == 0u ? 0.0f : 1.0f / decode_e4m3(scale); }

// Infinities become the largest code, and so does NaN, which e2m1 cannot represent.
RTK_DEVICE u32 e2m1_code(float v) {
    const float x = fabsf(v);
    u32 code = 0u;
    code += !(x <= 0.25f);
    code += !(x < 0.75f);
    code += !(x <= 1.25f);
    code += !(x < 1.75f);
    code += !(x <= 2.5f);
    code += !(x < 3.5f);
    code += !(x <= 5.0f);
    return code | (__float_as_uint(v) >> 28 & 8u);
}

}  // namespace rtk
