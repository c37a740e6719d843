// Shared by the softmax kernels: the exponential of a scaled difference, valid columns, masked vectors of a row.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/shared.cuh"

namespace rtk {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// A NaN is not kept: it reaches the result through the sum.
struct Max {
    static constexpr float kIdentity = -kInfinity;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// exp(scale * x) for differences x <= 0 from the largest score of a row. A negative scale is handled by flipping the
// sign of every score (`flip`, on the packed words). A scale of 0 becomes the smallest number: differences of finite
// scores still vanish, and -inf still means "masked" instead of NaN.
template <typename T>
struct Exponent {
    static constexpr bool kFast = sizeof(T) == 2;
    float slope;   // |scale|
    float factor;  // factor of the difference inside the exponential
    u32 flip;

    RTK_DEVICE explicit Exponent(double scale) {
        const float narrow = static_cast<float>(scale);
        slope = fmaxf(fabsf(narrow), __uint_as_float(1u));
        factor = kFast ? slope * 1.4426950408889634f : slope;
        flip = narrow < 0.0f ? (kFast ? 0x80008000u : 0x80000000u) : 0u;
    }
    RTK_DEVICE float operator()(float difference) const {
        if constexpr (kFast) return ptx::ex2(difference * factor);
        return expf(difference * factor);
    }
};

// -inf, or 0, in every element of a word.
template <typename T, bool kMinusInfinity>
RTK_DEVICE constexpr u32 filler() {
    if (!kMinusInfinity) return 0u;
    return is_same<T, bf16>::value ? 0xff80ff80u : is_same<T, fp16>::value ? 0xfc00fc00u : 0xff800000u;
}

// Elements of a vector that starts `valid` columns before the end become the filler; all of them if it is not positive.
template <typename T, int N, bool kMinusInfinity>
RTK_DEVICE void mask_tail(Raw<sizeof(T) * N>& raw, int valid) {
    constexpr int kEach = N == 1 ? 1 : 4 / sizeof(T);  // elements in a word
    constexpr u32 kFill = filler<T, kMinusInfinity>();
#pragma unroll
    for (int i = 0; i < N; i += kEach) {
        u32& word = raw.w[i / kEach];
        if (i >= valid) {
            word = kFill;
        } else if (kEach == 2 && i + 1 >= valid) {
            word = (word & 0xffffu) | (kFill & 0xffff0000u);
        }
    }
}

// The same bits, hidden from the compiler (`zero` is 0): it unpacks them again instead of keeping the unpacked values,
// which need two registers for one.
RTK_DEVICE void refresh(Raw<16>& raw, u32 zero) {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.w[i] ^= zero;
}

// Number of valid columns of a row, from `lengths` (i64 if lengths_int64, else i32; null: all of them).
RTK_DEVICE i64 valid_columns(const void* lengths, i64 lengths_int64, i64 row, i64 cols) {
    if (lengths == nullptr) return cols;
    const i64 length = lengths_int64 ? static_cast<const i64*>(lengths)[row] : static_cast<const i32*>(lengths)[row];
    return length < 0 ? 0 : length < cols ? length : cols;
}

// Slots of 16 bytes in shared memory that belong to one thread: it needs no barrier.
struct ThreadSlots {
    ptx::SharedAddress base;
    int pitch;

    RTK_DEVICE explicit ThreadSlots(u8* memory)
        : base(ptx::shared_address(memory + threadIdx.x * 16)), pitch(static_cast<int>(blockDim.x) * 16) {}

    RTK_DEVICE void put(int slot, const Raw<16>& raw) const { ptx::st_shared_16(base + slot * pitch, raw); }
    RTK_DEVICE Raw<16> read(int slot) const { return ptx::ld_shared_16(base + slot * pitch); }
};

// The largest of some scores, and the sum of exp(score - largest). For only -inf the sum is 0, or NaN if there was one.
struct TopAndSum {
    float top = -kInfinity, sum = 0.0f;

    // Raises the largest score to `to`, which is not less.
    template <typename T>
    RTK_DEVICE void raise(float to, const Exponent<T>& exponent) {
        if (to > top) sum *= exponent(top - to), top = to;
    }
    // Adds scores that do not exceed the largest.
    template <int N, typename T>
    RTK_DEVICE void add(const float (&v)[N], const Exponent<T>& exponent) {
        const float from = top == -kInfinity ? 0.0f : top;
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) part += exponent(v[i] - from);
        sum += part;
    }
};

// The same over each `lanes` neighbouring lanes; all of them get it. The whole warp must call it.
template <typename T>
RTK_DEVICE TopAndSum warp_top_and_sum(TopAndSum part, const Exponent<T>& exponent, int lanes = kWarp) {
    part.raise(warp_reduce<Max>(part.top, lanes), exponent);
    part.sum = warp_reduce<Sum>(part.sum, lanes);
    return part;
}

// And over each group, with one barrier. `phase` alternates between 0 and 1 from call to call on the same scratch.
template <typename T>
RTK_DEVICE TopAndSum group_top_and_sum(TopAndSum part, const Exponent<T>& exponent, const RowGroup& group,
                                       GroupScratch<2>& scratch, int phase) {
    if (group.threads <= kWarp) return warp_top_and_sum(part, exponent, group.threads);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    part = warp_top_and_sum(part, exponent);
    auto& slots = scratch.slot[phase];
    if (lane == 0) slots[threadIdx.x / kWarp][0] = part.top, slots[threadIdx.x / kWarp][1] = part.sum;
    __syncthreads();
    part = TopAndSum();
    if (lane < group.threads / kWarp) part.top = slots[lane][0], part.sum = slots[lane][1];
    return warp_top_and_sum(part, exponent);
}

// e / sum, correctly rounded but for rare cases where `exact`; `inverse` is about 1 / sum.
template <bool kExact>
RTK_DEVICE float share(float e, float sum, float inverse) {
    const float quotient = e * inverse;
    if constexpr (!kExact) return quotient;
    return quotient + inverse * (e - quotient * sum);
}

// The `log` arguments: return the logarithm; make rows without any score NaN, as in torch.
inline constexpr i64 kLogarithm = 1, kEmptyIsNan = 2;

RTK_DEVICE TopAndSum with_empty_rows(TopAndSum row, i64 log) {
    if ((log & kEmptyIsNan) && row.sum == 0.0f) row.sum = __uint_as_float(0x7fffffffu);
    return row;
}

// 1 / sum, 0 for the sum 0 of a row without any score.
RTK_DEVICE float inverse_of(float sum) { return sum == 0.0f ? 0.0f : ptx::rcp(sum); }

}  // namespace rtk
