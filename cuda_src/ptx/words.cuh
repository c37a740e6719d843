// Words of 8 bytes in global memory that other blocks read or write concurrently: each is read and written as a whole,
// and comes from L2. Two at a time, 16-byte aligned; the order in which the two are written is unspecified.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

struct Words {
    u64 first, second;
};

RTK_DEVICE Words ld_words(const u64* p) {
    Words r;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(r.first), "=l"(r.second) : "l"(p) : "memory");
    return r;
}

RTK_DEVICE void st_words(u64* p, const Words& w) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(w.first), "l"(w.second) : "memory");
}

// Words of 4 bytes without ordering: nothing else becomes visible with them.
RTK_DEVICE u32 ld_word(const u32* p) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}

RTK_DEVICE void st_word(u32* p, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}

// A word of 4 bytes to be polled (acquire): once it has the expected value, its writer's earlier writes are visible.
RTK_DEVICE u32 ld_word_acquire(const u32* p) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}

}  // namespace rtk::ptx
