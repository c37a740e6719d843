// Rows that L2 is asked for long before they are read. It pays in kernels that read one large tensor and write about as
// much or more; those that read two are slower with it (docs/decisions/common.md).
#pragma once
#include "ptx/math.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

// How much later a row is read than it is asked for: about what all resident blocks read together.
inline constexpr int kPrefetchBytes = 4 << 20;

// Tensors of which these bytes are a large part are read by the resident blocks anyway.
inline constexpr int kBytesEnough = 3 * kPrefetchBytes;

// Asks L2 for the row that is about kPrefetchBytes bytes of rows after `row`, of which `x` is the start. Rows are multiples of
// 16 bytes at such addresses. One thread calls it for each row.
template <typename T>
RTK_DEVICE void prefetch_later_row(const T* x, i64 row, i64 rows, i64 cols, i64 stride) {
    const u32 bytes = static_cast<u32>(cols) * sizeof(T);
    const int distance = static_cast<int>(kPrefetchBytes * ptx::rcp(static_cast<float>(bytes)));
    if (row + distance < rows && rows * bytes > kBytesEnough) ptx::prefetch_l2_bulk(x + distance * stride, bytes);
}

}  // namespace rtk
