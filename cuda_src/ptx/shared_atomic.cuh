// Atomic operations on 32-bit words of shared memory.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Raises the word to v if v is larger.
RTK_DEVICE void shared_max(SharedAddress word, u32 v) {
    asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(word), "r"(v) : "memory");
}

}  // namespace rtk::ptx
