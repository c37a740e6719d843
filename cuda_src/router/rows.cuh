// Vectors of rows in registers, of any type: the type is a run-time argument, because it only decides how a number is
// read.
#pragma once
#include "common/vec.cuh"

namespace rtk {

inline constexpr u32 kAllLanes = 0xffffffffu;

enum Kind : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

RTK_DEVICE int size_of(int kind) { return kind == kFloat32 ? 4 : 2; }

// A 16-bit number; decoding both types is cheaper than a branch.
RTK_DEVICE float half_of(u32 bits, int kind) {
    return kind == kBfloat16 ? __uint_as_float(bits << 16) : ptx::cvt_f16_to_f32(static_cast<u16>(bits));
}

// Element `index` of an array.
RTK_DEVICE float load_one(const void* p, i64 index, int kind) {
    if (kind == kFloat32) return __uint_as_float(ptx::ld_keep<4>(static_cast<const float*>(p) + index).w[0]);
    return half_of(ptx::ld_keep<2>(static_cast<const u16*>(p) + index).w[0], kind);
}

RTK_DEVICE void store_one(void* p, i64 index, int kind, float value) {
    const float f[1] = {value};
    if (kind == kFloat32) {
        store<float, 1>(static_cast<float*>(p) + index, f);
    } else if (kind == kBfloat16) {
        store<bf16, 1>(static_cast<bf16*>(p) + index, f);
    } else {
        store<fp16, 1>(static_cast<fp16*>(p) + index, f);
    }
}

// N elements from element `index` on; `whole`: all exist and are aligned, else those from `valid` on are 0.
template <int N>
RTK_DEVICE void load_some(const void* p, i64 index, int kind, bool whole, int valid, float (&f)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = 0.0f;
    if (kind == kFloat32) {
        const float* from = static_cast<const float*>(p) + index;
        if (whole && valid > 0) {
            load_keep<float, N>(from, f);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i < valid) f[i] = __uint_as_float(ptx::ld_keep<4>(from + i).w[0]);
        }
    } else {
        const u16* from = static_cast<const u16*>(p) + index;
        if (whole && valid > 0) {
            const Raw<2 * N> raw = ptx::ld_keep<2 * N>(from);
#pragma unroll
            for (int i = 0; i < N; ++i) f[i] = half_of(raw.w[i / 2] >> (i % 2 * 16) & 0xffffu, kind);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i < valid) f[i] = half_of(ptx::ld_keep<2>(from + i).w[0], kind);
        }
    }
}

template <int N>
RTK_DEVICE void store_some(void* p, i64 index, int kind, bool whole, int valid, const float (&f)[N]) {
    if (!whole) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < valid) store_one(p, index + i, kind, f[i]);
    } else if (valid <= 0) {
        return;
    } else if (kind == kFloat32) {
        store<float, N>(static_cast<float*>(p) + index, f);
    } else {
        ptx::st<2 * N>(static_cast<u16*>(p) + index, kind == kBfloat16 ? pack<bf16, N>(f) : pack<fp16, N>(f));
    }
}

}  // namespace rtk
