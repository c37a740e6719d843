// Host version of cuda_src/ptx/words.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

struct Words {
    u64 first, second;
};

RTK_DEVICE Words ld_words(const u64* p, RTK_EMU_CALLER) {
    emu::poll(RTK_EMU_SITE("ld_words"));
    return {p[0], p[1]};
}
RTK_DEVICE void st_words(u64* p, const Words& w) {
    p[0] = w.first, p[1] = w.second;
    emu::note();
}

}  // namespace rtk::ptx
