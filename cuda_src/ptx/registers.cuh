// Moves registers between warpgroups of a block (sm_90a; elsewhere a no-op).
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// The threads of this warpgroup keep kCount registers each, a multiple of 8, and release the others.
template <int kCount>
RTK_DEVICE void registers_give() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// The threads of this warpgroup wait until they have kCount registers each.
template <int kCount>
RTK_DEVICE void registers_take() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace rtk::ptx
