// What the softmax kernels share: the exponential of a scaled difference, valid columns, masked pieces of a row.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// A NaN is not kept: it reaches the result through the sum.
struct Max {
    static constexpr float kIdentity = -kInfinity;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// exp(scale * x) for differences x <= 0 from the largest score of a row. A negative scale is taken by flipping the sign
// of every score (`flip`, on the packed words). A scale of 0 becomes the smallest number: differences of finite scores
// still vanish, and -inf still means "not there" instead of NaN.
template <typename T>
struct Exponent {
    static constexpr bool kFast = sizeof(T) == 2;
    float slope;   // |scale|
    float factor;  // what the difference is multiplied with before the exponential
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

// Elements of a piece that starts `valid` columns before the end become the filler; all of them if it is not positive.
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

// The same bits, which the compiler cannot know (`zero` is 0): it unpacks them again instead of keeping the unpacked
// values, which need two registers for one.
RTK_DEVICE void refresh(Raw<16>& raw, u32 zero) {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.w[i] ^= zero;
}

// How many columns of a row count, from `lengths` (i64 if wide, else i32; null: all of them).
RTK_DEVICE i64 valid_columns(const void* lengths, i64 wide, i64 row, i64 cols) {
    if (lengths == nullptr) return cols;
    const i64 length = wide ? static_cast<const i64*>(lengths)[row] : static_cast<const i32*>(lengths)[row];
    return length < 0 ? 0 : length < cols ? length : cols;
}

// A block that works on one row at a time.
RTK_DEVICE RowGroup whole_block() {
    RowGroup group(blockDim.x);
    group.threads = static_cast<int>(blockDim.x);
    group.count = 1;
    group.index = 0;
    group.thread = static_cast<int>(threadIdx.x);
    return group;
}

// Shared memory for the next STAGES rows, PIECES of 16 bytes of each row in a thread. Every slot belongs to one thread.
template <int PIECES, int STAGES>
struct Stages {
    ptx::SharedAddress base;
    int offset = 0;  // of the current row's slots

    RTK_DEVICE explicit Stages(u8* memory) : base(ptx::shared_address(memory + threadIdx.x * 16)) {}

    RTK_DEVICE ptx::SharedAddress slot(int piece) const {
        return base + (offset + piece * static_cast<int>(blockDim.x) * 16);
    }
    // Closes the copies into the current slots and goes on to the next ones.
    RTK_DEVICE void next() {
        ptx::cp_async_commit();
        if constexpr (STAGES > 1) {
            offset += PIECES * static_cast<int>(blockDim.x) * 16;
            if (offset == STAGES * PIECES * static_cast<int>(blockDim.x) * 16) offset = 0;
        }
    }
};

// e / sum, correctly rounded but for rare cases where `exact`; `inverse` is about 1 / sum.
template <bool kExact>
RTK_DEVICE float share(float e, float sum, float inverse) {
    const float quotient = e * inverse;
    if constexpr (!kExact) return quotient;
    return quotient + inverse * (e - quotient * sum);
}

// 1 / sum, 0 for the sum 0 of a row without any score.
RTK_DEVICE float inverse_of(float sum) { return sum == 0.0f ? 0.0f : ptx::rcp(sum); }

}  // namespace rtk
