// Shared by the generic kernels of gated linear units: element type and activation known at run time, four columns of a
// row at a time.
#pragma once
#include "act/activations.cuh"
#include "act/glu_fp8_counts.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kFour = 4;

// The `type` arguments.
inline constexpr int kBf16 = 0, kFp16 = 1, kFp32 = 2;

// Four elements as stored in memory. FP32: fp32, otherwise one of the 16-bit types.
template <bool FP32>
using Four = Raw<(FP32 ? 16 : 8)>;

// A thread's four columns of a row of the gradient of [gate | up], [2 * cols]. The first `split` belong to gate and the
// others to up; the inputs of the former begin at column `first`, those of the latter `back` elements before.
struct Halves {
    int split;
    i64 first, back;

    // `column`: the first of the four.
    RTK_DEVICE static Halves of(i64 column, i64 cols) {
        const int split = static_cast<int>(min(max(cols - column, static_cast<i64>(0)), static_cast<i64>(kFour)));
        return {split, split > 0 ? column : column - cols, split > 0 ? cols : 0};
    }
};

// Four elements of a row. `columns`: how many exist; the others are 0. `words`: in one access. Otherwise, those from
// `split` on are read `back` elements before their position.
template <bool FP32>
RTK_DEVICE Four<FP32> load_four(const void* x, i64 element, bool words, int columns, int split = kFour, i64 back = 0) {
    constexpr int kBytes = FP32 ? 4 : 2, kPerWord = 4 / kBytes;
    const u8* p = static_cast<const u8*>(x) + element * kBytes;
    Four<FP32> raw;
    clear(raw);
    if (words) {
        if (columns > 0) raw = ptx::ld_keep<kFour * kBytes>(p);
        return raw;
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i)
        if (i < columns) {
            const u8* at = p + (i < split ? i : i - back) * kBytes;
            raw.w[i / kPerWord] |= ptx::ld_keep<kBytes>(at).w[0] << (i % kPerWord * 16);
        }
    return raw;
}

template <bool FP32>
RTK_DEVICE void convert_four(const Four<FP32>& raw, int type, float (&v)[kFour]) {
    if constexpr (FP32) {
        unpack<float, kFour>(raw, v);
    } else if (type == kBf16) {
        unpack<bf16, kFour>(raw, v);
    } else {
        unpack<fp16, kFour>(raw, v);
    }
}

template <typename T>
RTK_DEVICE void store_four(T* p, bool words, int columns, const float (&v)[kFour]) {
    if (words) {
        if (columns > 0) store<T, kFour>(p, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        const float one[1] = {v[i]};
        if (i < columns) store<T, 1>(p + i, one);
    }
}

RTK_DEVICE float load_weight(const void* weight, int type, i64 row) {
    float w[1] = {1.0f};
    if (weight == nullptr) return w[0];
    if (type == kFp32) {
        load_keep<float, 1>(static_cast<const float*>(weight) + row, w);
    } else if (type == kBf16) {
        load_keep<bf16, 1>(static_cast<const bf16*>(weight) + row, w);
    } else {
        load_keep<fp16, 1>(static_cast<const fp16*>(weight) + row, w);
    }
    return w[0];
}

template <typename Act, bool kFast>
RTK_DEVICE void activate(float (&v)[kFour], float (&slope)[kFour]) {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        const ValueSlope at = Act::template at<kFast>(v[i]);
        v[i] = at.value, slope[i] = at.slope;
    }
}

// What is computed: y, or one half of the gradient.
inline constexpr int kForward = 0, kGateGradient = 1, kUpGradient = 2;

// Computes results from gate, up and the incoming gradient, in place of the gate; kind(i) says which one for column i.
// Returns the contribution of the gate gradient's columns to the weight gradient.
template <bool kFast, typename Kind>
RTK_DEVICE float apply_any(int act, const Kind& kind, float (&v)[kFour], const float (&up)[kFour],
                           const float (&dy)[kFour], float w) {
    float slope[kFour], sum = 0.0f;
    switch (act) {
        case 0: activate<Silu, kFast>(v, slope); break;
        case 1: activate<GeluTanh, kFast>(v, slope); break;
        case 2: activate<GeluErf, kFast>(v, slope); break;
        case 3: activate<Relu, kFast>(v, slope); break;
        case 4: activate<Relu2, kFast>(v, slope); break;
        case 5: activate<Sigmoid, kFast>(v, slope); break;
        case 6: activate<Identity, kFast>(v, slope); break;
        case 7: activate<SwigluOai, kFast>(v, slope); break;
        default: activate<QuickGelu, kFast>(v, slope); break;
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        ValueSlope other = {up[i], 1.0f};
        if (act == 7) other = partner<SwigluOai>(up[i]);
        const float along = kind(i) == kForward ? w : dy[i] * w, product = dy[i] * v[i] * other.value;
        v[i] = along * (kind(i) == kGateGradient ? slope[i] : v[i]) *
               (kind(i) == kUpGradient ? other.slope : other.value);
        sum += kind(i) == kGateGradient ? product : 0.0f;
    }
    return sum;
}

}  // namespace rtk
