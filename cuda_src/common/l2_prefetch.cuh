// Prefetches rows into L2 long before they are read. It pays off in kernels that read one large tensor and write about
// as much or more; those that read two are slower with it (docs/decisions/common.md).
#pragma once
#include "ptx/math.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

// Distance between the prefetch and the read of a row: about what all resident blocks read together.
inline constexpr int kPrefetchBytes = 4 << 20;

// Smaller tensors are not prefetched: the resident blocks read most of them at once anyway.
inline constexpr int kBytesEnough = 3 * kPrefetchBytes;

// Prefetches the row that is about kPrefetchBytes bytes of rows after `row`; `x` is the start of `row`. Rows are
// multiples of 16 bytes at such addresses. Called by one thread per row.
template <typename T>
RTK_DEVICE void prefetch_later_row(const T* x, i64 row, i64 rows, i64 cols, i64 stride) {
    const u32 bytes = static_cast<u32>(cols) * sizeof(T);
    const int distance = static_cast<int>(kPrefetchBytes * ptx::rcp(static_cast<float>(bytes)));
    if (row + distance < rows && rows * bytes > kBytesEnough) ptx::prefetch_l2_bulk(x + distance * stride, bytes);
}

}  // namespace rtk
