// Largest finite magnitudes of packed elements, without unpacking them: 16-bit types two at a time.
#pragma once
#include "common/convert.cuh"
#include "common/fp8_scale.cuh"
#include "ptx/packed.cuh"

namespace rtk {

// One number per element of a 32-bit word of T (one or two), in the format of T: 0 to begin with.
template <typename T>
struct WordMax {
    static constexpr int kPerWord = 4 / sizeof(T);

    // A word for `larger`: elements that are not finite become NaN.
    RTK_DEVICE static u32 finite(u32 word) {
        if constexpr (is_same<T, bf16>::value) return ptx::finite_or_nan_bf16x2(word);
        if constexpr (is_same<T, fp16>::value) return ptx::finite_or_nan_f16x2(word);
        return __float_as_uint(fmaf(__uint_as_float(word), 0.0f, __uint_as_float(word)));
    }
    // The larger magnitudes; NaN in `word` is ignored.
    RTK_DEVICE static u32 larger(u32 max_abs, u32 word) {
        if constexpr (is_same<T, bf16>::value) return ptx::max_magnitude_bf16x2(max_abs, word);
        if constexpr (is_same<T, fp16>::value) return ptx::max_magnitude_f16x2(max_abs, word);
        return __float_as_uint(fmaxf(__uint_as_float(max_abs), fabsf(__uint_as_float(word))));
    }
    // The larger magnitudes of 16-bit types, NaN where one is.
    RTK_DEVICE static u32 larger_or_nan(u32 max_abs, u32 word) {
        static_assert(sizeof(T) == 2, "two in a word");
        if constexpr (is_same<T, bf16>::value) return ptx::max_nan_bf16x2(max_abs, word & 0x7fff7fffu);
        return ptx::max_nan_f16x2(max_abs, word & 0x7fff7fffu);
    }
    RTK_DEVICE static void unpacked(u32 max_abs, float (&v)[kPerWord]) { unpack<T, kPerWord>(Raw<4>{max_abs}, v); }
    RTK_DEVICE static float largest(u32 max_abs) {
        float v[kPerWord];
        unpacked(max_abs, v);
        return kPerWord == 2 ? fmaxf(v[0], v[kPerWord - 1]) : v[0];
    }
};

// Adds the elements of a Raw to a word of maxima.
template <typename T, int B>
RTK_DEVICE u32 with_larger(u32 max_abs, const Raw<B>& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw.w) / 4); ++i)
        max_abs = WordMax<T>::larger(max_abs, WordMax<T>::finite(raw.w[i]));
    return max_abs;
}

}  // namespace rtk
