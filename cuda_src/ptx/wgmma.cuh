// Tensor-core products of a warpgroup (four warps, the first a multiple of 4), asynchronous; sm_90a only.
//
// d += a * b with m64 k16 and twice as many columns as d has elements, 16-bit operands, fp32 sums. Lane 4g + t of warp w
// (of the four) holds
//   d[4j + 2r + c]   row 16w + g + 8r, column 8j + 2t + c
//   a[2h + r]        row 16w + g + 8r, k = 8h + 2t, + 1          (where a comes from registers)
// Neither d nor a may be touched between the call and the wait for its group.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Descriptor of a matrix of 16-bit elements in rows of 128 bytes, with the 128-byte swizzle, groups of 8 rows 1024
// bytes apart. `next`: bytes from 64 columns to the next 64, where rows are longer. + 1 is 16 bytes further.
RTK_DEVICE u64 matrix_descriptor(SharedAddress address, u32 next) {
    return (address & 0x3ffffu) >> 4 | static_cast<u64>(next >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

// Orders earlier accesses to the registers before the products that follow.
RTK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Forces these registers to be written here, before the fence that follows; otherwise the compiler may convert operands
// between the products, and the products then wait for each other.
template <int N>
RTK_DEVICE void wgmma_pin(u32 (&registers)[N]) {
#pragma unroll
    for (u32& r : registers) asm volatile("" : "+r"(r)::"memory");
}

template <int N>
RTK_DEVICE void wgmma_pin(float (&sums)[N]) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

RTK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the newest groups are unfinished.
template <int kPending>
RTK_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Accumulators of a product with n columns are n / 2 registers, named here in groups of 16.
#define RTK_WGMMA_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define RTK_WGMMA_NAMES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RTK_WGMMA_NAMES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define RTK_WGMMA_NAMES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RTK_WGMMA_NAMES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define RTK_WGMMA_NAMES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RTK_WGMMA_NAMES_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define RTK_WGMMA_NAMES_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RTK_WGMMA_SUMS_16(i) \
    "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7]), \
    "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), \
    "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define RTK_WGMMA_NAMES_TO_32 RTK_WGMMA_NAMES_0 ", " RTK_WGMMA_NAMES_1
#define RTK_WGMMA_SUMS_TO_32 RTK_WGMMA_SUMS_16(0), RTK_WGMMA_SUMS_16(16)
#define RTK_WGMMA_NAMES_TO_48 RTK_WGMMA_NAMES_TO_32 ", " RTK_WGMMA_NAMES_2
#define RTK_WGMMA_SUMS_TO_48 RTK_WGMMA_SUMS_TO_32, RTK_WGMMA_SUMS_16(32)
#define RTK_WGMMA_NAMES_TO_64 RTK_WGMMA_NAMES_TO_48 ", " RTK_WGMMA_NAMES_3
#define RTK_WGMMA_SUMS_TO_64 RTK_WGMMA_SUMS_TO_48, RTK_WGMMA_SUMS_16(48)
#define RTK_WGMMA_NAMES_TO_80 RTK_WGMMA_NAMES_TO_64 ", " RTK_WGMMA_NAMES_4
#define RTK_WGMMA_SUMS_TO_80 RTK_WGMMA_SUMS_TO_64, RTK_WGMMA_SUMS_16(64)
#define RTK_WGMMA_NAMES_TO_96 RTK_WGMMA_NAMES_TO_80 ", " RTK_WGMMA_NAMES_5
#define RTK_WGMMA_SUMS_TO_96 RTK_WGMMA_SUMS_TO_80, RTK_WGMMA_SUMS_16(80)
#define RTK_WGMMA_NAMES_TO_112 RTK_WGMMA_NAMES_TO_96 ", " RTK_WGMMA_NAMES_6
#define RTK_WGMMA_SUMS_TO_112 RTK_WGMMA_SUMS_TO_96, RTK_WGMMA_SUMS_16(96)
#define RTK_WGMMA_NAMES_TO_128 RTK_WGMMA_NAMES_TO_112 ", " RTK_WGMMA_NAMES_7
#define RTK_WGMMA_SUMS_TO_128 RTK_WGMMA_SUMS_TO_112, RTK_WGMMA_SUMS_16(112)

// Both operands in shared memory, a with rows of k, b with rows of k or (kAcross) of n; gemm/operand.cuh has the
// descriptors. `add` 0 starts from zero. The macro's numbers are those of the operands after the accumulators.
#define RTK_WGMMA_SHARED(type, n, sums, a_operand, b_operand, add_operand, across_operand)                  \
    asm volatile(                                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_operand ", 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" RTK_WGMMA_NAMES_TO_##sums       \
        "}, %" a_operand ", %" b_operand ", p, 1, 1, 0, %" across_operand ";\n}\n"                          \
        : RTK_WGMMA_SUMS_TO_##sums                                                                          \
        : "l"(a), "l"(b), "r"(add), "n"(kAcross ? 1 : 0))

#define RTK_WGMMA_SHARED_OF(n, sums, ...)                                    \
    template <typename T, bool kAcross>                                      \
    RTK_DEVICE void wgmma_shared(float (&d)[sums], u64 a, u64 b, u32 add) {  \
        if constexpr (is_same<T, bf16>::value) {                             \
            RTK_WGMMA_SHARED("bf16", n, sums, __VA_ARGS__);                  \
        } else {                                                             \
            RTK_WGMMA_SHARED("f16", n, sums, __VA_ARGS__);                   \
        }                                                                    \
    }
RTK_WGMMA_SHARED_OF("64", 32, "32", "33", "34", "35")
RTK_WGMMA_SHARED_OF("96", 48, "48", "49", "50", "51")
RTK_WGMMA_SHARED_OF("128", 64, "64", "65", "66", "67")
RTK_WGMMA_SHARED_OF("160", 80, "80", "81", "82", "83")

// a in registers, b in shared memory with rows of n (transposed).
#define RTK_WGMMA_REGISTERS(type)                                                                           \
    asm volatile(                                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" RTK_WGMMA_NAMES_TO_64             \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                                                    \
        : RTK_WGMMA_SUMS_TO_64                                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

template <typename T>
RTK_DEVICE void wgmma_registers(float (&d)[64], const u32 (&a)[4], u64 b, u32 add) {
    if constexpr (is_same<T, bf16>::value) {
        RTK_WGMMA_REGISTERS("bf16");
    } else {
        RTK_WGMMA_REGISTERS("f16");
    }
}

// The same with 256 columns.
template <typename T>
RTK_DEVICE void wgmma_registers(float (&d)[128], const u32 (&a)[4], u64 b, u32 add) {
    static_assert(is_same<T, bf16>::value);
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" RTK_WGMMA_NAMES_TO_128
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        : RTK_WGMMA_SUMS_TO_128
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef RTK_WGMMA_SHARED
#undef RTK_WGMMA_SHARED_OF
#undef RTK_WGMMA_REGISTERS
#undef RTK_WGMMA_SUMS_16

}  // namespace rtk::ptx
