// CUDA's built-in functions and vector types on the host.
#pragma once
#include "execution.h"
#include "numeric.h"

#define RTK_EMU_FN inline __attribute__((always_inline))
#define RTK_EMU_ATOMIC template <typename T> __attribute__((noinline, no_sanitize("thread", "address")))

// ---- vector types -----------------------------------------------------------------------------------------------

#define RTK_EMU_VECTORS(T, Name, size)                                                                           \
    struct Name##1 { T x; };                                                                                     \
    struct alignas(2 * size) Name##2 { T x, y; };                                                                \
    struct alignas(4 * size <= 16 ? 4 * size : 16) Name##4 { T x, y, z, w; };                                    \
    RTK_EMU_FN Name##2 make_##Name##2(T x, T y) { return {x, y}; }                                               \
    RTK_EMU_FN Name##3 make_##Name##3(T x, T y, T z) { return {x, y, z}; }                                       \
    RTK_EMU_FN Name##4 make_##Name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define RTK_EMU_VECTOR3(T, Name) struct Name##3 { T x, y, z; };
RTK_EMU_VECTOR3(signed char, char) RTK_EMU_VECTOR3(unsigned char, uchar) RTK_EMU_VECTOR3(short, short)
RTK_EMU_VECTOR3(unsigned short, ushort) RTK_EMU_VECTOR3(int, int) RTK_EMU_VECTOR3(float, float)
RTK_EMU_VECTOR3(long long, longlong) RTK_EMU_VECTOR3(unsigned long long, ulonglong) RTK_EMU_VECTOR3(double, double)
RTK_EMU_VECTORS(signed char, char, 1) RTK_EMU_VECTORS(unsigned char, uchar, 1)
RTK_EMU_VECTORS(short, short, 2) RTK_EMU_VECTORS(unsigned short, ushort, 2)
RTK_EMU_VECTORS(int, int, 4) RTK_EMU_VECTORS(unsigned, uint, 4) RTK_EMU_VECTORS(float, float, 4)
RTK_EMU_VECTORS(long long, longlong, 8) RTK_EMU_VECTORS(unsigned long long, ulonglong, 8)
RTK_EMU_VECTORS(double, double, 8)

// ---- barriers ---------------------------------------------------------------------------------------------------

RTK_EMU_FN void __syncthreads(RTK_EMU_CALLER) { emu::barrier(0, 0, false, RTK_EMU_SITE("__syncthreads")); }
RTK_EMU_FN int __syncthreads_count(int p, RTK_EMU_CALLER) {
    return emu::barrier(0, 0, p != 0, RTK_EMU_SITE("__syncthreads_count"));
}
RTK_EMU_FN int __syncthreads_or(int p, RTK_EMU_CALLER) {
    return emu::barrier(0, 0, p != 0, RTK_EMU_SITE("__syncthreads_or")) > 0;
}
RTK_EMU_FN int __syncthreads_and(int p, RTK_EMU_CALLER) {
    return emu::barrier(0, 0, p == 0, RTK_EMU_SITE("__syncthreads_and")) == 0;
}
RTK_EMU_FN void __syncwarp(unsigned mask = 0xffffffffu, RTK_EMU_CALLER) {
    emu::gather(mask, 0, RTK_EMU_SITE("__syncwarp"), true);
}
RTK_EMU_FN void __threadfence_block() {}
RTK_EMU_FN void __threadfence() { emu::threadfence(); }
RTK_EMU_FN void __threadfence_system() { emu::threadfence(); }

// ---- warp operations: everyone deposits a value, then reads what it needs ---------------------------------------

namespace emu {

template <typename T>
RTK_EMU_FN u64 to_slot(T v) {
    static_assert(sizeof(T) <= 8, "a shuffled value has at most 8 bytes");
    u64 slot = 0;
    __builtin_memcpy(&slot, &v, sizeof(T));
    return slot;
}
template <typename T>
RTK_EMU_FN T from_slot(u64 slot) {
    T v;
    __builtin_memcpy(&v, &slot, sizeof(T));
    return v;
}

// Segment [first, last] of `width` lanes around this one.
RTK_EMU_FN u32 first_lane(int width) { return lane() & ~static_cast<u32>(width - 1); }

template <typename T, typename F>
RTK_EMU_FN T fold(u32 mask, T v, F combine, Site site) {
    const u64* all = gather(mask, to_slot(v), site);
    T out = from_slot<T>(all[__builtin_ctz(mask)]);
    for (int i = __builtin_ctz(mask) + 1; i < 32; ++i)
        if (mask >> i & 1u) out = combine(out, from_slot<T>(all[i]));
    return out;
}

}  // namespace emu

