// Host version of cuda_src/ptx/prefetch.cuh: a no-op here.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE void prefetch_l2(const void*) {}
RTK_DEVICE void prefetch_l2_bulk(const void*, u32) {}
RTK_DEVICE void prefetch_l2_stream(const void*, u32) {}

}  // namespace rtk::ptx
