// Turns products of q and k into scores: soft cap, bias, mask, in the registers of mma m16n8 (layout:
// softmax_state.cuh).
#pragma once
#include "attention/masks.cuh"
#include "attention/softmax_state.cuh"
#include "common/any_type.cuh"
#include "common/pressure.cuh"

namespace rtk {

// A bias [batch, heads, queries, keys] of any strides; `at`: first element of this sequence and head, null without a
// bias.
struct BiasRows {
    const u8* at;
    int type;         // common/any_type.cuh
    i64 row, column;  // in bytes

    RTK_DEVICE BiasRows(const void* bias, i64 element_type, i64 offset, i64 row_stride, i64 column_stride)
        : at(static_cast<const u8*>(bias)), type(static_cast<int>(element_type)) {
        const int bytes = type == kAnyFp32 ? 4 : 2;
        row = row_stride * bytes, column = column_stride * bytes;
        if (at != nullptr) at += offset * bytes;
    }
};

// Transforms a product before the softmax: the score counts as 2^(factor * score). The numbers are kernel arguments,
// two floats each, so that instructions read them straight from constant memory.
struct ScoreRule {
    i64 scale_factor;     // factor of products, and factor (log2(e) times that of products if they are the scores)
    i64 softcap_inverse;  // 0, or the limit, and scale / limit; a negative limit clips scores at its magnitude

    RTK_DEVICE float scale() const { return __uint_as_float(lower(scale_factor)); }
    RTK_DEVICE float factor() const { return __uint_as_float(upper(scale_factor)); }
    RTK_DEVICE float softcap() const { return __uint_as_float(lower(softcap_inverse)); }
    RTK_DEVICE float inverse_cap() const { return __uint_as_float(upper(softcap_inverse)); }
    // The magnitude at which scores are clipped.
    RTK_DEVICE float ceiling() const { return softcap() < 0.0f ? -softcap() : -negative_infinity(); }
};

// Query rows and their keys: `limits` (null for none) adds an upper bound per query.
struct SeenKeys {
    Mask mask;
    const i32* limits;

    RTK_DEVICE int hi(int i) const {
        const int end = mask.hi(i);
        return limits == nullptr || i >= mask.lq ? end : min(end, limits[i]);
    }
    RTK_DEVICE int lo(int i) const { return mask.lo(i); }
};

// Below, s[n][2r + c] belongs to query i0 + g + 8r and key j0 + 8n + 2t + c.

template <int N>
RTK_DEVICE void add_bias(float (&s)[N][4], const BiasRows& bias, const Mask& mask, int i0, int j0, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = i0 + lane / 4 + 8 * r, j = j0 + lane % 4 * 2;
        const u8* from = bias.at + i * bias.row + j * bias.column;
        const int end = i < mask.lq ? mask.keys - j : 0;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * n + c < end) s[n][2 * r + c] += load_any(from + c * bias.column, bias.type, 0);
            from = settled(from + 8 * bias.column);
        }
    }
}

// Products become scores, without the bias.
template <int N>
RTK_DEVICE void cap_scores(float (&s)[N][4], const ScoreRule& rule) {
    if (rule.softcap() > 0.0f) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = rule.softcap() * tanh_by_ex2(s[n][e] * rule.inverse_cap());
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = fmin_nan(s[n][e] * rule.scale(), rule.ceiling());
    }
}

template <int N, typename Keys>
RTK_DEVICE void mask_scores(float (&s)[N][4], const Keys& seen, int i0, int j0, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = i0 + lane / 4 + 8 * r;
        const int first = seen.lo(i) - (j0 + lane % 4 * 2), end = seen.hi(i) - (j0 + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * n + c < first || 8 * n + c >= end) s[n][2 * r + c] = negative_infinity();
    }
}

}  // namespace rtk
