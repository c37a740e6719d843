// Converts 8- and 4-bit codes to numbers that wgmma multiplies, for operands that it cannot read as they are: bf16 or
// fp16, times the byte scale of their 16 or 32 elements if kBlockScales; 4-bit integers as bytes. Every conversion is
// exact.
//
// Layout: codes [groups, rows, k] with `pitch` elements from row to row and `group_pitch` from group to group, rows at multiples of
// 16 bytes; out [groups, rows, out_pitch], dense, out_pitch a multiple of 16. Elements from k on become 0.
// Grid: (threads for all vectors of 16 elements of a group, groups). A thread owns one vector.
#include "gemm/gemm_mma_codes.cuh"
#include "gemm/gemm_mma_scales.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Target types of codes: those that gemm/gemm_mma_codes.cuh converts for.
template <typename T>
struct UnpackMath;
template <> struct UnpackMath<bf16> { using Type = MathBf16; };
template <> struct UnpackMath<fp16> { using Type = MathF16; };
template <> struct UnpackMath<u8> { using Type = MathInt8; };

// Nibbles 0 ... 15 in four bytes as -8 ... 7; no borrow crosses bytes because the highest bit of each is set.
RTK_DEVICE u32 signed_nibbles(u32 bytes) {
    return (((bytes ^ 0x08080808u) | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

template <typename Code, typename Out, bool kBlockScales>
__global__ void __launch_bounds__(256)
    unpack_codes(const u8* codes, const u8* scale, void* out, i64 rows, i64 k, i64 pitch, i64 group_pitch, i64 out_pitch,
                 i64 scale_row_pitch, i64 scale_depth_pitch, i64 scale_group_pitch, i64 scale_depth, i64 scale_option,
                 i64 kind) {
    using Math = typename UnpackMath<Out>::Type;
    constexpr int kEach = 16, kBits = CodeTraits<Code>::kBits, kWords = kEach * kBits / 32, kGrowth = Math::kBits / kBits;
    constexpr bool kBf16 = is_same<Out, bf16>::value;
    ptx::launch_dependents();
    ptx::wait_for_previous();
    // One 64-bit division for the block, one 32-bit division per thread.
    const u32 vectors = static_cast<u32>(out_pitch / kEach);
    const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x, group = blockIdx.y;
    const i64 first_row = first / vectors;
    const u32 from = static_cast<u32>(first - first_row * vectors) + threadIdx.x;
    const i64 row = first_row + from / vectors;
    const u32 vector = from % vectors;
    if (row >= rows) return;
    const i64 at = static_cast<i64>(vector) * kEach;
    const u8* source = codes + (group * group_pitch + row * pitch + at) * kBits / 8;
    u32 word[kWords];
    if (at + kEach <= k) {
        const Raw<kWords * 4> raw = ptx::ld_keep<kWords * 4>(source);
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = raw.w[i];
    } else {
        const int bytes = static_cast<int>(max((k - at) * kBits / 8, static_cast<i64>(0)));
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            word[i] = 0u;
            for (int b = 0; b < 4; ++b)
                if (4 * i + b < bytes) word[i] |= ptx::ld_keep<1>(source + 4 * i + b).w[0] << (8 * b);
        }
    }
    u32 numbers[kWords][kGrowth];
    if constexpr (Math::kBits == 8) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            bytes_of_nibbles<false, true>(word[i], numbers[i]);
            if constexpr (CodeTraits<Code>::kSigned) {
#pragma unroll
                for (u32& four : numbers[i]) four = signed_nibbles(four);
            }
        }
    } else {
        expand_words<Code, Math, true, false>(word, static_cast<int>(kind), numbers);
    }
    if constexpr (kBlockScales) {
        const int token = static_cast<int>(scale_option & 3);
        const bool swizzled = (scale_option & 4) != 0;
        const i64 blocks = (ceil_div(k, scale_depth) + 3) / 4;
        const MmaScales scales{scale + group * scale_group_pitch, scale_row_pitch, scale_depth_pitch, i64{0x80000000},
                               0, blocks, token, swizzled, false};
        const u32 column = static_cast<u32>(at) >> (scale_depth == 16 ? 4 : 5);
        const bool exists = at < k;
        const u32 byte = exists ? ptx::ld_keep<1>(scales.of_row(row) + scales.at_column(column)).w[0] : 0u;
        const u32 times = scale_pair<kBf16>(byte, token);
#pragma unroll
        for (int i = 0; i < kWords; ++i)
#pragma unroll
            for (u32& two : numbers[i]) two = exists ? fma_pair<kBf16>(two, times, kMinusZeros) : 0u;
    }
    u8* to = static_cast<u8*>(out) + ((group * rows + row) * out_pitch + at) * Math::kBits / 8;
#pragma unroll
    for (int v = 0; v < kWords * kGrowth / 4; ++v) {
        Raw<16> raw;
#pragma unroll
        for (int w = 0; w < 4; ++w) raw.w[w] = numbers[(4 * v + w) / kGrowth][(4 * v + w) % kGrowth];
        ptx::st<16>(to + 16 * v, raw);
    }
}

}  // namespace rtk
