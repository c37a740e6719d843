// Scales of an operand of the mma.sync product: their addresses and values.
#pragma once
#include "common/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/packed.cuh"

namespace rtk {

enum ScaleToken : int { kNoScale, kScaleFp32, kScaleE8m0, kScaleUe4m3 };

// 2^(byte - 127); 255 is NaN.
RTK_DEVICE float e8m0_value(u32 byte) {
    return __uint_as_float(byte == 0u ? 0x00400000u : byte == 255u ? 0x7fffffffu : byte << 23);
}

struct MmaScales {
    const u8* data;            // of this group
    i64 row_pitch, depth_pitch;
    i64 rows, depth;           // divisors (abi.cuh: divided) of a row and of k; 0: one scale for all of them
    i64 blocks;                // swizzled: 512-byte blocks across k
    int token;
    bool swizzled, in_words;   // in_words: four scales of a row can be read as one aligned word

    // Address of the first scale of a row of the operand, and the offset of the scale of k from there, in bytes.
    RTK_DEVICE const u8* of_row(i64 row) const {
        if (swizzled) return data + (row / 128 * blocks * 512 + row % 32 * 16 + row % 128 / 32 * 4);
        const i64 index = rows == 0 ? 0 : divided(static_cast<u32>(row), rows);
        return data + index * row_pitch * (token == kScaleFp32 ? 4 : 1);
    }
    RTK_DEVICE i64 at_column(u32 column) const {
        if (swizzled) return static_cast<i64>(column / 4) * 512 + column % 4;
        return column * depth_pitch * (token == kScaleFp32 ? 4 : 1);
    }
};

// A scale byte as two equal halves, exact in that type: e8m0 in bf16, ue4m3 in both.
template <bool kBf16>
RTK_DEVICE u32 scale_pair(u32 byte, int token) {
    u32 half;
    if (kBf16 && token == kScaleE8m0) {  // 2^-127 is 0x0040; 255 gets a bit of fraction
        half = max(byte << 7, 0x40u) | (byte + 1u) >> 8;
    } else {
#if RTK_HAS_FP8_CVT
        half = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(byte & 0x7fu));
        if constexpr (kBf16) half = ptx::cvt_bf16x2(ptx::cvt_f16_to_f32(static_cast<u16>(half)), 0.0f);
#else
        const float value = decode_e4m3(byte & 0x7fu);
        half = kBf16 ? ptx::cvt_bf16x2(value, 0.0f) : ptx::cvt_f16x2(value, 0.0f);
#endif
    }
    return __byte_perm(half, 0u, 0x1010);
}

// Scales of a row for `count` stretches of k, each `every` long, from k0, as floats `pitch` bytes apart.
RTK_DEVICE void fetch_scale_floats(ptx::SharedAddress to, int pitch, const MmaScales& scales, i64 row, int k0, int count,
                                   int every, int k_last) {
    const u8* first = scales.of_row(row);
#pragma unroll 1
    for (int i = 0; i < count; ++i, to = to + pitch, k0 += every) {
        const bool exists = k0 < k_last;
        const u8* from = first + (exists ? scales.at_column(divided(static_cast<u32>(k0), scales.depth)) : 0);
        if (scales.token == kScaleFp32) {
            ptx::cp_async_4_partial(to, from, exists ? 4 : 0);
        } else {
            const u32 byte = ptx::ld_keep<1>(from).w[0];
            const float value = scales.token == kScaleE8m0 ? e8m0_value(byte) : decode_e4m3(byte & 0x7fu);
            ptx::st_shared_4(to, __float_as_uint(value));
        }
    }
}

// kBytes scales of a row, from a column that is a multiple of four; zeros from `columns` on.
template <int kBytes>
RTK_DEVICE void fetch_scale_bytes(ptx::SharedAddress to, const MmaScales& scales, i64 row, u32 column, u32 columns) {
    const u8* first = scales.of_row(row);
#pragma unroll
    for (int w = 0; w < kBytes / 4; ++w, column += 4) {
        const int exist = column >= columns ? 0 : static_cast<int>(min(columns - column, 4u));
        if (scales.in_words) {
            ptx::cp_async_4_partial(to + w * 4, first + (exist == 0 ? 0 : scales.at_column(column)), exist);
        } else {
            u32 word = 0u;
            for (int j = 0; j < exist; ++j) word |= ptx::ld_keep<1>(first + scales.at_column(column + j)).w[0] << (8 * j);
            ptx::st_shared_4(to + w * 4, word);
        }
    }
}

}  // namespace rtk
