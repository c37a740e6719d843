// Host version of cuda_src/ptx/pdl.cuh: kernels run one after the other, so there is nothing to wait for.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE void launch_dependents() {}
RTK_DEVICE void wait_for_previous() {}

}  // namespace rtk::ptx
