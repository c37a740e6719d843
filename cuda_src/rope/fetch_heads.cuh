// Copies a thread's vectors of several heads to shared memory.
#pragma once
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kFetchedHeads = 8;  // of a thread, at most

// Copies 16 bytes of every `step`-th of `left` heads (kFetchedHeads at most), `to_next` elements apart in memory from x
// on and `pitch` bytes apart in shared memory from `to` on, as one group of copies. Without branches.
template <typename T>
RTK_DEVICE void fetch_heads(const T* x, i64 to_next, int left, int step, ptx::SharedAddress to, int pitch) {
#pragma unroll
    for (int i = 0; i < kFetchedHeads; ++i)
        if (i * step < left) ptx::cp_async_16(to + i * pitch, x + i * to_next);
    ptx::cp_async_commit();
}

}  // namespace rtk
