// The end of the skinny product: turns sums into results.
#pragma once
#include "common/math.cuh"
#include "common/vec.cuh"

namespace rtk {

enum SkinnyTypes { kTypeBf16, kTypeFp16, kTypeFp32, kTypeInt32 };
enum SkinnyActivation { kActNone, kActRelu, kActSilu, kActGeluTanh, kActGelu };

RTK_DEVICE float skinny_load(const void* p, i64 i, int type) {
    if (type == kTypeFp32) return static_cast<const float*>(p)[i];
    const u16 bits = static_cast<const u16*>(p)[i];
    return type == kTypeBf16 ? __uint_as_float(static_cast<u32>(bits) << 16) : ptx::cvt_f16_to_f32(bits);
}

// NaN stays NaN. Uses the library's functions, because results may be fp32 and there are few of them.
RTK_DEVICE float skinny_activation(float x, int act) {
    if (act == kActRelu) return x <= 0.0f ? 0.0f : x;
    if (act == kActSilu) return sigmoid_gate<false>(x, x).product;
    if (act == kActGeluTanh) return sigmoid_gate<false>(x, x * (1.5957691216057308f + 0.07135481627260025f * x * x)).product;
    if (act == kActGelu) return x * normal<false>(x).below;
    return x;
}

// Where results go, and the steps between a scaled sum and memory; gemm_cluster.cu uses it, too.
struct SkinnyStore {
    const void* add;
    void* out;
    i64 out_pitch, add_pitch;
    int add_type, out_type, act;
    bool accumulate, gated;

    // `up`: the factor of a gated result.
    RTK_DEVICE void put(i64 token, i64 column, float v, float up) const {
        if (add != nullptr) v += skinny_load(add, token * add_pitch + column, add_type);
        v = skinny_activation(v, act);
        if (gated) v *= up;
        const i64 at = token * out_pitch + column;
        if (accumulate) v += skinny_load(out, at, out_type);
        write(at, v);
    }

    RTK_DEVICE void write(i64 at, float v) const {
        const float one[1] = {v};
        if (out_type == kTypeFp32) {
            static_cast<float*>(out)[at] = v;
        } else if (out_type == kTypeBf16) {
            store<bf16, 1>(static_cast<bf16*>(out) + at, one);
        } else {
            store<fp16, 1>(static_cast<fp16*>(out) + at, one);
        }
    }
};

// Turns a finished sum (fp32, or int32 of integers) into a result.
struct SkinnyResult {
    const float* global_scale;  // null, or one number, or two of a gated product
    const float* scale_a;       // of tokens, null without
    const float* scale_b;       // of weight rows
    i64 a_step;                 // from scale to scale of tokens, 0 if one serves all
    i64 b_step;
    const void* bias;
    i64 n;
    float factor;
    int global_step;  // 1 if the second half of a gated product has a scale of its own
    int bias_type;
    bool integer;
    SkinnyStore results;

    // Operands of a weight row (of 2n, if gated), loaded when the block starts and used when it ends.
    struct OfRow {
        float scale, global, bias;
    };
    RTK_DEVICE OfRow of_row(i64 row) const {
        OfRow found = {1.0f, 1.0f, 0.0f};
        if (scale_b != nullptr) found.scale = scale_b[row * b_step];
        if (global_scale != nullptr) found.global = global_scale[row >= n ? global_step : 0];
        if (bias != nullptr) found.bias = skinny_load(bias, row, bias_type);
        return found;
    }

    // `row`: factor and addend of the sum's row, `up_row`: of its counterpart.
    RTK_DEVICE void put(int token, i64 column, float sum, float up, float2 row, float2 up_row) const {
        if (results.out_type == kTypeInt32) {
            static_cast<i32*>(results.out)[token * results.out_pitch + column] = __float_as_int(sum);
            return;
        }
        const float of_token = scale_a == nullptr ? 1.0f : scale_a[token * a_step];
        results.put(token, column, value(sum, row, of_token), results.gated ? value(up, up_row, of_token) : 1.0f);
    }

   private:
    RTK_DEVICE float value(float sum, float2 row, float of_token) const {
        return (integer ? static_cast<float>(__float_as_int(sum)) : sum) * row.x * of_token + row.y;
    }
};

}  // namespace rtk
