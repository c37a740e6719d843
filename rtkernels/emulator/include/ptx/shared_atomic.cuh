// Host version of cuda_src/ptx/shared_atomic.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void shared_max(SharedAddress word, u32 v) { atomicMax(reinterpret_cast<u32*>(word), v); }

}  // namespace rtk::ptx
