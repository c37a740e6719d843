// More products of a warpgroup, for attention; sm_90a only. Operands, accumulators and waits are those of
// ptx/wgmma.cuh; here are all widths that attention needs. Both operands may be transposed (rows of memory are those of
// the summed dimension), and the first one may come from registers.
#pragma once
#include "ptx/wgmma.cuh"

namespace rtk::ptx {

// Accumulators of a product, named in groups of 8; the operands after them are the macro's numbers.
#define RTK_WGMMA_EIGHT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RTK_WGMMA_EIGHT_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define RTK_WGMMA_EIGHT_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define RTK_WGMMA_EIGHT_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define RTK_WGMMA_EIGHT_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define RTK_WGMMA_EIGHT_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define RTK_WGMMA_EIGHT_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define RTK_WGMMA_EIGHT_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define RTK_WGMMA_EIGHT_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define RTK_WGMMA_EIGHT_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define RTK_WGMMA_EIGHT_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define RTK_WGMMA_EIGHT_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define RTK_WGMMA_EIGHT_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define RTK_WGMMA_EIGHT_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define RTK_WGMMA_EIGHT_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define RTK_WGMMA_EIGHT_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define RTK_WGMMA_SUMS_8(i)                                                                       \
    "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define RTK_WGMMA_NAMES_OF_8 RTK_WGMMA_EIGHT_0
#define RTK_WGMMA_SUMS_OF_8 RTK_WGMMA_SUMS_8(0)
#define RTK_WGMMA_NAMES_OF_16 RTK_WGMMA_NAMES_OF_8 ", " RTK_WGMMA_EIGHT_1
#define RTK_WGMMA_SUMS_OF_16 RTK_WGMMA_SUMS_OF_8, RTK_WGMMA_SUMS_8(8)
#define RTK_WGMMA_NAMES_OF_24 RTK_WGMMA_NAMES_OF_16 ", " RTK_WGMMA_EIGHT_2
#define RTK_WGMMA_SUMS_OF_24 RTK_WGMMA_SUMS_OF_16, RTK_WGMMA_SUMS_8(16)
#define RTK_WGMMA_NAMES_OF_32 RTK_WGMMA_NAMES_OF_24 ", " RTK_WGMMA_EIGHT_3
#define RTK_WGMMA_SUMS_OF_32 RTK_WGMMA_SUMS_OF_24, RTK_WGMMA_SUMS_8(24)
#define RTK_WGMMA_NAMES_OF_40 RTK_WGMMA_NAMES_OF_32 ", " RTK_WGMMA_EIGHT_4
#define RTK_WGMMA_SUMS_OF_40 RTK_WGMMA_SUMS_OF_32, RTK_WGMMA_SUMS_8(32)
#define RTK_WGMMA_NAMES_OF_48 RTK_WGMMA_NAMES_OF_40 ", " RTK_WGMMA_EIGHT_5
#define RTK_WGMMA_SUMS_OF_48 RTK_WGMMA_SUMS_OF_40, RTK_WGMMA_SUMS_8(40)
#define RTK_WGMMA_NAMES_OF_56 RTK_WGMMA_NAMES_OF_48 ", " RTK_WGMMA_EIGHT_6
#define RTK_WGMMA_SUMS_OF_56 RTK_WGMMA_SUMS_OF_48, RTK_WGMMA_SUMS_8(48)
#define RTK_WGMMA_NAMES_OF_64 RTK_WGMMA_NAMES_OF_56 ", " RTK_WGMMA_EIGHT_7
#define RTK_WGMMA_SUMS_OF_64 RTK_WGMMA_SUMS_OF_56, RTK_WGMMA_SUMS_8(56)
#define RTK_WGMMA_NAMES_OF_72 RTK_WGMMA_NAMES_OF_64 ", " RTK_WGMMA_EIGHT_8
#define RTK_WGMMA_SUMS_OF_72 RTK_WGMMA_SUMS_OF_64, RTK_WGMMA_SUMS_8(64)
#define RTK_WGMMA_NAMES_OF_80 RTK_WGMMA_NAMES_OF_72 ", " RTK_WGMMA_EIGHT_9
#define RTK_WGMMA_SUMS_OF_80 RTK_WGMMA_SUMS_OF_72, RTK_WGMMA_SUMS_8(72)
#define RTK_WGMMA_NAMES_OF_88 RTK_WGMMA_NAMES_OF_80 ", " RTK_WGMMA_EIGHT_10
#define RTK_WGMMA_SUMS_OF_88 RTK_WGMMA_SUMS_OF_80, RTK_WGMMA_SUMS_8(80)
#define RTK_WGMMA_NAMES_OF_96 RTK_WGMMA_NAMES_OF_88 ", " RTK_WGMMA_EIGHT_11
#define RTK_WGMMA_SUMS_OF_96 RTK_WGMMA_SUMS_OF_88, RTK_WGMMA_SUMS_8(88)
#define RTK_WGMMA_NAMES_OF_104 RTK_WGMMA_NAMES_OF_96 ", " RTK_WGMMA_EIGHT_12
#define RTK_WGMMA_SUMS_OF_104 RTK_WGMMA_SUMS_OF_96, RTK_WGMMA_SUMS_8(96)
#define RTK_WGMMA_NAMES_OF_112 RTK_WGMMA_NAMES_OF_104 ", " RTK_WGMMA_EIGHT_13
#define RTK_WGMMA_SUMS_OF_112 RTK_WGMMA_SUMS_OF_104, RTK_WGMMA_SUMS_8(104)
#define RTK_WGMMA_NAMES_OF_120 RTK_WGMMA_NAMES_OF_112 ", " RTK_WGMMA_EIGHT_14
#define RTK_WGMMA_SUMS_OF_120 RTK_WGMMA_SUMS_OF_112, RTK_WGMMA_SUMS_8(112)
#define RTK_WGMMA_NAMES_OF_128 RTK_WGMMA_NAMES_OF_120 ", " RTK_WGMMA_EIGHT_15
#define RTK_WGMMA_SUMS_OF_128 RTK_WGMMA_SUMS_OF_120, RTK_WGMMA_SUMS_8(120)

// wgmma_ss: both operands in shared memory. `add` 0 starts from zero.
#define RTK_WGMMA_SS(type, n, sums, a_operand, b_operand, add_operand, a_across, b_across)                    \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" RTK_WGMMA_NAMES_OF_##sums          \
        "}, %" a_operand ", %" b_operand ", p, 1, 1, %" a_across ", %" b_across ";\n}\n"                       \
        : RTK_WGMMA_SUMS_OF_##sums                                                                             \
        : "l"(a), "l"(b), "r"(add), "n"(kAcrossA ? 1 : 0), "n"(kAcrossB ? 1 : 0))