template <typename T>
RTK_EMU_FN T __shfl_sync(unsigned mask, T v, int source, int width = 32, RTK_EMU_CALLER) {
    const unsigned from = emu::first_lane(width) + (static_cast<unsigned>(source) & (width - 1));
    return emu::from_slot<T>(emu::shuffle(mask, emu::to_slot(v), from, RTK_EMU_SITE("__shfl_sync")));
}
template <typename T>
RTK_EMU_FN T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, RTK_EMU_CALLER) {
    const unsigned me = emu::lane();
    const unsigned from = me >= emu::first_lane(width) + delta ? me - delta : me;
    return emu::from_slot<T>(emu::shuffle(mask, emu::to_slot(v), from, RTK_EMU_SITE("__shfl_up_sync")));
}
template <typename T>
RTK_EMU_FN T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, RTK_EMU_CALLER) {
    const unsigned me = emu::lane();
    const unsigned from = me + delta < emu::first_lane(width) + width ? me + delta : me;
    return emu::from_slot<T>(emu::shuffle(mask, emu::to_slot(v), from, RTK_EMU_SITE("__shfl_down_sync")));
}
template <typename T>
RTK_EMU_FN T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, RTK_EMU_CALLER) {
    const unsigned me = emu::lane(), to = me ^ static_cast<unsigned>(lanes);
    const unsigned from = to < emu::first_lane(width) + width ? to : me;
    return emu::from_slot<T>(emu::shuffle(mask, emu::to_slot(v), from, RTK_EMU_SITE("__shfl_xor_sync")));
}

RTK_EMU_FN unsigned __activemask() { return emu::active_mask(); }
RTK_EMU_FN unsigned __ballot_sync(unsigned mask, int p, RTK_EMU_CALLER) {
    const emu::u64* all = emu::gather(mask, p != 0, RTK_EMU_SITE("__ballot_sync"));
    unsigned out = 0;
    for (int i = 0; i < 32; ++i) out |= static_cast<unsigned>(all[i]) << i;
    return out;
}
RTK_EMU_FN int __any_sync(unsigned mask, int p, RTK_EMU_CALLER) { return __ballot_sync(mask, p, file, line) != 0; }
RTK_EMU_FN int __all_sync(unsigned mask, int p, RTK_EMU_CALLER) {
    return __ballot_sync(mask, p, file, line) == mask;
}
template <typename T>
RTK_EMU_FN unsigned __match_any_sync(unsigned mask, T v, RTK_EMU_CALLER) {
    const emu::u64* all = emu::gather(mask, emu::to_slot(v), RTK_EMU_SITE("__match_any_sync"));
    unsigned out = 0;
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1u) && all[i] == emu::to_slot(v)) out |= 1u << i;
    return out;
}
template <typename T>
RTK_EMU_FN unsigned __match_all_sync(unsigned mask, T v, int* equal, RTK_EMU_CALLER) {
    *equal = __match_any_sync(mask, v, file, line) == mask;
    return *equal ? mask : 0u;
}

