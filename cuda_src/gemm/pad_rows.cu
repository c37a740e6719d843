// Copies the rows of one or two operands to memory in which every row begins at a multiple of 16 bytes or more, as TMA and
// vector loads need it. Bytes between rows become 0.
//
// Layout: an operand is [groups, rows, row_bytes], its rows `pitch` and its groups `group_pitch` bytes apart, at any
// address; the copy is [groups, rows, 16 * vectors], dense.
// Grid: blocks for the vectors of the first operand, `first_blocks` of them, then those of the second. A thread owns one
// vector of the copy. A source that is not aligned to 4 bytes is read in aligned words and shifted; words that are not
// entirely inside of a row are read by the byte, so nothing outside of the operand is touched.
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

struct PaddedOperand {
    const u8* from;
    u8* to;
    i64 rows, row_bytes, pitch, group_pitch, vectors, all_rows;  // all_rows: of all groups, fewer than 2^31
};

RTK_DEVICE void pad_vector(const PaddedOperand& operand, i64 block) {
    // One 64-bit division for the block, 32-bit divisions per thread.
    const u32 vectors = static_cast<u32>(operand.vectors);
    const i64 first = block * blockDim.x, first_row = first / vectors;
    const u32 inside = static_cast<u32>(first - first_row * vectors) + threadIdx.x;
    const i64 row = first_row + inside / vectors;
    if (row >= operand.all_rows) return;
    const u32 group = static_cast<u32>(row) / static_cast<u32>(operand.rows);
    const i64 row_of_group = row - static_cast<i64>(group) * operand.rows, at = static_cast<i64>(inside % vectors) * 16;
    const u8* source = operand.from + group * operand.group_pitch + row_of_group * operand.pitch + at;
    const u32 shift = static_cast<u32>(reinterpret_cast<u64>(source) & 3u);
    Raw<16> raw;
    if (reinterpret_cast<u64>(source) % 16 == 0 && at + 16 <= operand.row_bytes) {
        raw = ptx::ld_keep<16>(source);
    } else if (reinterpret_cast<u64>(source) % 8 == 0 && at + 16 <= operand.row_bytes) {
        const Raw<8> low = ptx::ld_keep<8>(source), high = ptx::ld_keep<8>(source + 8);
        raw = {{low.w[0], low.w[1], high.w[0], high.w[1]}};
    } else if ((shift == 0 || at >= 16) && at + (shift == 0 ? 16 : 20) <= operand.row_bytes) {
        const u8* const words = source - shift;
        u32 word[5];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = ptx::ld_keep<4>(words + 4 * i).w[0];
        word[4] = shift == 0 ? 0u : ptx::ld_keep<4>(words + 16).w[0];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            raw.w[i] = static_cast<u32>((static_cast<u64>(word[i + 1]) << 32 | word[i]) >> (8 * shift));
    } else {
        const int exist = static_cast<int>(min(operand.row_bytes - at, static_cast<i64>(16)));  // none behind its vector
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            raw.w[i] = 0u;
#pragma unroll
            for (int b = 0; b < 4; ++b)
                if (4 * i + b < exist) raw.w[i] |= ptx::ld_keep<1>(source + 4 * i + b).w[0] << (8 * b);
        }
    }
    ptx::st<16>(operand.to + (row * operand.vectors * 16 + at), raw);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    pad_rows(const u8* a, u8* a_to, const u8* b, u8* b_to, i64 a_rows, i64 a_row_bytes, i64 a_pitch, i64 a_group_pitch,
             i64 a_vectors, i64 a_all_rows, i64 b_rows, i64 b_row_bytes, i64 b_pitch, i64 b_group_pitch, i64 b_vectors,
             i64 b_all_rows, i64 first_blocks) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    if (blockIdx.x < first_blocks) {
        pad_vector({a, a_to, a_rows, a_row_bytes, a_pitch, a_group_pitch, a_vectors, a_all_rows}, blockIdx.x);
    } else {
        pad_vector({b, b_to, b_rows, b_row_bytes, b_pitch, b_group_pitch, b_vectors, b_all_rows}, blockIdx.x - first_blocks);
    }
}

}  // namespace rtk
