// Registers that pass between warpgroups of a block (sm_90a and newer).
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// The threads of this warpgroup keep kCount registers each, and give the others back; a multiple of 8.
template <int kCount>
RTK_DEVICE void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The threads of this warpgroup wait until they have kCount registers each.
template <int kCount>
RTK_DEVICE void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace rtk::ptx