#define RTK_EMU_REDUCE(name, T, expression)                                                                   \
    RTK_EMU_FN T name(unsigned mask, T v, RTK_EMU_CALLER) {                                                   \
        return emu::fold(mask, v, [](T a, T b) -> T { return expression; }, RTK_EMU_SITE(#name));             \
    }
RTK_EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
RTK_EMU_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
RTK_EMU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
RTK_EMU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
RTK_EMU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
RTK_EMU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
RTK_EMU_REDUCE(__reduce_and_sync, unsigned, a & b)
RTK_EMU_REDUCE(__reduce_or_sync, unsigned, a | b)
RTK_EMU_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

// ---- atomics: fibers never interrupt each other, so plain arithmetic is enough ----------------------------------

namespace emu {
template <typename T>
struct Same {
    using type = T;
};
}  // namespace emu

#define RTK_EMU_ATOMIC_OP(name, expression)                       \
    RTK_EMU_ATOMIC T name(T* p, typename emu::Same<T>::type v) {  \
        emu::check_atomic(p, sizeof(T));                          \
        const T old = *p;                                         \
        *p = (expression);                                        \
        return old;                                               \
    }
RTK_EMU_ATOMIC_OP(atomicAdd, old + v)
RTK_EMU_ATOMIC_OP(atomicSub, old - v)
RTK_EMU_ATOMIC_OP(atomicExch, v)
RTK_EMU_ATOMIC_OP(atomicMin, old < v ? old : v)
RTK_EMU_ATOMIC_OP(atomicMax, old > v ? old : v)
RTK_EMU_ATOMIC_OP(atomicAnd, old& v)
RTK_EMU_ATOMIC_OP(atomicOr, old | v)
RTK_EMU_ATOMIC_OP(atomicXor, old ^ v)
RTK_EMU_ATOMIC_OP(atomicInc, old >= v ? 0 : old + 1)
RTK_EMU_ATOMIC_OP(atomicDec, old == 0 || old > v ? v : old - 1)
RTK_EMU_ATOMIC T atomicCAS(T* p, typename emu::Same<T>::type expected, typename emu::Same<T>::type v) {
    emu::check_atomic(p, sizeof(T));
    const T old = *p;
    if (old == expected) *p = v;
    return old;
}

// ---- loads and stores with cache hints --------------------------------------------------------------------------

template <typename T>
RTK_EMU_FN T __ldg(const T* p) {
    const emu::Word16 value = emu::load(p, sizeof(T));
    T out;
    __builtin_memcpy(&out, &value, sizeof(T));
    return out;
}
template <typename T>
RTK_EMU_FN T __ldcs(const T* p) { return __ldg(p); }
template <typename T>
RTK_EMU_FN T __ldcg(const T* p) { return __ldg(p); }
template <typename T>
RTK_EMU_FN T __ldca(const T* p) { return __ldg(p); }
template <typename T>
RTK_EMU_FN void __stcs(T* p, typename emu::Same<T>::type v) {
    emu::Word16 value = {};
    __builtin_memcpy(&value, &v, sizeof(T));
    emu::store(p, value, sizeof(T));
}
template <typename T>
RTK_EMU_FN void __stcg(T* p, typename emu::Same<T>::type v) { __stcs(p, v); }

// ---- bits -------------------------------------------------------------------------------------------------------

RTK_EMU_FN unsigned __float_as_uint(float x) { return emu::bits_of(x); }
RTK_EMU_FN int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
RTK_EMU_FN float __uint_as_float(unsigned x) { return emu::float_of(x); }
RTK_EMU_FN float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
RTK_EMU_FN long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
RTK_EMU_FN double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
RTK_EMU_FN int __popc(unsigned x) { return __builtin_popcount(x); }
RTK_EMU_FN int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
RTK_EMU_FN int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
RTK_EMU_FN int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
RTK_EMU_FN int __ffs(int x) { return __builtin_ffs(x); }
RTK_EMU_FN int __ffsll(long long x) { return __builtin_ffsll(x); }
RTK_EMU_FN unsigned __brev(unsigned x) {
    unsigned out = 0;
    for (int i = 0; i < 32; ++i) out |= (x >> i & 1u) << (31 - i);
    return out;
}
RTK_EMU_FN unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (static_cast<unsigned long long>(b) << 32) | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned byte = static_cast<unsigned>(both >> ((selector >> (4 * i) & 7u) * 8)) & 0xffu;
        if (selector >> (4 * i) & 8u) byte = (byte & 0x80u) ? 0xffu : 0u;  // replicate the sign
        out |= byte << (8 * i);
    }
    return out;
}
RTK_EMU_FN unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return static_cast<unsigned>(((static_cast<unsigned long long>(hi) << 32 | lo) << (n & 31)) >> 32);
}
RTK_EMU_FN unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) >> (n & 31));
}
RTK_EMU_FN unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
RTK_EMU_FN int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
RTK_EMU_FN unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
RTK_EMU_FN int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return c;
}

// ---- math: host libm, correctly rounded where CUDA is; the approximate ones give the exact value rounded --------

