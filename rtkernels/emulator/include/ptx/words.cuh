// Host version of cuda_src/ptx/words.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

struct Words {
    u64 first, second;
};

RTK_DEVICE Words ld_words(const u64* p) { return {p[0], p[1]}; }
RTK_DEVICE void st_words(u64* p, const Words& w) { p[0] = w.first, p[1] = w.second; }

}  // namespace rtk::ptx
