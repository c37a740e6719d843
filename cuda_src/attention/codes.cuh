// Converts codes of an 8-bit cache to operands of fp16 products: two neighbouring codes, or every other one, become an
// fp16 pair. Both e4m3 and int8 are exact in fp16. Without the conversion instruction (below sm_89) e4m3's NaN becomes
// 480.
#pragma once
#include "common/abi.cuh"
#include "ptx/cvt.cuh"
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

}  // namespace rtk