#define RTK_WGMMA_SS_OF(n, sums, ...)                                    \
    template <typename T, bool kAcrossA, bool kAcrossB>                  \
    RTK_DEVICE void wgmma_ss(float (&d)[sums], u64 a, u64 b, u32 add) {  \
        if constexpr (is_same<T, bf16>::value) {                         \
            RTK_WGMMA_SS("bf16", n, sums, __VA_ARGS__);                  \
        } else {                                                         \
            RTK_WGMMA_SS("f16", n, sums, __VA_ARGS__);                   \
        }                                                                \
    }
RTK_WGMMA_SS_OF("64", 32, "32", "33", "34", "35", "36")
RTK_WGMMA_SS_OF("80", 40, "40", "41", "42", "43", "44")
RTK_WGMMA_SS_OF("96", 48, "48", "49", "50", "51", "52")
RTK_WGMMA_SS_OF("112", 56, "56", "57", "58", "59", "60")
RTK_WGMMA_SS_OF("128", 64, "64", "65", "66", "67", "68")
RTK_WGMMA_SS_OF("144", 72, "72", "73", "74", "75", "76")
RTK_WGMMA_SS_OF("160", 80, "80", "81", "82", "83", "84")
RTK_WGMMA_SS_OF("176", 88, "88", "89", "90", "91", "92")
RTK_WGMMA_SS_OF("192", 96, "96", "97", "98", "99", "100")

// wgmma_rs: a in registers.
#define RTK_WGMMA_RS(type, n, sums, a0, a1, a2, a3, b_operand, add_operand, b_across)                          \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" RTK_WGMMA_NAMES_OF_##sums          \
        "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_operand ", p, 1, 1, %" b_across ";\n}\n"                \
        : RTK_WGMMA_SUMS_OF_##sums                                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kAcrossB ? 1 : 0))
