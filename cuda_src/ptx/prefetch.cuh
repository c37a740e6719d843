// Requests that bring data nearer.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// Asks L2 for the line at this address of global memory.
RTK_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace rtk::ptx
