// Host version of cuda_src/ptx/registers.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

template <int>
RTK_DEVICE void registers_give() {}
template <int>
RTK_DEVICE void registers_take() {}

}  // namespace rtk::ptx
