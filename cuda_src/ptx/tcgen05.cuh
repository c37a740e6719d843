// Tensor-core products with sums in tensor memory, issued by one thread, asynchronous; sm_100a and relatives. Compiled
// and emulated, never run on a GPU.
//
// Tensor memory has 128 lanes of 512 words. An address is lane << 16 | column. A product has 128 rows: row i of its sums
// is lane i, and column j of the result is word j. Products, copies of scales and commits of one thread happen in order.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace rtk::ptx {

enum TensorKind { kTensorF16, kTensorFp8, kTensorMxFp8, kTensorNvFp4 };

// A matrix with rows of 128 bytes along k, with the 128-byte swizzle, groups of 8 rows 1024 bytes apart. + 2 is 32 bytes
// of k further: the step of a product of every kind.
RTK_DEVICE u64 tensor_descriptor(SharedAddress address) {
    return (address & 0x3ffffu) >> 4 | 1ull << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 46 | 2ull << 61;
}

// A block of 128 x 4 scales: 32 rows of 16 bytes, not swizzled, groups of 8 rows 128 bytes apart.
RTK_DEVICE u64 scales_descriptor(SharedAddress address) {
    return (address & 0x3ffffu) >> 4 | static_cast<u64>(128 >> 4) << 32 | 1ull << 46;
}

// Called by a warp. Writes the address of kColumns columns to shared memory; waits for other blocks of the SM.
template <int kColumns>
RTK_DEVICE void tensor_alloc(SharedAddress result) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "n"(kColumns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// Called by the same warp, before the block ends.
template <int kColumns>
RTK_DEVICE void tensor_free(u32 address) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns) : "memory");
}

// d (+)= a b^T for 32 bytes of k. `instruction`: types and sizes , as bits.
template <int KIND>
RTK_DEVICE void tensor_product(u32 d, u64 a, u64 b, u32 instruction, bool add) {
    static_assert(KIND == kTensorF16 || KIND == kTensorFp8);
    if constexpr (KIND == kTensorF16) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
            "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d), "l"(a), "l"(b), "r"(instruction),
            "r"(add ? 1u : 0u)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
            "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n}\n" ::"r"(d), "l"(a), "l"(b), "r"(instruction),
            "r"(add ? 1u : 0u)
            : "memory");
    }
}

// The same with scales in tensor memory.
template <int KIND>
RTK_DEVICE void tensor_product_scaled(u32 d, u64 a, u64 b, u32 instruction, u32 scale_a, u32 scale_b, bool add) {
    static_assert(KIND == kTensorMxFp8 || KIND == kTensorNvFp4);
    if constexpr (KIND == kTensorMxFp8) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(d), "l"(a),
            "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(add ? 1u : 0u)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(d),
            "l"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(add ? 1u : 0u)
            : "memory");
    }
}

// Copies a block of scales to four columns of tensor memory: scale j of row 32 c + i is byte j of word c of lanes i,
// 32 + i, 64 + i and 96 + i.
RTK_DEVICE void tensor_copy_scales(u32 to, u64 from) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// Arrives at an mbarrier when everything that this thread has issued is done.
RTK_DEVICE void tensor_commit(SharedAddress barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

// Between a barrier of any kind and accesses to tensor memory on its other side.
RTK_DEVICE void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
RTK_DEVICE void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Called by a warp: 32 words of each of its lanes, those of lane 32 (warp % 4) + i for thread i. `from`: the address of
// the first word, with the warp's first lane.
RTK_DEVICE void tensor_load(u32 from, u32 (&r)[32]) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8]),
          "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15]), "=r"(r[16]),
          "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]),
          "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
        : "r"(from)
        : "memory");
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace rtk::ptx
