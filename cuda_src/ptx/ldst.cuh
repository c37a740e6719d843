// Global loads and stores of 1 to 16 bytes by one thread. A `Raw<B>` holds the bytes in 32-bit words, first byte
// lowest; sizes under four sit in the low bits. Addresses must be aligned to B.
#pragma once
#include "common/abi.cuh"

namespace rtk {

template <int B>
struct Raw {
    static_assert(B == 1 || B == 2 || B == 4 || B == 8 || B == 16, "one access is 1, 2, 4, 8 or 16 bytes");
    u32 w[(B + 3) / 4];
};

}  // namespace rtk

namespace rtk::ptx {

// Read-only data. Volatile, because otherwise the compiler may move a load above the null check that guards it.
template <int B>
RTK_DEVICE Raw<B> ld_keep(const void* p) {
    Raw<B> r;
    if constexpr (B == 16) {
        asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                     : "l"(p));
    } else if constexpr (B == 8) {
        asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p));
    } else if constexpr (B == 4) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(r.w[0]) : "l"(p));
    } else if constexpr (B == 2) {
        u16 h;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(h) : "l"(p));
        r.w[0] = h;
    } else {
        asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(r.w[0]) : "l"(p));
    }
    return r;
}

// L2 policies: lines that it evicts before, or after, all others.
RTK_DEVICE u64 l2_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

RTK_DEVICE u64 l2_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Policy of reads in kernels that write little: with `evict_first`, these lines are evicted first, so that what others
// have written can stay. It must be uniform across a launch, otherwise every load has to test it.
RTK_DEVICE u64 l2_policy(bool evict_first) { return evict_first ? l2_first() : l2_last(); }

// ld_keep of 16 bytes with a policy.
RTK_DEVICE Raw<16> ld_stream_16(const void* p, u64 policy) {
    Raw<16> r;
    asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                 : "l"(p), "l"(policy));
    return r;
}

// The same into `r` if `wanted`; otherwise `r` keeps its value. No branch.
RTK_DEVICE void ld_stream_16_if(bool wanted, Raw<16>& r, const void* p, u64 policy) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %6, 0;\n"
        "@wanted ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;\n"
        "}\n"
        : "+r"(r.w[0]), "+r"(r.w[1]), "+r"(r.w[2]), "+r"(r.w[3])
        : "l"(p), "l"(policy), "r"(static_cast<u32>(wanted)));
}

// ld_keep of 4 bytes or of 2 into `word` if `wanted`; otherwise it keeps its value. No branch.
template <int B>
RTK_DEVICE void ld_keep_if(bool wanted, u32& word, const void* p) {
    if constexpr (B == 4) {
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.nc.u32 %0, [%1];\n}\n"
                     : "+r"(word)
                     : "l"(p), "r"(static_cast<u32>(wanted)));
    } else {
        static_assert(B == 2, "4 bytes or 2");
        asm volatile(
            "{\n.reg .pred wanted;\n.reg .u16 half;\nmov.u16 half, 0;\nsetp.ne.u32 wanted, %2, 0;\n"
            "@wanted ld.global.nc.u16 half, [%1];\n"
            "@wanted cvt.u32.u16 %0, half;\n}\n"
            : "+r"(word)
            : "l"(p), "r"(static_cast<u32>(wanted)));
    }
}

// Two floats at an address that is a multiple of 8, if `wanted`; otherwise they keep their values. No branch.
RTK_DEVICE void ld_pair_if(bool wanted, float& x, float& y, const float* p) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n@wanted ld.global.v2.f32 {%0,%1}, [%2];\n}\n"
                 : "+f"(x), "+f"(y)
                 : "l"(p), "r"(static_cast<u32>(wanted)));
}

// One float, as ld_pair_if.
RTK_DEVICE void ld_float_if(bool wanted, float& x, const float* p) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.f32 %0, [%1];\n}\n"
                 : "+f"(x)
                 : "l"(p), "r"(static_cast<u32>(wanted)));
}

// Read-only data used once, by a kernel that also writes. L2 evicts these lines last, odd as that seems: the kernel is
// up to 8 % faster, presumably because lines that it wrote are evicted instead (docs/decisions/common.md).
template <int B>
RTK_DEVICE Raw<B> ld_stream(const void* p) {
    if constexpr (B == 16) {
        return ld_stream_16(p, l2_last());
    } else if constexpr (B == 8) {
        Raw<8> r;
        asm volatile("ld.global.nc.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                     : "=r"(r.w[0]), "=r"(r.w[1])
                     : "l"(p), "l"(l2_last()));
        return r;
    } else {
        return ld_keep<B>(p);
    }
}

// Plain store.
template <int B>
RTK_DEVICE void st(void* p, const Raw<B>& r) {
    if constexpr (B == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]), "r"(r.w[2]),
                     "r"(r.w[3])
                     : "memory");
    } else if constexpr (B == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]) : "memory");
    } else if constexpr (B == 4) {
        asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
    } else if constexpr (B == 2) {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(r.w[0])) : "memory");
    } else {
        asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
    }
}

// Store of 4 or 8 bytes of a line that other blocks complete at about the same time. L2 evicts it last, so that it is
// written to memory as a whole.
template <int B>
RTK_DEVICE void st_last(void* p, const Raw<B>& r) {
    if constexpr (B == 8) {
        asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1,%2}, %3;" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]), "l"(l2_last())
                     : "memory");
    } else {
        static_assert(B == 4, "narrow pieces of lines");
        asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(r.w[0]), "l"(l2_last()) : "memory");
    }
}

// Store of data nothing on the device reads soon.
template <int B>
RTK_DEVICE void st_stream(void* p, const Raw<B>& r) {
    if constexpr (B == 16) {
        asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]), "r"(r.w[2]),
                     "r"(r.w[3])
                     : "memory");
    } else if constexpr (B == 8) {
        asm volatile("st.global.cs.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]) : "memory");
    } else if constexpr (B == 4) {
        asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
    } else if constexpr (B == 2) {
        asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(r.w[0])) : "memory");
    } else {
        asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
    }
}

}  // namespace rtk::ptx
