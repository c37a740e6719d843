// Matrix products of a warpgroup for all types of operands, both in shared memory, with the numbers of columns below;
// sm_90a only. Accumulators have the layout of ptx/wgmma.cuh, whose fence, commit and wait go with these.
//
// An instruction takes 32 bytes of k: 16 of 16-bit elements, 32 of 8-bit ones. 16-bit operands may be transposed, with
// rows of m or n (gemm/operand.cuh has the descriptors). fp8 accumulation keeps about 14 bits; integer accumulation is
// exact.
#pragma once
#include "ptx/wgmma.cuh"

namespace rtk {

struct s8 {  // a type of elements only: u8 is the unsigned one
    u8 bits;
};

}  // namespace rtk

namespace rtk::ptx {

#define RTK_WGMMA_FROM_16(constraint, i) \
    constraint(d[i + 0]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]), \
    constraint(d[i + 4]), constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7]), \
    constraint(d[i + 8]), constraint(d[i + 9]), constraint(d[i + 10]), constraint(d[i + 11]), \
    constraint(d[i + 12]), constraint(d[i + 13]), constraint(d[i + 14]), constraint(d[i + 15])
#define RTK_WGMMA_NAMES_TO_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RTK_WGMMA_NAMES_TO_16 RTK_WGMMA_NAMES_0
#define RTK_WGMMA_NAMES_TO_56 RTK_WGMMA_NAMES_TO_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define RTK_WGMMA_FROM_8(c, i) \
    c(d[i + 0]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define RTK_WGMMA_REGISTERS_8(c) RTK_WGMMA_FROM_8(c, 0)
#define RTK_WGMMA_REGISTERS_16(c) RTK_WGMMA_FROM_16(c, 0)
#define RTK_WGMMA_REGISTERS_32(c) RTK_WGMMA_FROM_16(c, 0), RTK_WGMMA_FROM_16(c, 16)
#define RTK_WGMMA_REGISTERS_48(c) RTK_WGMMA_REGISTERS_32(c), RTK_WGMMA_FROM_16(c, 32)
#define RTK_WGMMA_REGISTERS_56(c) RTK_WGMMA_REGISTERS_48(c), RTK_WGMMA_FROM_8(c, 48)
#define RTK_WGMMA_REGISTERS_64(c) RTK_WGMMA_REGISTERS_32(c), RTK_WGMMA_FROM_16(c, 32), RTK_WGMMA_FROM_16(c, 48)
#define RTK_WGMMA_REGISTERS_96(c) RTK_WGMMA_REGISTERS_64(c), RTK_WGMMA_FROM_16(c, 64), RTK_WGMMA_FROM_16(c, 80)
#define RTK_WGMMA_REGISTERS_112(c) RTK_WGMMA_REGISTERS_96(c), RTK_WGMMA_FROM_16(c, 96)
#define RTK_WGMMA_REGISTERS_128(c)                                                                \
    RTK_WGMMA_REGISTERS_64(c), RTK_WGMMA_FROM_16(c, 64), RTK_WGMMA_FROM_16(c, 80),      \
        RTK_WGMMA_FROM_16(c, 96), RTK_WGMMA_FROM_16(c, 112)

// `types` is the end of the instruction's name, `flags` what follows the predicate.
#define RTK_WGMMA_TYPED(n, sums, constraint, a_operand, b_operand, add_operand, types, flags)               \
    asm volatile(                                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n" n types " {" RTK_WGMMA_NAMES_TO_##sums "}, %" a_operand         \
        ", %" b_operand ", p" flags ";\n}\n"                                                                \
        : RTK_WGMMA_REGISTERS_##sums(constraint)                                                            \
        : "l"(a), "l"(b), "r"(add))

// The flags of 16-bit products: no negation, then whether a and b are transposed.
#define RTK_WGMMA_16_BITS(n, sums, type, ...)                                                          \
    if constexpr (kAcrossA && kAcrossB) {                                                              \
        RTK_WGMMA_TYPED(n, sums, "+f", __VA_ARGS__, "k16.f32." type "." type, ", 1, 1, 1, 1");         \
    } else if constexpr (kAcrossA) {                                                                   \
        RTK_WGMMA_TYPED(n, sums, "+f", __VA_ARGS__, "k16.f32." type "." type, ", 1, 1, 1, 0");         \
    } else if constexpr (kAcrossB) {                                                                   \
        RTK_WGMMA_TYPED(n, sums, "+f", __VA_ARGS__, "k16.f32." type "." type, ", 1, 1, 0, 1");         \
    } else {                                                                                           \
        RTK_WGMMA_TYPED(n, sums, "+f", __VA_ARGS__, "k16.f32." type "." type, ", 1, 1, 0, 0");         \
    }

#define RTK_WGMMA_FP8_PAIR(n, sums, left, right, ...)                                                              \
    if constexpr (is_same<A, left>::value && is_same<B, right>::value) {                                           \
        RTK_WGMMA_TYPED(n, sums, "+f", __VA_ARGS__, "k32.f32." #left "." #right, ", 1, 1");                        \
    }

#define RTK_WGMMA_INTEGER_PAIR(n, sums, left, right, ...)                                              \
    if constexpr (is_same<A, left>::value && is_same<B, right>::value) {                               \
        RTK_WGMMA_TYPED(n, sums, "+r", __VA_ARGS__, "k32.s32." #left "." #right, "");                  \
    }

// d += a * b, or d = a * b if `add` is 0.
#define RTK_WGMMA_TYPED_OF(n, sums, ...)                                                   \
    template <typename A, typename B, bool kAcrossA, bool kAcrossB>                        \
    RTK_DEVICE void wgmma_typed(float (&d)[sums], u64 a, u64 b, u32 add) {                 \
        if constexpr (is_same<A, bf16>::value) {                                           \
            RTK_WGMMA_16_BITS(n, sums, "bf16", __VA_ARGS__)                                \
        } else if constexpr (is_same<A, fp16>::value) {                                    \
            RTK_WGMMA_16_BITS(n, sums, "f16", __VA_ARGS__)                                 \
        } else {                                                                           \
            static_assert(!kAcrossA && !kAcrossB, "only 16-bit elements may lie across");  \
            RTK_WGMMA_FP8_PAIR(n, sums, e4m3, e4m3, __VA_ARGS__)                           \
            RTK_WGMMA_FP8_PAIR(n, sums, e4m3, e5m2, __VA_ARGS__)                           \
            RTK_WGMMA_FP8_PAIR(n, sums, e5m2, e4m3, __VA_ARGS__)                           \
            RTK_WGMMA_FP8_PAIR(n, sums, e5m2, e5m2, __VA_ARGS__)                           \
        }                                                                                  \
    }                                                                                      \
    template <typename A, typename B, bool kAcrossA, bool kAcrossB>                        \
    RTK_DEVICE void wgmma_typed(i32 (&d)[sums], u64 a, u64 b, u32 add) {                   \
        static_assert(!kAcrossA && !kAcrossB, "only 16-bit elements may lie across");      \
        RTK_WGMMA_INTEGER_PAIR(n, sums, s8, s8, __VA_ARGS__)                               \
        RTK_WGMMA_INTEGER_PAIR(n, sums, s8, u8, __VA_ARGS__)                               \
        RTK_WGMMA_INTEGER_PAIR(n, sums, u8, s8, __VA_ARGS__)                               \
        RTK_WGMMA_INTEGER_PAIR(n, sums, u8, u8, __VA_ARGS__)                               \
    }
RTK_WGMMA_TYPED_OF("16", 8, "8", "9", "10")
RTK_WGMMA_TYPED_OF("32", 16, "16", "17", "18")
RTK_WGMMA_TYPED_OF("64", 32, "32", "33", "34")
RTK_WGMMA_TYPED_OF("96", 48, "48", "49", "50")
RTK_WGMMA_TYPED_OF("112", 56, "56", "57", "58")
RTK_WGMMA_TYPED_OF("128", 64, "64", "65", "66")
RTK_WGMMA_TYPED_OF("192", 96, "96", "97", "98")
RTK_WGMMA_TYPED_OF("224", 112, "112", "113", "114")
RTK_WGMMA_TYPED_OF("256", 128, "128", "129", "130")

// The same with a in registers, and both operands along k: a[0 .. 3] are rows g and g + 8 at bytes 4t, then both at 16 + 4t,
// of lane 4g + t.
#define RTK_WGMMA_LEFT(n, sums, types, flags, a0, a1, a2, a3, b_operand, add_operand)                          \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n" n types " {" RTK_WGMMA_NAMES_TO_##sums "}, {%" a0 ", %" a1 ", %" a2 \
        ", %" a3 "}, %" b_operand ", p" flags ";\n}\n"                                                         \
        : RTK_WGMMA_REGISTERS_##sums("+f")                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define RTK_WGMMA_LEFT_PAIR(n, sums, left, right, types, flags, ...)                     \
    if constexpr (is_same<A, left>::value && is_same<B, right>::value) {                 \
        RTK_WGMMA_LEFT(n, sums, types, flags, __VA_ARGS__);                              \
    }
#define RTK_WGMMA_LEFT_OF(n, sums, ...)                                                            \
    template <typename A, typename B>                                                              \
    RTK_DEVICE void wgmma_left(float (&d)[sums], const u32 (&a)[4], u64 b, u32 add) {              \
        RTK_WGMMA_LEFT_PAIR(n, sums, bf16, bf16, "k16.f32.bf16.bf16", ", 1, 1, 0", __VA_ARGS__)    \
        RTK_WGMMA_LEFT_PAIR(n, sums, fp16, fp16, "k16.f32.f16.f16", ", 1, 1, 0", __VA_ARGS__)      \
        RTK_WGMMA_LEFT_PAIR(n, sums, e4m3, e4m3, "k32.f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)       \
        RTK_WGMMA_LEFT_PAIR(n, sums, e4m3, e5m2, "k32.f32.e4m3.e5m2", ", 1, 1", __VA_ARGS__)       \
        RTK_WGMMA_LEFT_PAIR(n, sums, e5m2, e4m3, "k32.f32.e5m2.e4m3", ", 1, 1", __VA_ARGS__)       \
        RTK_WGMMA_LEFT_PAIR(n, sums, e5m2, e5m2, "k32.f32.e5m2.e5m2", ", 1, 1", __VA_ARGS__)       \
    }
RTK_WGMMA_LEFT_OF("16", 8, "8", "9", "10", "11", "12", "13")
RTK_WGMMA_LEFT_OF("32", 16, "16", "17", "18", "19", "20", "21")
RTK_WGMMA_LEFT_OF("64", 32, "32", "33", "34", "35", "36", "37")
RTK_WGMMA_LEFT_OF("96", 48, "48", "49", "50", "51", "52", "53")
RTK_WGMMA_LEFT_OF("128", 64, "64", "65", "66", "67", "68", "69")

#undef RTK_WGMMA_LEFT_OF
#undef RTK_WGMMA_LEFT_PAIR
#undef RTK_WGMMA_LEFT
#undef RTK_WGMMA_TYPED_OF
#undef RTK_WGMMA_INTEGER_PAIR
#undef RTK_WGMMA_FP8_PAIR
#undef RTK_WGMMA_16_BITS
#undef RTK_WGMMA_TYPED
#undef RTK_WGMMA_REGISTERS_128
#undef RTK_WGMMA_REGISTERS_112
#undef RTK_WGMMA_REGISTERS_96
#undef RTK_WGMMA_REGISTERS_64
#undef RTK_WGMMA_REGISTERS_56
#undef RTK_WGMMA_REGISTERS_48
#undef RTK_WGMMA_REGISTERS_32
#undef RTK_WGMMA_REGISTERS_16
#undef RTK_WGMMA_REGISTERS_8
#undef RTK_WGMMA_FROM_16
#undef RTK_WGMMA_FROM_8
#undef RTK_WGMMA_NAMES_TO_56
#undef RTK_WGMMA_NAMES_TO_16
#undef RTK_WGMMA_NAMES_TO_8

}  // namespace rtk::ptx
