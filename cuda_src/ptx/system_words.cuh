// Words of 4 bytes that other GPUs read or write concurrently.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// Adds to a word (release): who sees the sum also sees this thread's earlier writes, and what it has seen.
RTK_DEVICE void add_word_release_system(u32* p, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// A word to be polled (acquire): once it has the expected value, its writers' earlier writes are visible.
RTK_DEVICE u32 ld_word_acquire_system(const u32* p) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}

}  // namespace rtk::ptx
