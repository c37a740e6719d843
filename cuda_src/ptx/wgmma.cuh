// Tensor-core products of a warpgroup (four warps, the first a multiple of 4), asynchronous; sm_90a only.
//
// d += a * b with m64 n128 (or n256) k16, 16-bit operands, fp32 sums. Lane 4g + t of warp w (of the four) holds
//   d[4j + 2r + c]   row 16w + g + 8r, column 8j + 2t + c
//   a[2h + r]        row 16w + g + 8r, k = 8h + 2t, + 1          (where a comes from registers)
// Neither d nor a may be touched between the call and the wait for its group.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace rtk::ptx {

// A matrix of 16-bit elements in rows of 128 bytes, with the 128-byte swizzle, groups of 8 rows 1024 bytes apart. `next` is
// how many bytes lie between 64 columns and the next, where rows are longer. 16 bytes further is + 1.
RTK_DEVICE u64 matrix_descriptor(SharedAddress address, u32 next) {
    return (address & 0x3ffffu) >> 4 | static_cast<u64>(next >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

// Orders earlier accesses to the registers before the products that follow.
RTK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Has these registers written here, before the fence that follows; otherwise the compiler may convert operands between
// the products, and the products then wait for each other.
template <int N>
RTK_DEVICE void wgmma_pin(u32 (&registers)[N]) {
#pragma unroll
    for (u32& r : registers) asm volatile("" : "+r"(r)::"memory");
}

RTK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the newest groups are unfinished.
template <int kPending>
RTK_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define RTK_WGMMA_NAMES \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63"
#define RTK_WGMMA_SUMS \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
    "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), \
    "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), \
    "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
    "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), \
    "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), \
    "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
    "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define RTK_WGMMA_NAMES_256 \
    RTK_WGMMA_NAMES ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RTK_WGMMA_SUMS_256 \
    RTK_WGMMA_SUMS, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// Both operands in shared memory, a with rows of k, b with rows of k or (kAcross) of n; gemm/operand.cuh has the
// descriptors. `add` 0 starts from zero.
#define RTK_WGMMA_SHARED(type)                                                                              \
    asm volatile(                                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" RTK_WGMMA_NAMES                   \
        "}, %64, %65, p, 1, 1, 0, %67;\n}\n"                                                                \
        : RTK_WGMMA_SUMS                                                                                    \
        : "l"(a), "l"(b), "r"(add), "n"(kAcross ? 1 : 0))

template <typename T, bool kAcross>
RTK_DEVICE void wgmma_shared(float (&d)[64], u64 a, u64 b, u32 add) {
    if constexpr (is_same<T, bf16>::value) {
        RTK_WGMMA_SHARED("bf16");
    } else {
        RTK_WGMMA_SHARED("f16");
    }
}

// a in registers, b in shared memory with rows of n (transposed).
#define RTK_WGMMA_REGISTERS(type)                                                                           \
    asm volatile(                                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" RTK_WGMMA_NAMES                   \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                                                    \
        : RTK_WGMMA_SUMS                                                                                    \
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
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" RTK_WGMMA_NAMES_256
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        : RTK_WGMMA_SUMS_256
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef RTK_WGMMA_SHARED
#undef RTK_WGMMA_REGISTERS
#undef RTK_WGMMA_NAMES_256
#undef RTK_WGMMA_SUMS_256
#undef RTK_WGMMA_NAMES
#undef RTK_WGMMA_SUMS

}  // namespace rtk::ptx
