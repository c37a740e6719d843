// y[i] = x[indices[i]], and the same for a scale of each row; 0 for indices outside of x. Moves bytes: one kernel for
// all types.
//
// A RowGroup owns one row of y and copies it in units of BYTES, with four in flight per thread. Stores are evicted
// first, because rows of x may be read again. Grid: rows of y / groups per block.
#include "common/reduce.cuh"
#include "index/embedding_tokens.cuh"

namespace rtk {

template <int BYTES>
__global__ void __launch_bounds__(256, 4)
    row_select(const void* indices, const u8* x, u8* y, const u8* scale, u8* scale_y, i64 count, i64 units,
               i64 x_stride, i64 y_stride, i64 rows, i64 ids_int64, i64 threads_per_row, i64 scale_words,
               i64 scale_stride) {
    constexpr int kInFlight = 4;
    const RowGroup group(threads_per_row);
    const i64 target = static_cast<i64>(blockIdx.x) * group.count + group.index;
    ptx::wait_for_previous();
    if (target >= count || group.index >= group.count) return;
    const Tokens table{indices, ids_int64 != 0, 0, rows, -1};
    const i64 row = table.row_of(table.id(target));
    const int step = group.threads * BYTES;
    x += row * x_stride + group.thread * BYTES;
    y += target * y_stride + group.thread * BYTES;
    for (i64 left = units - group.thread; left > 0; left -= kInFlight * group.threads) {
        Raw<BYTES> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            clear(raw[k]);
            if (k * group.threads < left && row >= 0) raw[k] = ptx::ld_stream<BYTES>(x + k * step);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k)
            if (k * group.threads < left) ptx::st_stream<BYTES>(y + k * step, raw[k]);
        x += kInFlight * step;
        y += kInFlight * step;
    }
    for (i64 at = group.thread; at < scale_words; at += group.threads) {
        Raw<4> word;
        clear(word);
        if (row >= 0) word = ptx::ld_stream<4>(scale + row * scale_stride + at * 4);
        ptx::st<4>(scale_y + (target * scale_words + at) * 4, word);
    }
}

}  // namespace rtk
