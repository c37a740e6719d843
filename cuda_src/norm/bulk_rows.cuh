// The rows that a block of a backward norm works on, brought by the copy engine (sm_90 and up).
#pragma once
#include "common/bulk_ring.cuh"

namespace rtk {

// dy, h and, if DSUM, dsum: rows first, first + step, ... below `count` are those of a group. The constructor asks for the
// first ones; fewer than 2^30 rows.
template <typename T, int CHUNKS, bool DSUM>
struct BulkRows {
    const T *dy, *h, *dsum;
    i64 dy_stride, h_stride, dsum_stride;
    int step, first, count;
    BulkRing<DSUM ? 3 : 2, CHUNKS> ring;

    RTK_DEVICE BulkRows(u8* memory, const RowGroup& group, const T* dy_, const T* h_, const T* dsum_, i64 rows, i64 cols,
                        i64 dy_stride_, i64 h_stride_, i64 dsum_stride_, i64 stages)
        : dy(dy_),
          h(h_),
          dsum(dsum_),
          dy_stride(dy_stride_),
          h_stride(h_stride_),
          dsum_stride(dsum_stride_),
          step(static_cast<int>(gridDim.x) * group.count),
          first(static_cast<int>(blockIdx.x) * group.count + group.index),
          count(static_cast<int>(rows)),
          ring(memory, group, static_cast<int>(cols) * sizeof(T), stages) {
#pragma unroll 1
        for (int s = 0; s < ring.stages; ++s, ring.next_row()) fetch(first + s * step);
    }

    // What comes `stages` rows after `row`, into the place of it, of which all of the group have read.
    RTK_DEVICE void next(int row) {
        fetch(row + ring.stages * step);
        ring.next_row();
    }

  private:
    RTK_DEVICE void fetch(int row) {
        const void* const dy_row = dy + row * dy_stride;
        const void* const h_row = h + row * h_stride;
        if constexpr (DSUM) {
            ring.fetch(row < count, {dy_row, h_row, dsum + row * dsum_stride});
        } else {
            ring.fetch(row < count, {dy_row, h_row});
        }
    }
};

}  // namespace rtk
