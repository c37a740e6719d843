// Copies the rows of one or two operands to memory in which every row begins at a multiple of 16 bytes or more, as TMA and
// vector loads need it. Bytes between rows become 0.
//
// Layout: an operand is [groups, rows, row_bytes], its rows `pitch` and its groups `group_pitch` bytes apart, at any
// address; the copy is [groups, rows, 16 * vectors], dense.
// Grid: blocks for the vectors of the first operand, `first_blocks` of them, then those of the second. A thread owns four
// vectors of the copy, a block's width apart, and loads those that it can load in one or two parts at the same time. A source that is not aligned to 4 bytes is read in aligned words and shifted; words that are not
// entirely inside of a row are read by the byte, so nothing outside of the operand is touched.
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

struct PaddedOperand {
    const u8* from;
    u8* to;
    i64 rows, row_bytes, pitch, group_pitch, vectors, all_rows;  // all_rows: of all groups, fewer than 2^31
};

inline constexpr int kPadEach = 4;

// A vector whose `exist` bytes (16 or fewer, perhaps none) are read in words or bytes. Not inlined: few threads need it.
__device__ __noinline__ Raw<16> pad_slowly(const u8* source, int exist, bool begins, bool ends) {
    const u32 shift = static_cast<u32>(reinterpret_cast<u64>(source) & 3u);
    Raw<16> raw;
    if ((shift == 0 || !begins) && exist == 16 && (shift == 0 || !ends)) {
        const u8* const words = source - shift;
        u32 word[5];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = ptx::ld_keep<4>(words + 4 * i).w[0];
        word[4] = shift == 0 ? 0u : ptx::ld_keep<4>(words + 16).w[0];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            raw.w[i] = static_cast<u32>((static_cast<u64>(word[i + 1]) << 32 | word[i]) >> (8 * shift));
        return raw;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        raw.w[i] = 0u;
#pragma unroll
        for (int b = 0; b < 4; ++b)
            if (4 * i + b < exist) raw.w[i] |= ptx::ld_keep<1>(source + 4 * i + b).w[0] << (8 * b);
    }
    return raw;
}

RTK_DEVICE void pad_vectors(const PaddedOperand& operand, i64 block) {
    // One 64-bit division for the block, 32-bit divisions per vector.
    const u32 vectors = static_cast<u32>(operand.vectors);
    const i64 first = block * (kPadEach * blockDim.x), first_row = first / vectors;
    const u32 inside = static_cast<u32>(first - first_row * vectors) + threadIdx.x;
    const u8* source[kPadEach];
    i64 at[kPadEach], row[kPadEach];
    Raw<16> raw[kPadEach];
    bool slowly[kPadEach];
#pragma unroll
    for (int i = 0; i < kPadEach; ++i) {
        const u32 own = inside + i * blockDim.x, down = own / vectors;
        row[i] = first_row + down, at[i] = static_cast<i64>(own - down * vectors) * 16;
        const u32 group = static_cast<u32>(row[i]) / static_cast<u32>(operand.rows);
        const i64 row_of_group = row[i] - static_cast<i64>(group) * operand.rows;
        source[i] = operand.from + group * operand.group_pitch + row_of_group * operand.pitch + at[i];
        const u32 misaligned = static_cast<u32>(reinterpret_cast<u64>(source[i]) & 15u);
        const bool whole = row[i] < operand.all_rows && at[i] + 16 <= operand.row_bytes;
        slowly[i] = !(whole && (misaligned & 7u) == 0u);
        if (whole && misaligned == 0u) {
            raw[i] = ptx::ld_keep<16>(source[i]);
        } else if (whole && misaligned == 8u) {
            const Raw<8> low = ptx::ld_keep<8>(source[i]), high = ptx::ld_keep<8>(source[i] + 8);
            raw[i] = {{low.w[0], low.w[1], high.w[0], high.w[1]}};
        }
    }
#pragma unroll
    for (int i = 0; i < kPadEach; ++i) {
        if (row[i] >= operand.all_rows) break;
        const i64 remaining = operand.row_bytes - at[i];
        if (slowly[i])
            raw[i] = pad_slowly(source[i], static_cast<int>(min(max(remaining, i64{0}), i64{16})), at[i] == 0, remaining < 20);
        ptx::st<16>(operand.to + (row[i] * operand.vectors * 16 + at[i]), raw[i]);
    }
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    pad_rows(const u8* a, u8* a_to, const u8* b, u8* b_to, i64 a_rows, i64 a_row_bytes, i64 a_pitch, i64 a_group_pitch,
             i64 a_vectors, i64 a_all_rows, i64 b_rows, i64 b_row_bytes, i64 b_pitch, i64 b_group_pitch, i64 b_vectors,
             i64 b_all_rows, i64 first_blocks) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    if (blockIdx.x < first_blocks) {
        pad_vectors({a, a_to, a_rows, a_row_bytes, a_pitch, a_group_pitch, a_vectors, a_all_rows}, blockIdx.x);
    } else {
        pad_vectors({b, b_to, b_rows, b_row_bytes, b_pitch, b_group_pitch, b_vectors, b_all_rows}, blockIdx.x - first_blocks);
    }
}

}  // namespace rtk
