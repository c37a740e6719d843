// Barriers in shared memory that count arrivals and bytes (sm_90 and up). Each is 8 bytes, 8-byte aligned.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// A phase ends when `arrivals` threads have arrived and all announced bytes have been copied.
RTK_DEVICE void mbarrier_init(SharedAddress barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes new barriers visible to TMA; other threads need __syncthreads after it.
RTK_DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

RTK_DEVICE void mbarrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of copies.
RTK_DEVICE void mbarrier_arrive_expect(SharedAddress barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity has ended. The phase before the first one counts as ended, with parity 1.
RTK_DEVICE void mbarrier_wait(SharedAddress barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Returns whether it has ended, without waiting.
RTK_DEVICE bool mbarrier_test(SharedAddress barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

}  // namespace rtk::ptx
