// Converts codes of an 8-bit cache to operands of products: two neighbouring codes, or every other one, become a pair of
// fp16 or bf16. Both e4m3 and int8 are exact in both. Without the conversion instruction (below sm_89) e4m3's NaN becomes
// 480.
#pragma once
#include "common/types.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldst.cuh"
#include "ptx/packed.cuh"

namespace rtk {

inline constexpr int kSameType = 0, kCodesE4m3 = 1, kCodesInt8 = 2;  // what a cache holds

// The codes at bytes FIRST and SECOND of a word.
template <int CODES, int FIRST, int SECOND>
RTK_DEVICE u32 codes_to_f16x2(u32 word) {
    if constexpr (CODES == kCodesInt8) {
        // 0x64 before a byte u makes 1024 + u.
        const u32 biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, FIRST | 4 << 4 | SECOND << 8 | 4 << 12);
        return ptx::fma_f16x2(biased, 0x3c003c00u, 0xe480e480u);  // - 1152
    } else {
#if RTK_HAS_FP8_CVT
        return ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(__byte_perm(word, 0u, FIRST | SECOND << 4 | 0x4400)));
#else
        const u32 high = __byte_perm(word, 0u, 4 | FIRST << 4 | 4 << 8 | SECOND << 12);  // in the upper bytes of halves
        const u32 small = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;              // 2^-8 of the value
        return ptx::fma_f16x2(small, 0x5c005c00u, 0x80008000u);
#endif
    }
}

// The codes in the lower (HALF 0) or the upper two bytes of a word as a pair of T.
template <typename T, int CODES, int HALF>
RTK_DEVICE u32 codes_to_pair(u32 word) {
#if RTK_HAS_FP8_CVT
    // A shift becomes part of the conversion, a permutation of bytes does not.
    const u32 halves = CODES == kCodesE4m3 ? ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(word >> 16 * HALF))
                                           : codes_to_f16x2<CODES, 2 * HALF, 2 * HALF + 1>(word);
#else
    const u32 halves = codes_to_f16x2<CODES, 2 * HALF, 2 * HALF + 1>(word);
#endif
    if constexpr (is_same<T, fp16>::value) return halves;
    return ptx::cvt_bf16x2(ptx::cvt_f16_to_f32(static_cast<u16>(halves)), ptx::cvt_f16_to_f32(static_cast<u16>(halves >> 16)));
}

// 16 neighbouring codes.
template <typename T, int CODES>
RTK_DEVICE void codes_to_vectors(Raw<16> (&to)[2], const Raw<16>& codes) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        to[w / 2].w[w % 2 * 2] = codes_to_pair<T, CODES, 0>(codes.w[w]);
        to[w / 2].w[w % 2 * 2 + 1] = codes_to_pair<T, CODES, 1>(codes.w[w]);
    }
}

}  // namespace rtk
