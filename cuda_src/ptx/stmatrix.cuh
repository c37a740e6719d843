// Stores matrices of 8 x 8 16-bit elements from registers to shared memory (sm_90 and up), the inverse of ldmatrix.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Four matrices. Lane 4g + t has elements 2t and 2t + 1 of row g of each, in one register; lane 8i + r passes the
// aligned address of the 16 bytes of row r of matrix i. The whole warp calls this.
RTK_DEVICE void stmatrix_x4(SharedAddress row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same with each matrix transposed: row r of matrix i in memory is column r of the registers.
RTK_DEVICE void stmatrix_x4_trans(SharedAddress row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

}  // namespace rtk::ptx
