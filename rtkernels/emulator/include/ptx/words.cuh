// Host version of cuda_src/ptx/words.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

struct Words {
    u64 first, second;
};

RTK_DEVICE Words ld_words(const u64* p, RTK_EMU_CALLER) {
    emu::poll(RTK_EMU_SITE("ld_words"));
    const emu::Word16 value = emu::load_strong(p);
    return {value.lo, value.hi};
}
RTK_DEVICE void st_words(u64* p, const Words& w) {
    emu::store_strong(p, {w.first, w.second});
    emu::note();
}

RTK_DEVICE u32 ld_word(const u32* p, RTK_EMU_CALLER) {
    emu::poll(RTK_EMU_SITE("ld_word"));
    return atomicAdd(const_cast<u32*>(p), 0u);
}
RTK_DEVICE void st_word(u32* p, u32 word) {
    atomicExch(p, word);
    emu::note();
}

RTK_DEVICE u32 ld_word_acquire(const u32* p, RTK_EMU_CALLER) {
    emu::poll(RTK_EMU_SITE("ld_word_acquire"));
    return atomicAdd(const_cast<u32*>(p), 0u);
}

}  // namespace rtk::ptx
