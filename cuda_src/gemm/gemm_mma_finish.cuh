// The end of the mma.sync product: accumulators are in shared memory as fp32 (or int32), [kTileM][kTileN + 8]; scales,
// bias, a matrix to add, an activation or a gate, and the result's type are run-time choices, the same for the whole
// launch.
//
// A thread owns eight neighbouring columns, the same in all of its rows, so column operands are loaded once. All steps
// are fp32 with one rounding at the end: act(sum * scales + bias + add), then plus the old `out`. Quantised results:
// scales are those of common/fp8_scale.cuh for 128 columns, and for 16 columns amax / 6 rounded to e4m3.
#pragma once
#include "act/activations.cuh"
#include "common/fp8_scale.cuh"
#include "common/vec.cuh"
#include "gemm/gemm_mma_scales.cuh"
#include "gemm/nvfp4_codes.cuh"

namespace rtk {

enum MmaType : int { kTypeNone, kTypeBf16, kTypeFp16, kTypeFp32, kTypeInt32, kTypeE4m3, kTypeE5m2, kTypeE2m1 };
enum MmaActivation : int { kActNone, kActRelu, kActSilu, kActGeluTanh, kActGelu };
enum MmaQuantized : int { kQuantizedNot, kQuantized128, kQuantized16 };

RTK_DEVICE float activated(float x, int act) {
    switch (act) {
        case kActRelu: return Relu::at<false>(x).value;
        case kActSilu: return Silu::at<false>(x).value;
        case kActGeluTanh: return GeluTanh::at<false>(x).value;
        case kActGelu: return GeluErf::at<false>(x).value;
        default: return x;
    }
}

// One element of a bf16, fp16 or fp32 matrix. Plain loads, because this launch may write elsewhere in it.
RTK_DEVICE float plain_element(const void* matrix, int type, i64 at) {
    if (type == kTypeFp32) return static_cast<const float*>(matrix)[at];
    const u16 bits = static_cast<const u16*>(matrix)[at];
    return type == kTypeBf16 ? __uint_as_float(static_cast<u32>(bits) << 16) : ptx::cvt_f16_to_f32(bits);
}

// Elements at ... at + 7; `exist` of them are valid, the others are zeros.
RTK_DEVICE void plain_eight(const void* matrix, int type, i64 at, int exist, bool aligned, float (&v)[8]) {
    if (aligned && exist == 8) {
        if (type == kTypeFp32) {
            const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(matrix) + at);
            const float4 lo = p[0], hi = p[1];
            v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w, v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
        } else {
            const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const u16*>(matrix) + at);
            const Raw<16> raw{{words.x, words.y, words.z, words.w}};
            if (type == kTypeBf16) {
                unpack<bf16, 8>(raw, v);
            } else {
                unpack<fp16, 8>(raw, v);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < exist ? plain_element(matrix, type, at + i) : 0.0f;
}

struct MmaFinish {
    void* out;
    void* out_scale;
    const void* bias;
    const void* add;
    const float* global_scale;  // null, one, or one of the gate and one of the other half
    MmaScales scale_a, scale_b;  // with token kNoScale if they are applied elsewhere
    i64 out_pitch, add_pitch, columns, scale_pitch;
    int out_type, bias_type, add_type, act, gate, quantized, global_scales;
    bool accumulate;

    // Operands of columns first ... first + 7 of b's rows.
    RTK_DEVICE void of_columns(i64 first, int exist, float extra, float (&times)[8], float (&plus)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            times[i] = extra, plus[i] = 0.0f;
            if (i < exist) {
                if (scale_b.token != kNoScale) times[i] *= *reinterpret_cast<const float*>(scale_b.of_row(first + i));
                if (bias_type != kTypeNone) plus[i] = plain_element(bias, bias_type, first + i);
            }
        }
    }

    template <int kTileM, int kTileN, int kThreads>
    RTK_DEVICE void run(float* tile, i64 row0, int rows, i64 tile_n, float factor) const {
        constexpr int kPitch = kTileN + 8;
        const int tile_columns = gate ? kTileN / 2 : kTileN, lanes = tile_columns / 8;
        const int column = static_cast<int>(threadIdx.x) % lanes * 8;
        const i64 n = tile_n * tile_columns + column;
        const int exist = static_cast<int>(min(max(columns - n, static_cast<i64>(0)), static_cast<i64>(8)));
        const i64 out_bytes = out_type == kTypeFp32 || out_type == kTypeInt32 ? 4 : 2;
        const bool out_aligned = ((reinterpret_cast<u64>(out) | static_cast<u64>(out_pitch * out_bytes)) & 15u) == 0u;
        const i64 add_bytes = add_type == kTypeFp32 ? 4 : 2;
        const bool add_aligned = ((reinterpret_cast<u64>(add) | static_cast<u64>(add_pitch * add_bytes)) & 15u) == 0u;
        const float global = global_scales == 0 ? 1.0f : global_scale[0];
        float times[8], plus[8], up_times[8], up_plus[8];
        of_columns(n, exist, factor * global, times, plus);
        if (gate) of_columns(columns + n, exist, factor * (global_scales == 2 ? global_scale[1] : global), up_times, up_plus);
        const int step = kThreads / lanes;
        // All threads run the same number of rounds, because results of a row are combined by shuffles.
#pragma unroll 1
        for (int first = 0; first < kTileM; first += step) {
            const int row = first + static_cast<int>(threadIdx.x) / lanes;
            if (first >= rows) break;
            const bool exists = row < rows;
            const int here = exists ? exist : 0;
            float* from = tile + row * kPitch + (gate ? 2 * column : column);
            if (out_type == kTypeInt32) {
                if (exists) put_integers(row0 + row, n, here, reinterpret_cast<const i32*>(from));
                continue;
            }
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = from[i];
            const float scale = scale_a.token != kNoScale && exists ? *reinterpret_cast<const float*>(scale_a.of_row(row0 + row))
                                                                          : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = v[i] * scale * times[i] + plus[i];
            if (gate) {
                activate(v, gate, from);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] *= from[8 + i] * scale * up_times[i] + up_plus[i];
            }
            if (add_type != kTypeNone && here > 0) {
                float more[8];
                plain_eight(add, add_type, (row0 + row) * add_pitch + n, here, add_aligned, more);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] += more[i];
            }
            if (act != kActNone) activate(v, act, from);
            if (accumulate && here > 0) {
                float more[8];
                plain_eight(out, out_type, (row0 + row) * out_pitch + n, here, out_aligned, more);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] += more[i];
            }
            if (quantized != kQuantizedNot) {
                put_codes(row0 + row, n, here, v);
            } else if (here > 0) {
                put(row0 + row, n, here, out_aligned, v);
            }
        }
    }

    // One column at a time, in this thread's part of the tile: eight inlined copies of every function would be most of
    // the kernel's code.
    RTK_DEVICE static void activate(float (&v)[8], int act, float* memory) {
#pragma unroll
        for (int i = 0; i < 8; ++i) memory[i] = v[i];
#pragma unroll 1
        for (int i = 0; i < 8; ++i) memory[i] = activated(memory[i], act);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = memory[i];
    }

    RTK_DEVICE void put_integers(i64 row, i64 n, int exist, const i32* v) const {
        i32* p = static_cast<i32*>(out) + row * out_pitch + n;
        for (int i = 0; i < exist; ++i) p[i] = accumulate ? p[i] + v[i] : v[i];
    }

    RTK_DEVICE void put(i64 row, i64 n, int exist, bool aligned, const float (&v)[8]) const {
        const i64 at = row * out_pitch + n;
        if (out_type == kTypeFp32) {
            float* p = static_cast<float*>(out) + at;
            if (aligned && exist == 8) {
                reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
                reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i < exist) p[i] = v[i];
            }
            return;
        }
        const Raw<16> raw = out_type == kTypeBf16 ? pack<bf16, 8>(v) : pack<fp16, 8>(v);
        u16* p = static_cast<u16*>(out) + at;
        if (aligned && exist == 8) {
            ptx::st<16>(p, raw);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < exist) p[i] = static_cast<u16>(raw.w[i / 2] >> (16 * (i % 2)));
        }
    }

    // Invalid parts of `v` are ignored. 16 or 2 neighbouring lanes share a scale; all lanes of the warp must call this.
    RTK_DEVICE void put_codes(i64 row, i64 n, int exist, float (&v)[8]) const {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= exist) v[i] = 0.0f;
            amax = max_finite(amax, v[i]);
        }
        const int lanes = quantized == kQuantized128 ? 16 : 2;
        for (int other = 1; other < lanes; other *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, other));
        if (exist == 0) return;
        if (quantized == kQuantized128) {
            const float scale = out_type == kTypeE4m3 ? fp8_scale<e4m3>(amax, false) : fp8_scale<e5m2>(amax, false);
            if (n % 128 == 0) static_cast<float*>(out_scale)[n / 128 * scale_pitch + row] = scale;
            const float inverse = inverse_scale(scale);
            const Raw<8> raw = out_type == kTypeE4m3 ? quantized_codes<e4m3>(v, inverse) : quantized_codes<e5m2>(v, inverse);
            u8* p = static_cast<u8*>(out) + row * out_pitch + n;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < exist) p[i] = static_cast<u8>(raw.w[i / 4] >> (8 * (i % 4)));
        } else {
            const u32 scale = nvfp4_scale(amax);
            if (n % 16 == 0) static_cast<u8*>(out_scale)[row * scale_pitch + n / 16] = static_cast<u8>(scale);
            u8* p = static_cast<u8*>(out) + (row * out_pitch + n) / 2;
            const float inverse = nvfp4_inverse(scale);
#pragma unroll
            for (int i = 0; i < 8; i += 2)
                if (i < exist) p[i / 2] = static_cast<u8>(e2m1_code(v[i] * inverse) | e2m1_code(v[i + 1] * inverse) << 4);
        }
    }

    template <typename F8>
    RTK_DEVICE static Raw<8> quantized_codes(const float (&v)[8], float inverse) {
        return rtk::quantized<F8, 8>(v, inverse);
    }
};

}  // namespace rtk
