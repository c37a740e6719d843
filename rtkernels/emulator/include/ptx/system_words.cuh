// Host version of cuda_src/ptx/system_words.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE void add_word_release_system(u32* p, u32 value) {
    atomicAdd(p, value);
    emu::note();
}

RTK_DEVICE u32 ld_word_acquire_system(const u32* p, RTK_EMU_CALLER) {
    emu::poll(RTK_EMU_SITE("ld_word_acquire_system"));
    return atomicAdd(const_cast<u32*>(p), 0u);
}

}  // namespace rtk::ptx