extern "C" {
#define RTK_EMU_MATH1(name) float name##f(float) noexcept;
#define RTK_EMU_MATH2(name) float name##f(float, float) noexcept;
RTK_EMU_MATH1(exp) RTK_EMU_MATH1(exp2) RTK_EMU_MATH1(expm1) RTK_EMU_MATH1(log) RTK_EMU_MATH1(log2)
RTK_EMU_MATH1(log10) RTK_EMU_MATH1(log1p) RTK_EMU_MATH1(sin) RTK_EMU_MATH1(cos) RTK_EMU_MATH1(tan)
RTK_EMU_MATH1(tanh) RTK_EMU_MATH1(sinh) RTK_EMU_MATH1(cosh) RTK_EMU_MATH1(erf) RTK_EMU_MATH1(erfc)
RTK_EMU_MATH1(sqrt) RTK_EMU_MATH1(cbrt) RTK_EMU_MATH1(fabs) RTK_EMU_MATH1(floor) RTK_EMU_MATH1(ceil)
RTK_EMU_MATH1(trunc) RTK_EMU_MATH1(round) RTK_EMU_MATH1(rint) RTK_EMU_MATH1(nearbyint) RTK_EMU_MATH1(atan)
RTK_EMU_MATH1(asin) RTK_EMU_MATH1(acos)
RTK_EMU_MATH2(fmax) RTK_EMU_MATH2(fmin) RTK_EMU_MATH2(fmod) RTK_EMU_MATH2(pow) RTK_EMU_MATH2(copysign)
RTK_EMU_MATH2(atan2) RTK_EMU_MATH2(fdim) RTK_EMU_MATH2(hypot)
float fmaf(float, float, float) noexcept;
float ldexpf(float, int) noexcept;
float frexpf(float, int*) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double sqrt(double) noexcept;
double fabs(double) noexcept;
double fma(double, double, double) noexcept;
int abs(int) noexcept;
}
RTK_EMU_FN float rsqrtf(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
RTK_EMU_FN double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
RTK_EMU_FN void sincosf(float x, float* s, float* c) { *s = __builtin_sinf(x), *c = __builtin_cosf(x); }
RTK_EMU_FN void sincospif(float x, float* s, float* c) {
    const double angle = 3.14159265358979323846 * static_cast<double>(x);
    *s = static_cast<float>(__builtin_sin(angle)), *c = static_cast<float>(__builtin_cos(angle));
}
RTK_EMU_FN void sincos(double x, double* s, double* c) { *s = __builtin_sin(x), *c = __builtin_cos(x); }
RTK_EMU_FN bool isnan(float x) { return __builtin_isnan(x); }
RTK_EMU_FN bool isinf(float x) { return __builtin_isinf(x); }
RTK_EMU_FN bool isfinite(float x) { return __builtin_isfinite(x); }
RTK_EMU_FN float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// __f*_rn are never contracted on the device, neither with their inputs nor with the user of their result; the barrier
// keeps the host compiler from doing it.
RTK_EMU_FN float emu_opaque(float x) {
#ifdef __x86_64__
    __asm__("" : "+x"(x));
#else
    __asm__("" : "+w"(x));
#endif
    return x;
}
RTK_EMU_FN float __fadd_rn(float x, float y) { return emu_opaque(x) + emu_opaque(y); }
RTK_EMU_FN float __fadd_rd(float x, float y) {  // exact where the sum is exact in fp64
    const double sum = static_cast<double>(x) + static_cast<double>(y);
    const float nearest = static_cast<float>(sum);
    return static_cast<double>(nearest) > sum ? __builtin_nextafterf(nearest, -__builtin_inff()) : nearest;
}
RTK_EMU_FN float __fsub_rn(float x, float y) { return emu_opaque(x) - emu_opaque(y); }
RTK_EMU_FN float __fmul_rn(float x, float y) { return emu_opaque(x * y); }
RTK_EMU_FN float __fdiv_rn(float x, float y) { return x / y; }
RTK_EMU_FN float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
RTK_EMU_FN float __frcp_rn(float x) { return 1.0f / x; }
RTK_EMU_FN float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
RTK_EMU_FN float __frsqrt_rn(float x) { return rsqrtf(x); }
RTK_EMU_FN float __expf(float x) { return __builtin_expf(x); }
RTK_EMU_FN float __exp10f(float x) { return __builtin_powf(10.0f, x); }
RTK_EMU_FN float __logf(float x) { return __builtin_logf(x); }
RTK_EMU_FN float __log2f(float x) { return __builtin_log2f(x); }
RTK_EMU_FN float __log10f(float x) { return __builtin_log10f(x); }
RTK_EMU_FN float __powf(float x, float y) { return __builtin_powf(x, y); }
RTK_EMU_FN float __sinf(float x) { return __builtin_sinf(x); }
RTK_EMU_FN float __cosf(float x) { return __builtin_cosf(x); }
RTK_EMU_FN float __fdividef(float x, float y) { return x / y; }

// Integer conversions saturate and map NaN to 0, unlike a C++ cast of such a value.
RTK_EMU_FN int emu_to_int(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(x);
}
RTK_EMU_FN int __float2int_rn(float x) { return emu_to_int(__builtin_rintf(x)); }
RTK_EMU_FN int __float2int_rz(float x) { return emu_to_int(x); }
RTK_EMU_FN int __float2int_rd(float x) { return emu_to_int(__builtin_floorf(x)); }
RTK_EMU_FN int __float2int_ru(float x) { return emu_to_int(__builtin_ceilf(x)); }
RTK_EMU_FN float __int2float_rn(int x) { return static_cast<float>(x); }
RTK_EMU_FN float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

#define RTK_EMU_MINMAX(T)                                 \
    RTK_EMU_FN T min(T a, T b) { return a < b ? a : b; }  \
    RTK_EMU_FN T max(T a, T b) { return a > b ? a : b; }
RTK_EMU_MINMAX(int) RTK_EMU_MINMAX(unsigned) RTK_EMU_MINMAX(long long) RTK_EMU_MINMAX(unsigned long long)
RTK_EMU_FN float min(float a, float b) { return __builtin_fminf(a, b); }
RTK_EMU_FN float max(float a, float b) { return __builtin_fmaxf(a, b); }
RTK_EMU_FN void __trap(RTK_EMU_CALLER) { emu::trap(RTK_EMU_SITE("__trap")); }
