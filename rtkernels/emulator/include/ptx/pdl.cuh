// Host version of cuda_src/ptx/pdl.cuh: kernels run one after the other, but a thread that has not waited must not
// touch anything that the previous kernel used.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE void launch_dependents() { emu::launch_dependents(); }
RTK_DEVICE void wait_for_previous() { emu::wait_for_previous(); }

}  // namespace rtk::ptx
