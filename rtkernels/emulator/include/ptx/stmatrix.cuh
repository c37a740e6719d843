// Host version of cuda_src/ptx/stmatrix.cuh. Each lane writes the row whose address it passes.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void stmatrix_x4(SharedAddress row, u32 a, u32 b, u32 c, u32 d, RTK_EMU_CALLER) {
    u64 all[2][32];
    __builtin_memcpy(all[0], emu::gather(0xffffffffu, a | static_cast<u64>(b) << 32, RTK_EMU_SITE("stmatrix_x4")), sizeof(all[0]));
    __builtin_memcpy(all[1], emu::gather(0xffffffffu, c | static_cast<u64>(d) << 32, RTK_EMU_SITE("stmatrix_x4")), sizeof(all[1]));
    const u32 matrix = emu::lane() / 8, first = emu::lane() % 8 * 4;
    Raw<16> own;
    for (u32 t = 0; t < 4; ++t) own.w[t] = static_cast<u32>(all[matrix / 2][first + t] >> 32 * (matrix % 2));
    st<16>(row, own);
}

RTK_DEVICE void stmatrix_x4_trans(SharedAddress row, u32 a, u32 b, u32 c, u32 d, RTK_EMU_CALLER) {
    u64 all[2][32];
    __builtin_memcpy(all[0], emu::gather(0xffffffffu, a | static_cast<u64>(b) << 32, RTK_EMU_SITE("stmatrix_x4_trans")), sizeof(all[0]));
    __builtin_memcpy(all[1], emu::gather(0xffffffffu, c | static_cast<u64>(d) << 32, RTK_EMU_SITE("stmatrix_x4_trans")), sizeof(all[1]));
    const u32 matrix = emu::lane() / 8, column = emu::lane() % 8;
    Raw<16> own{};
    for (u32 g = 0; g < 8; ++g) {
        const u32 element = static_cast<u32>(all[matrix / 2][4 * g + column / 2] >> (32 * (matrix % 2) + 16 * (column % 2))) & 0xffffu;
        own.w[g / 2] |= element << 16 * (g % 2);
    }
    st<16>(row, own);
}

}  // namespace rtk::ptx
