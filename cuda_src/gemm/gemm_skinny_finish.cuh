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

// Where results go, and what happens to one between its scaled sum and memory; gemm_cluster.cu ends with it, too.
struct SkinnyStore {
    const void* add;
    void* out;
    i64 out_pitch, add_pitch;
    int add_type, out_type, act;
    bool accumulate, gated;

    // `up`: what a gated result is multiplied by.
    RTK_DEVICE void put(i64 token, i64 column, float v, float up) const {
        if (add != nullptr) v += skinny_load(add, token * add_pitch + column, add_type);
        v = skinny_activation(v, act);
        if (gated) v *= up;
        const i64 at = token * out_pitch + column;
        if (accumulate) v += skinny_load(out, at, out_type);
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

// From the sums of a tile, [token][kSkinnySumPitch] in shared memory (fp32, or int32 of integers), to results. A thread has one
// column, whose scale and bias it loads one time.
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

    // What all sums of a weight row (of 2n, if gated) are multiplied by, and what is added.
    struct OfRow {
        float times, plus;
    };
    RTK_DEVICE OfRow of_row(i64 row) const {
        OfRow found = {factor, 0.0f};
        if (scale_b != nullptr) found.times *= scale_b[row * b_step];
        if (global_scale != nullptr) found.times *= global_scale[row >= n ? global_step : 0];
        if (bias != nullptr) found.plus = skinny_load(bias, row, bias_type);
        return found;
    }

    RTK_DEVICE float value(float sum, const OfRow& row, float of_token) const {
        return (integer ? static_cast<float>(__float_as_int(sum)) : sum) * row.times * of_token + row.plus;
    }

    RTK_DEVICE void finish(const float* sums, int m, int tile) const {
        const bool gated = results.gated;
        const int columns = gated ? 64 : 128, own = static_cast<int>(threadIdx.x) % columns;
        const i64 column = static_cast<i64>(tile) * columns + own;
        if (column >= n) return;
        const int row = gated ? own / 16 * 32 + own % 16 : own;  // 16 of the gate, then their counterparts
        const OfRow first = of_row(column), second = gated ? of_row(n + column) : first;
#pragma unroll 1
        for (int token = threadIdx.x / columns; token < m; token += static_cast<int>(blockDim.x) / columns) {
            const float sum = sums[token * kSkinnySumPitch + row];
            if (results.out_type == kTypeInt32) {
                static_cast<i32*>(results.out)[token * results.out_pitch + column] = __float_as_int(sum);
                continue;
            }
            const float of_token = scale_a == nullptr ? 1.0f : scale_a[token * a_step];
            const float up = gated ? value(sums[token * kSkinnySumPitch + row + 16], second, of_token) : 1.0f;
            results.put(token, column, value(sum, first, of_token), up);
        }
    }
};

}  // namespace rtk
