// y[i] = x[indices[i]], and the same for a scale of each row; 0 for indices that are no row of x. Moves bytes: one kernel
// for all types.
//
// A RowGroup owns one row of y and copies it in units of BYTES, four in flight in a thread. Grid: rows of y / groups per
// block.
#include "common/reduce.cuh"
#include "embedding/tokens.cuh"

namespace rtk {

template <int BYTES>
__global__ void __launch_bounds__(256)
    row_select(const void* indices, const u8* x, u8* y, const u8* scale, u8* scale_y, i64 count, i64 units,
               i64 x_stride, i64 y_stride, i64 rows, i64 wide, i64 threads_per_row, i64 scale_words,
               i64 scale_stride) {
    constexpr int kAhead = 4;
    const RowGroup group(threads_per_row);
    const i64 target = static_cast<i64>(blockIdx.x) * group.count + group.index;
    ptx::wait_for_previous();
    if (target >= count || group.index >= group.count) return;
    const Tokens table{indices, wide != 0, 0, rows, -1};
    const i64 row = table.row_of(table.id(target));
    // The first word of the scale is requested with the row, and stored when that is done.
    const u8* scale_from = scale + row * scale_stride;
    u8* scale_to = scale_y + target * scale_words * 4;
    Raw<4> word;
    clear(word);
    if (group.thread < scale_words && row >= 0) word = ptx::ld_stream<4>(scale_from + group.thread * 4);
    x += row * x_stride;
    y += target * y_stride;
    for (i64 unit = group.thread; unit < units; unit += kAhead * group.threads) {
        Raw<BYTES> raw[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const i64 at = unit + k * group.threads;
            clear(raw[k]);
            if (at < units && row >= 0) raw[k] = ptx::ld_stream<BYTES>(x + at * BYTES);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const i64 at = unit + k * group.threads;
            if (at < units) ptx::st<BYTES>(y + at * BYTES, raw[k]);
        }
    }
    if (group.thread < scale_words) ptx::st<4>(scale_to + group.thread * 4, word);
    for (i64 at = group.thread + group.threads; at < scale_words; at += group.threads) {
        clear(word);
        if (row >= 0) word = ptx::ld_stream<4>(scale_from + at * 4);
        ptx::st<4>(scale_to + at * 4, word);
    }
}

}  // namespace rtk
