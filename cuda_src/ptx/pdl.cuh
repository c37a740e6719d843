// Overlap of dependent kernels in one stream (sm_90 and up; a no-op elsewhere or without the launch attribute).
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// Lets the next kernel of the stream start as soon as all blocks of this one have called it or ended.
RTK_DEVICE void launch_dependents() {
#if RTK_HAS_TMA
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel of the stream has ended and its writes are visible.
RTK_DEVICE void wait_for_previous() {
#if RTK_HAS_TMA
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace rtk::ptx
