// One planted bug per kernel; test_emulator.py shows that each is caught. `n` threads per block unless noted.
#include "common/abi.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

// Reverses 64 numbers through shared memory without the barrier between writing and reading.
__global__ void missing_syncthreads(const float* x, float* y) {
    __shared__ float buffer[64];
    buffer[threadIdx.x] = 0.0f;
    __syncthreads();
    buffer[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = buffer[63 - threadIdx.x];
}

// Lanes exchange through shared memory without __syncwarp.
__global__ void missing_syncwarp(const float* x, float* y) {
    __shared__ float buffer[32];
    buffer[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

__global__ void uninitialised_shared(const float* x, float* y) {
    __shared__ float buffer[64];
    if (threadIdx.x < 63) buffer[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = buffer[63 - threadIdx.x];
}

__global__ void read_past_end(const float* x, float* y, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i <= n) y[i < n ? i : 0] = x[i];
}

__global__ void write_past_end(const float* x, float* y, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = x[i < n ? i : 0];
}

__global__ void wrapper_read_past_end(const float* x, float* y, i64 n) {
    const i64 i = threadIdx.x;
    if (4 * i < n) ptx::st<4>(y + i, Raw<4>{ptx::ld_stream<16>(x + 4 * i).w[0]});
}

__global__ void wrapper_write_past_end(const float* x, float* y, i64 n) {
    const i64 i = threadIdx.x;
    if (4 * i < n) ptx::st<16>(y + 4 * i, ptx::ld_keep<16>(x));
}

// Writes a whole row of `stride` where the tensor has only `cols` columns.
__global__ void write_between_rows(float* y, i64 cols, i64 stride) {
    y[blockIdx.x * stride + threadIdx.x] = 1.0f;
}

__global__ void null_pointer(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }

struct alignas(16) Four {
    float v[4];
};
__global__ void misaligned_vector(const float* x, float* y, i64 offset) {
    *reinterpret_cast<Four*>(y) = *reinterpret_cast<const Four*>(x + offset);
}

__global__ void misaligned_wrapper(const float* x, float* y, i64 offset) {
    ptx::st<16>(y, ptx::ld_stream<16>(x + offset));
}

// Half of the block skips the barrier.
__global__ void barrier_after_return(float* y) {
    if (threadIdx.x >= 32) return;
    __syncthreads();
    y[threadIdx.x] = 1.0f;
}

__global__ void two_barriers(float* y) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        y[threadIdx.x] = 1.0f;
        __syncthreads();
    }
}

__global__ void shuffle_after_return(float* y) {
    if (threadIdx.x >= 16) return;
    y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

// Lanes wait for each other at two different shuffles.
__global__ void shuffle_in_branches(float* y) {
    if (threadIdx.x < 16) {
        y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    } else {
        y[threadIdx.x] = __shfl_sync(0xffffffffu, 2.0f, 0);
    }
}

__global__ void shuffle_outside_mask(float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 16);
}

// Half of the warp is at a barrier while the other half shuffles with it.
__global__ void shuffle_against_barrier(float* y) {
    if (threadIdx.x < 16) {
        y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    }
    __syncthreads();
}

// Reads the copied bytes before waiting for them.
__global__ void missing_cp_async_wait(const float* x, float* y) {
    __shared__ alignas(16) float buffer[128];
    ptx::cp_async_16(ptx::shared_address(buffer + 4 * threadIdx.x), x + 4 * threadIdx.x);
    ptx::cp_async_commit();
    y[threadIdx.x] = buffer[4 * threadIdx.x];
}

__global__ void dynamic_shared_too_small(float* y) {
    extern __shared__ float values[];
    values[threadIdx.x] = 1.0f;
    y[threadIdx.x] = values[threadIdx.x];
}

}  // namespace rtk
