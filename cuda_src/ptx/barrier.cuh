// Barriers of fewer threads than the block.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// Waits until `threads` threads (a multiple of 32) of the block have arrived at barrier `id` (1..15; 0 is
// __syncthreads). Orders their shared and global memory accesses like __syncthreads does.
RTK_DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at such a barrier without waiting; counts among its `threads`.
RTK_DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace rtk::ptx