#define RTK_WGMMA_RS_OF(n, sums, ...)                                                 \
    template <typename T, bool kAcrossB>                                              \
    RTK_DEVICE void wgmma_rs(float (&d)[sums], const u32 (&a)[4], u64 b, u32 add) {   \
        if constexpr (is_same<T, bf16>::value) {                                      \
            RTK_WGMMA_RS("bf16", n, sums, __VA_ARGS__);                               \
        } else {                                                                      \
            RTK_WGMMA_RS("f16", n, sums, __VA_ARGS__);                                \
        }                                                                             \
    }
RTK_WGMMA_RS_OF("64", 32, "32", "33", "34", "35", "36", "37", "38")
RTK_WGMMA_RS_OF("96", 48, "48", "49", "50", "51", "52", "53", "54")
RTK_WGMMA_RS_OF("128", 64, "64", "65", "66", "67", "68", "69", "70")
RTK_WGMMA_RS_OF("192", 96, "96", "97", "98", "99", "100", "101", "102")
RTK_WGMMA_RS_OF("256", 128, "128", "129", "130", "131", "132", "133", "134")

// wgmma_rs_codes: 8-bit operands, a in registers (bytes 4t.. + 3 of k, then those 16 further, of row g and g + 8 as
// above), b with rows of n. e4m3 accumulation keeps about 14 bits; u8 by s8 is exact.
#define RTK_WGMMA_CODES_8(constraint, i)                                                                                 \
    constraint(d[i + 0]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]), constraint(d[i + 4]),          \
        constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define RTK_WGMMA_CODES_OF_32(c) RTK_WGMMA_CODES_8(c, 0), RTK_WGMMA_CODES_8(c, 8), RTK_WGMMA_CODES_8(c, 16), RTK_WGMMA_CODES_8(c, 24)
#define RTK_WGMMA_CODES_OF_64(c)                                                                                        \
    RTK_WGMMA_CODES_OF_32(c), RTK_WGMMA_CODES_8(c, 32), RTK_WGMMA_CODES_8(c, 40), RTK_WGMMA_CODES_8(c, 48),               \
        RTK_WGMMA_CODES_8(c, 56)
#define RTK_WGMMA_RS_CODES(type, sum, constraint, flags, n, sums, a0, a1, a2, a3, b_operand, add_operand)                 \
    RTK_DEVICE void wgmma_rs_##type(sum (&d)[sums], const u32 (&a)[4], u64 b, u32 add) {                                  \
        asm volatile(                                                                                                     \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                                    \
            "wgmma.mma_async.sync.aligned.m64n" n RTK_WGMMA_##type " {" RTK_WGMMA_NAMES_OF_##sums                         \
            "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_operand ", p" flags ";\n}\n"                                   \
            : RTK_WGMMA_CODES_OF_##sums(constraint)                                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                              \
    }
#define RTK_WGMMA_e4m3 "k32.f32.e4m3.e4m3"
#define RTK_WGMMA_u8_s8 "k32.s32.u8.s8"
RTK_WGMMA_RS_CODES(e4m3, float, "+f", ", 1, 1", "64", 32, "32", "33", "34", "35", "36", "37")
RTK_WGMMA_RS_CODES(e4m3, float, "+f", ", 1, 1", "128", 64, "64", "65", "66", "67", "68", "69")
RTK_WGMMA_RS_CODES(u8_s8, i32, "+r", "", "64", 32, "32", "33", "34", "35", "36", "37")
RTK_WGMMA_RS_CODES(u8_s8, i32, "+r", "", "128", 64, "64", "65", "66", "67", "68", "69")

#undef RTK_WGMMA_e4m3
#undef RTK_WGMMA_u8_s8
#undef RTK_WGMMA_RS_CODES
#undef RTK_WGMMA_CODES_OF_64
#undef RTK_WGMMA_CODES_OF_32
#undef RTK_WGMMA_CODES_8
#undef RTK_WGMMA_SS
#undef RTK_WGMMA_SS_OF
#undef RTK_WGMMA_RS
#undef RTK_WGMMA_RS_OF

}  // namespace rtk::ptx
