// Tensor-core products of one warp, d += a * b, and the loads that feed them (sm_80 and up). All 32 lanes call.
//
// With e elements per 32-bit register (8, 4, 2 or 1 for 4-, 8-, 16- and 32-bit operands) a product is m16 n8 k(8e). Lane
// 4g + t holds, low bits first:
//   a[2h + r]   rows g + 8r,       k = 4eh + et ... + e-1        (h, r in 0..1)
//   b[h]        column g,          k = 4eh + et ... + e-1
//   d[2r + c]   row g + 8r, column 2t + c                        (c in 0..1)
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

#define RTK_MMA_F32(name, instruction)                                                                          \
    RTK_DEVICE void name(float(&d)[4], const u32(&a)[4], const u32(&b)[2]) {                                    \
        asm volatile("mma.sync.aligned." instruction " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
    }

RTK_MMA_F32(mma_m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
RTK_MMA_F32(mma_m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32")
RTK_MMA_F32(mma_m16n8k8_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")  // ignores the low 13 bits of each operand
#if RTK_HAS_FP8_CVT
RTK_MMA_F32(mma_m16n8k32_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
RTK_MMA_F32(mma_m16n8k32_e4m3_e5m2, "m16n8k32.row.col.f32.e4m3.e5m2.f32")
RTK_MMA_F32(mma_m16n8k32_e5m2_e4m3, "m16n8k32.row.col.f32.e5m2.e4m3.f32")
RTK_MMA_F32(mma_m16n8k32_e5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")
#endif
#undef RTK_MMA_F32

// With k = 8: only a[0], a[1] and b[0] of the above.
#define RTK_MMA_K8_F32(name, instruction)                                                                     \
    RTK_DEVICE void name(float(&d)[4], u32 a0, u32 a1, u32 b) {                                               \
        asm volatile("mma.sync.aligned." instruction " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"          \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
                     : "r"(a0), "r"(a1), "r"(b));                                                             \
    }

RTK_MMA_K8_F32(mma_m16n8k8_bf16, "m16n8k8.row.col.f32.bf16.bf16.f32")
RTK_MMA_K8_F32(mma_m16n8k8_f16, "m16n8k8.row.col.f32.f16.f16.f32")
#undef RTK_MMA_K8_F32

// Sums in fp16: d[r] holds columns 2t (low half) and 2t + 1 of row g + 8r.
RTK_DEVICE void mma_m16n8k16_f16_sums(u32 (&d)[2], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#define RTK_MMA_S32(name, instruction)                                                                          \
    RTK_DEVICE void name(i32(&d)[4], const u32(&a)[4], const u32(&b)[2]) {                                      \
        asm volatile("mma.sync.aligned." instruction " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"   \
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
    }

RTK_MMA_S32(mma_m16n8k32_s8, "m16n8k32.row.col.s32.s8.s8.s32")
RTK_MMA_S32(mma_m16n8k32_s8_u8, "m16n8k32.row.col.s32.s8.u8.s32")
RTK_MMA_S32(mma_m16n8k32_u8_s8, "m16n8k32.row.col.s32.u8.s8.s32")
RTK_MMA_S32(mma_m16n8k32_u8, "m16n8k32.row.col.s32.u8.u8.s32")
// 4-bit operands, eight per register. Targets from sm_90 on have no such unit and call a slow function.
RTK_MMA_S32(mma_m16n8k64_s4, "m16n8k64.row.col.s32.s4.s4.s32")
RTK_MMA_S32(mma_m16n8k64_s4_u4, "m16n8k64.row.col.s32.s4.u4.s32")
RTK_MMA_S32(mma_m16n8k64_u4_s4, "m16n8k64.row.col.s32.u4.s4.s32")
RTK_MMA_S32(mma_m16n8k64_u4, "m16n8k64.row.col.s32.u4.u4.s32")
#undef RTK_MMA_S32

// Four 8x8 matrices of 16-bit elements from shared memory: lane 8i + j gives the address (16-byte aligned) of row j of
// matrix i, and lane 4g + t gets elements 2t, 2t + 1 of row g of matrix i in r[i].
RTK_DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same with each matrix transposed: the lane gets rows 2t, 2t + 1 of column g.
RTK_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Two matrices; the addresses of lanes 16 to 31 are ignored.
RTK_DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

}  // namespace rtk::ptx
