// Host version of cuda_src/ptx/mbarrier.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void mbarrier_init(SharedAddress barrier, u32 arrivals) { emu::mbarrier_init(barrier, arrivals); }
RTK_DEVICE void mbarrier_fence_init() { emu::mbarrier_fence_init(); }
RTK_DEVICE void mbarrier_arrive(SharedAddress barrier) { emu::mbarrier_arrive(barrier, 0); }
RTK_DEVICE void mbarrier_arrive_expect(SharedAddress barrier, u32 bytes) { emu::mbarrier_arrive(barrier, bytes); }
RTK_DEVICE void mbarrier_wait(SharedAddress barrier, u32 parity, RTK_EMU_CALLER) {
    emu::mbarrier_wait(barrier, parity, RTK_EMU_SITE("mbarrier_wait"));
}
RTK_DEVICE bool mbarrier_test(SharedAddress barrier, u32 parity, RTK_EMU_CALLER) {
    return emu::mbarrier_test(barrier, parity, RTK_EMU_SITE("mbarrier_test"));
}

}  // namespace rtk::ptx
