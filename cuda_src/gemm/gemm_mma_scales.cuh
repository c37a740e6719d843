// Scales of an operand of the mma.sync product: where a scale lies, and its value.
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

    RTK_DEVICE i64 place(u32 row, u32 column) const {
        if (swizzled) return (row / 128 * blocks + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
        return row * row_pitch + column * depth_pitch;
    }

    // Of a row of the operand and k.
    RTK_DEVICE i64 place_of(u32 row, u32 at) const { return place(rows == 0 ? 0u : divided(row, rows), divided(at, depth)); }

    // Of a row, where one scale covers all of k (fp32).
    RTK_DEVICE float of_row(i64 row) const {
        return reinterpret_cast<const float*>(data)[rows == 0 ? 0 : divided(static_cast<u32>(row), rows) * row_pitch];
    }
};

// A scale byte as two equal halves, exact in that type: e8m0 in bf16, ue4m3 in both.
template <bool kBf16>
RTK_DEVICE u32 scale_pair(u32 byte, int token) {
    u32 half;
    if (kBf16 && token == kScaleE8m0) {
        half = byte == 0u ? 0x0040u : byte == 255u ? 0x7fffu : byte << 7;
    } else {
        const float value = decode_e4m3(byte & 0x7fu);
        half = (kBf16 ? ptx::cvt_bf16x2(value, 0.0f) : ptx::cvt_f16x2(value, 0.0f)) & 0xffffu;
    }
    return half * 0x10001u;
}

// Scales of `count` stretches of k, `every` long, as floats [count][kRows] (then the next operand's, `pitch` behind).
template <int kRows, int kThreads, typename SourceRow>
RTK_DEVICE void fetch_scale_floats(ptx::SharedAddress to, int pitch, const MmaScales& scales, int k0, int count, i64 every,
                                   int k, const SourceRow& source_row) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * count; i += kThreads) {
        const int row = i % kRows, stretch = i / kRows;
        const i64 source = source_row(row), at = k0 + stretch * every;
        const bool exists = source >= 0 && at < k;
        const ptx::SharedAddress place = to + (stretch * pitch + row) * 4;
        const i64 from = exists ? scales.place_of(static_cast<u32>(source), static_cast<u32>(at)) : 0;
        if (scales.token == kScaleFp32) {
            ptx::cp_async_4_partial(place, scales.data + 4 * from, exists ? 4 : 0);
        } else {
            const u32 byte = exists ? ptx::ld_keep<1>(scales.data + from).w[0] : 0u;
            const float value = scales.token == kScaleE8m0 ? e8m0_value(byte) : decode_e4m3(byte & 0x7fu);
            ptx::st_shared_4(place, __float_as_uint(value));
        }
    }
}

// Bytes of scales of one stage in shared memory, kBytes for each row, from a column that is a multiple of four.
template <int kRows, int kBytes, int kThreads, typename SourceRow>
RTK_DEVICE void fetch_scale_bytes(ptx::SharedAddress to, const MmaScales& scales, u32 first_column, u32 columns,
                                  const SourceRow& source_row) {
    constexpr int kWords = kBytes / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kWords; i += kThreads) {
        const int row = i / kWords;
        const u32 column = first_column + static_cast<u32>(i % kWords) * 4u;
        const i64 source = source_row(row);
        const int exist = source < 0 || column >= columns ? 0 : min(static_cast<int>(columns - column), 4);
        const ptx::SharedAddress place = to + i * 4;
        if (scales.in_words) {
            const i64 at = exist == 0 ? 0 : scales.place(static_cast<u32>(source), column);
            ptx::cp_async_4_partial(place, scales.data + at, exist);
        } else {
            u32 word = 0u;
            for (int j = 0; j < exist; ++j)
                word |= ptx::ld_keep<1>(scales.data + scales.place(static_cast<u32>(source), column + j)).w[0] << (8 * j);
            ptx::st_shared_4(place, word);
        }
    }
}

}  // namespace rtk
