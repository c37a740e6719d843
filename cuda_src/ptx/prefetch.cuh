// Prefetch instructions.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk::ptx {

// Prefetches the line at this address of global memory into L2.
RTK_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Prefetches many bytes into L2, which evicts them last (sm_90 and up; a no-op elsewhere). Address and size are
// multiples of 16.
RTK_DEVICE void prefetch_l2_bulk(const void* p, u32 bytes) {
#if RTK_HAS_TMA
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(p), "r"(bytes), "l"(l2_last()));
#endif
}

// The same for bytes that are read once: L2 evicts them as any others.
RTK_DEVICE void prefetch_l2_stream(const void* p, u32 bytes) {
#if RTK_HAS_TMA
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#endif
}

}  // namespace rtk::ptx
