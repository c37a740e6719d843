// The end of the skinny product: sums of a tile, in shared memory or in parts in global memory, to results.
#pragma once
#include "common/math.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kSkinnySumPitch = 132;  // words from token to token of a tile's sums in shared memory

enum SkinnyTypes { kTypeBf16, kTypeFp16, kTypeFp32, kTypeInt32 };
enum SkinnyActivation { kActNone, kActRelu, kActSilu, kActGeluTanh, kActGelu };

RTK_DEVICE float skinny_load(const void* p, i64 i, int type) {
    if (type == kTypeFp32) return static_cast<const float*>(p)[i];
    const u16 bits = static_cast<const u16*>(p)[i];
    return type == kTypeBf16 ? __uint_as_float(static_cast<u32>(bits) << 16) : ptx::cvt_f16_to_f32(bits);
}

// NaN stays NaN. The library's functions, as results may be fp32 and there are few of them.
RTK_DEVICE float skinny_activation(float x, int act) {
    if (act == kActRelu) return x <= 0.0f ? 0.0f : x;
    if (act == kActSilu) return sigmoid_gate<false>(x, x).product;
    if (act == kActGeluTanh) return sigmoid_gate<false>(x, x * (1.5957691216057308f + 0.07135481627260025f * x * x)).product;
    if (act == kActGelu) return x * normal<false>(x).below;
    return x;
}

// Sums of 4 neighbouring weight rows for a token, fp32 or, of integers, int32.
struct SkinnySums {
    float of[4];
};

struct SkinnyResult {
    const float* global_scale;  // null, or one number, or two of a gated product
    const float* scale_a;       // of tokens, null without
    const float* scale_b;       // of weight rows
    i64 a_step;                 // from scale to scale of tokens, 0 if one serves all
    i64 b_step;
    const void* bias;
    const void* add;
    void* out;
    i64 n, out_pitch, add_pitch;
    float factor;
    int global_step;  // 1 if the second half of a gated product has a scale of its own
    int bias_type, add_type, out_type, act;
    bool accumulate, gated, integer, paired;  // paired: results may be written four at a time

    // The value of weight row `row` (of 2n, if gated) before the activation.
    RTK_DEVICE float scaled(float sum, int token, i64 row) const {
        float v = (integer ? static_cast<float>(__float_as_int(sum)) : sum) * factor;
        if (scale_b != nullptr) v *= scale_b[row * b_step];
        if (scale_a != nullptr) v *= scale_a[token * a_step];
        if (global_scale != nullptr) v *= global_scale[row >= n ? global_step : 0];
        if (bias != nullptr) v += skinny_load(bias, row, bias_type);
        return v;
    }

    // Results of columns column ... column + 3; `up` counts if gated.
    RTK_DEVICE void put(const SkinnySums& sums, const SkinnySums& up, int token, i64 column) const {
        const i64 at = token * out_pitch + column;
        float value[4];
        if (out_type == kTypeInt32) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (column + i < n) static_cast<i32*>(out)[at + i] = __float_as_int(sums.of[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[i] = 0.0f;
            if (column + i >= n) continue;
            float v = scaled(sums.of[i], token, column + i);
            if (add != nullptr) v += skinny_load(add, token * add_pitch + column + i, add_type);
            v = skinny_activation(v, act);
            if (gated) v *= scaled(up.of[i], token, n + column + i);
            if (accumulate) v += skinny_load(out, at + i, out_type);
            value[i] = v;
        }
        if (out_type == kTypeFp32) {
            store_as<float>(value, at, column);
        } else if (out_type == kTypeBf16) {
            store_as<bf16>(value, at, column);
        } else {
            store_as<fp16>(value, at, column);
        }
    }

   private:
    template <typename T>
    RTK_DEVICE void store_as(const float (&value)[4], i64 at, i64 column) const {
        T* p = static_cast<T*>(out) + at;
        if (paired && column + 4 <= n) {
            store<T, 4>(p, value);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float one[1] = {value[i]};
            if (column + i < n) store<T, 1>(p + i, one);
        }
    }
};

}  // namespace rtk
