// A thread's piece of several heads on its way to shared memory.
#pragma once
#include "ptx/cp_async.cuh"

namespace rtk {

// Requests 16 bytes of every `step`-th of `left` heads, `to_next` elements apart in memory from x on and `pitch` bytes
// apart in shared memory from `to` on, as one group of copies.
template <typename T>
RTK_DEVICE void fetch_heads(const T* x, i64 to_next, int left, int step, ptx::SharedAddress to, int pitch) {
#pragma unroll 4
    for (int rest = left; rest > 0; rest -= step) {
        ptx::cp_async_16(to, x);
        x += to_next;
        to = to + pitch;
    }
    ptx::cp_async_commit();
}

}  // namespace rtk
