// Elements of a type known at run time, one at a time: for tensors whose rows do not allow wider accesses. The branches
// are uniform across a launch.
#pragma once
#include "common/convert.cuh"
#include "common/vec.cuh"

namespace rtk {

// The `type` arguments of kernels.
inline constexpr int kAnyBf16 = 0, kAnyFp16 = 1, kAnyFp32 = 2;

RTK_DEVICE float load_any(const void* x, int type, i64 at) {
    float v[1];
    if (type == kAnyFp32) {
        load_keep<float, 1>(static_cast<const float*>(x) + at, v);
    } else if (type == kAnyBf16) {
        load_keep<bf16, 1>(static_cast<const bf16*>(x) + at, v);
    } else {
        load_keep<fp16, 1>(static_cast<const fp16*>(x) + at, v);
    }
    return v[0];
}

RTK_DEVICE void store_any(void* y, int type, i64 at, float value) {
    const float v[1] = {value};
    if (type == kAnyFp32) {
        store<float, 1>(static_cast<float*>(y) + at, v);
    } else if (type == kAnyBf16) {
        store<bf16, 1>(static_cast<bf16*>(y) + at, v);
    } else {
        store<fp16, 1>(static_cast<fp16*>(y) + at, v);
    }
}

}  // namespace rtk
