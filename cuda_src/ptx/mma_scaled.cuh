// Tensor-core products of one warp with block scales along k (sm_120a): d += (a * scale_a) * (b * scale_b). Registers
// of a, b and d are those of ptx/mma.cuh. A scale is one byte; a product takes kVector of them per row of a and column
// of b, bytes `byte` ... of a word: that of row g + 8r is in lane 4g + 2 * pair_a + r, that of column g in lane 4g +
// lane_b. So lane 4g + t holds the word of row 8t + g of 32 rows, which serve two products (pair_a) or four (lane_b).
#pragma once
#include "common/abi.cuh"

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define RTK_HAS_BLOCK_SCALED_MMA 1
#else
#define RTK_HAS_BLOCK_SCALED_MMA 0
#endif

namespace rtk::ptx {

#if RTK_HAS_BLOCK_SCALED_MMA
#define RTK_MMA_SCALED(name, instruction)                                                                              \
    RTK_DEVICE void name(float(&d)[4], const u32(&a)[4], const u32(&b)[2], u32 scale_a, u32 scale_b, int byte,         \
                         int pair_a, int lane_b) {                                                                     \
        asm volatile("mma.sync.aligned." instruction                                                                   \
                     " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%11,%12}, {%13}, {%14,%15};"      \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),                 \
                       "h"(static_cast<u16>(byte)), "h"(static_cast<u16>(pair_a)), "r"(scale_b),                       \
                       "h"(static_cast<u16>(byte)), "h"(static_cast<u16>(lane_b)));                                    \
    }

// One e8m0 scale for 32 elements (k32), two for 64 (k64), four ue4m3 scales for 64.
RTK_MMA_SCALED(mma_m16n8k32_e4m3_e8m0,
               "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0")
RTK_MMA_SCALED(mma_m16n8k64_e2m1_e8m0, "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0")
RTK_MMA_SCALED(mma_m16n8k64_e2m1_ue4m3,
               "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3")
#undef RTK_MMA_SCALED
#endif

}  // namespace rtk::ptx
