// Requests that bring data nearer.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk::ptx {

// Asks L2 for the line at this address of global memory.
RTK_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Asks L2 for many bytes, which it gives up last (sm_90 and up; nothing happens elsewhere). Address and size are multiples
// of 16.
RTK_DEVICE void prefetch_l2_bulk(const void* p, u32 bytes) {
#if RTK_HAS_TMA
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(p), "r"(bytes), "l"(l2_last()));
#endif
}

}  // namespace rtk::ptx
