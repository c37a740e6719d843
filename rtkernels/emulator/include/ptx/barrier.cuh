// Host version of cuda_src/ptx/barrier.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE void named_barrier_sync(int id, int threads, RTK_EMU_CALLER) {
    emu::barrier(id, threads, false, RTK_EMU_SITE("named_barrier_sync"));
}

RTK_DEVICE void named_barrier_arrive(int id, int threads, RTK_EMU_CALLER) {
    emu::barrier(id, threads, false, RTK_EMU_SITE("named_barrier_arrive"), false);
}

}  // namespace rtk::ptx
