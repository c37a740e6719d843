// What every device file starts from: fixed-width integers, the function qualifiers, and the one place that turns
// compiler macros into feature switches.
//
// Kernel parameters are pointers, `i64` and `double` only. All are eight bytes, so the host packs them with one struct
// call and no size or count is ever truncated; kernels narrow them on their first lines. Where the code before the
// first load matters, two numbers that fit into 32 bits share an i64 (rtkernels/runtime/layout.py: halves).
#pragma once

#define RTK_DEVICE __device__ __forceinline__

// The instruction set of the target. The host emulator defines __CUDA_ARCH__ too, so both compile the same branch.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define RTK_HAS_FP8_CVT 1
#else
#define RTK_HAS_FP8_CVT 0
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define RTK_HAS_TMA 1
#else
#define RTK_HAS_TMA 0
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define RTK_HAS_WGMMA 1
#else
#define RTK_HAS_WGMMA 0
#endif

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define RTK_HAS_FP4_CVT 1
#else
#define RTK_HAS_FP4_CVT 0
#endif

namespace rtk {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// The halves of such an argument.
RTK_DEVICE u32 lower(i64 two) { return static_cast<u32>(two); }
RTK_DEVICE u32 upper(i64 two) { return static_cast<u32>(static_cast<u64>(two) >> 32); }

// `inline`: a plain constant may get an internal symbol whose name differs from run to run, and the cubin with it.
inline constexpr int kWarp = 32;

template <typename A, typename B>
struct is_same {
    static constexpr bool value = false;
};
template <typename A>
struct is_same<A, A> {
    static constexpr bool value = true;
};

RTK_DEVICE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// n / d for n < 2^31, where `divisor` comes from the host's _layout.divisor(d): three instructions instead of the
// twenty dependent ones of a division.
RTK_DEVICE u32 divided(u32 n, i64 divisor) {
    const u64 product = static_cast<u64>(n << 1) * static_cast<u32>(divisor);
    return static_cast<u32>(product >> 32) >> static_cast<int>(divisor >> 32);
}

}  // namespace rtk
