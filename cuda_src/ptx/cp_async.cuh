// Asynchronous copies from global to shared memory (sm_80 and up), grouped per thread.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Starts copying 16 bytes past L1; both addresses 16-byte aligned.
RTK_DEVICE void cp_async_16(SharedAddress shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, or 16 zero bytes; nothing is read then.
RTK_DEVICE void cp_async_16_or_zero(SharedAddress shared, const void* global, bool read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read ? 16 : 0)
                 : "memory");
}

// The same with the first `bytes` (0 to 16) read and zeros after them.
RTK_DEVICE void cp_async_16_partial(SharedAddress shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same, for streaming: L2 prefetches all 128 bytes around them.
RTK_DEVICE void cp_async_16_stream(SharedAddress shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// 8 bytes through L1, both addresses 8-byte aligned; only the first `bytes` (0 to 8) are read.
RTK_DEVICE void cp_async_8_partial(SharedAddress shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// 4 bytes, both addresses 4-byte aligned; only the first `bytes` (0 to 4) are read.
RTK_DEVICE void cp_async_4_partial(SharedAddress shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// 4 bytes through L1, or 4 zero bytes; 4-byte aligned.
RTK_DEVICE void cp_async_4_or_zero(SharedAddress shared, const void* global, bool read) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(read ? 4 : 0) : "memory");
}

// cp_async_16 if `wanted`: no branch.
RTK_DEVICE void cp_async_16_if(bool wanted, SharedAddress shared, const void* global) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
        "}\n" ::"r"(shared),
        "l"(global), "r"(static_cast<u32>(wanted))
        : "memory");
}

// Closes this thread's current group of copies (possibly empty).
RTK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are unfinished. The thread then sees its own copies;
// other threads need a barrier after it.
template <int kPending>
RTK_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at an mbarrier (sm_90 and up: ptx/mbarrier.cuh) when all copies of this thread so far have completed; the
// barrier counts it as one of its arrivals.
RTK_DEVICE void cp_async_arrive(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace rtk::ptx
