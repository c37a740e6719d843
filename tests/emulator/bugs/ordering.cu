// What orders memory and what does not. `fault` plants a bug; 0 is a correct kernel.
#include "common/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/ldst.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

// Two warps read a number which the third then writes. With a fault it waits only for the reader whose number is not
// `fault` - 1.
__global__ void write_after_two_readers(const float* x, float* y, i64 fault) {
    __shared__ float value;
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0) value = x[0];
    __syncthreads();
    if (warp < 2) y[threadIdx.x] = value;
    if (fault == 0) {
        __syncthreads();
    } else if (warp != fault - 1) {
        ptx::named_barrier_sync(1, 2 * kWarp);
    }
    if (threadIdx.x == 2 * kWarp) value = 0.0f;
}

// Four warps read single bytes of one word, and each writes a byte that no other one reads: no conflict.
__global__ void bytes_of_one_word(const u8* x, u8* y) {
    __shared__ u8 word[8];
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x < 8) word[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 3; ++i) {
        if (threadIdx.x % kWarp == 0) word[warp] = static_cast<u8>(word[warp] + word[4 + warp]);
        __syncwarp();
    }
    if (threadIdx.x % kWarp == 0) y[warp] = word[warp];
}

// Lanes exchange numbers through shared memory, with something else than __syncwarp between.
__global__ void warp_operation_instead_of_syncwarp(float* y, i64 fault) {
    __shared__ float numbers[kWarp];
    const int lane = threadIdx.x;
    int found = 0;
    numbers[lane] = static_cast<float>(lane);
    if (fault == 0) __syncwarp();
    if (fault == 1) found = __shfl_xor_sync(0xffffffffu, lane, 1);
    if (fault == 2) found = __any_sync(0xffffffffu, lane == 40);
    if (fault == 3) found = static_cast<int>(__ballot_sync(0xffffffffu, lane == 40));
    if (fault == 4) found = static_cast<int>(__match_any_sync(0xffffffffu, lane));
    if (fault == 5) found = __reduce_max_sync(0xffffffffu, lane);
    y[lane] = numbers[lane ^ 1] + (found == -7 ? 1.0f : 0.0f);
}

__global__ void count_before_zero(int* y, i64 fault) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    if (fault == 0) __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) y[0] = count;
}

// One warp doubles rows of 128 numbers, which TMA stores.
__global__ void store_rows(const float* x, float* y, i64 rows, i64 fault) {
    __shared__ __align__(16) float row[128];
    const int lane = threadIdx.x;
    for (i64 r = 0; r < rows; ++r) {
        for (int i = lane; i < 128; i += kWarp) row[i] = 2.0f * x[128 * r + i];
        if (fault != 1 && fault != 5) ptx::fence_async_shared();
        __syncwarp();
        if (lane == 0) {
            if (fault == 5) ptx::fence_async_shared();  // no fault: it lies between the writes and the store, too
            ptx::bulk_store(y + 128 * r, ptx::shared_address(row), 512);
            if (fault != 4) ptx::bulk_store_commit();
            if (fault != 2 && (fault != 3 || r + 1 < rows)) ptx::bulk_store_wait_read();
        }
        __syncwarp();
    }
}

// y [128] = the product of ones [64, 16] and ones [16, 128], whose operands four warps write.
__global__ void product_of_ones(float* y, i64 fault) {
    __shared__ __align__(1024) u16 left[64 * 64];
    __shared__ __align__(1024) u16 right[128 * 64];
    for (int i = threadIdx.x; i < 64 * 64; i += 128) left[i] = 0x3f80;
    for (int i = threadIdx.x; i < 128 * 64; i += 128) right[i] = 0x3f80;
    if (fault == 0) ptx::fence_async_shared();
    __syncthreads();
    float sums[64];
    ptx::wgmma_fence();
    ptx::wgmma_shared<bf16, false>(sums, ptx::matrix_descriptor(ptx::shared_address(left), 0),
                                   ptx::matrix_descriptor(ptx::shared_address(right), 0), 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    y[threadIdx.x] = sums[threadIdx.x % 64];
}

// The last block to arrive adds what all left in `parts`, 32 numbers each. Faults: 1 no fence before the atomic, 2 none after
// it; 3 is none: one thread's fences cover what the barriers tell it.
__global__ void sum_by_the_last(const float* x, float* parts, u32* counter, float* y, i64 fault) {
    __shared__ u32 arrived;
    const int lane = threadIdx.x;
    parts[blockIdx.x * kWarp + lane] = x[blockIdx.x * kWarp + lane];
    if (fault == 0 || fault == 2) __threadfence();
    __syncthreads();
    if (lane == 0) {
        if (fault == 3) __threadfence();
        arrived = atomicAdd(counter, 1u);
        if (fault == 3) __threadfence();
    }
    __syncthreads();
    if (arrived + 1 != gridDim.x) return;
    if (fault < 2) __threadfence();
    float sum = 0.0f;
    for (int b = 0; b < static_cast<int>(gridDim.x); ++b) sum += parts[b * kWarp + lane];
    y[lane] = sum;
}

// ---- dependent launches ------------------------------------------------------------------------------------------

__global__ void produce(const float* x, float* y) {
    ptx::launch_dependents();
    y[threadIdx.x] = 2.0f * x[threadIdx.x];
}

// z = y + 1, of 64 numbers. Faults: 1 reads without waiting; 2 writes what the kernel before reads; 3 one warp waits, and the
// other one does not know; 4 is none: a barrier tells it.
__global__ void consume(float* x, const float* y, float* z, i64 fault) {
    const int thread = threadIdx.x;
    if (fault == 2) x[thread] = 0.0f;
    if (fault == 3 || fault == 4) {
        if (thread < kWarp) ptx::wait_for_previous();
        if (fault == 4) __syncthreads();
    } else if (fault != 1) {
        ptx::wait_for_previous();
    }
    z[thread] = y[thread] + 1.0f;
}

// Touches nothing of the kernel before it; lets the next one start, and waits afterwards (1), before (2) or not at all (0).
__global__ void between(float* own, i64 waits) {
    if (waits == 2) ptx::wait_for_previous();
    ptx::launch_dependents();
    own[threadIdx.x] = 1.0f;
    if (waits == 1) ptx::wait_for_previous();
}

// ---- limits and numbers ------------------------------------------------------------------------------------------

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS * static_cast<int>(sizeof(T)) / 4, sizeof(T) > 4 ? 1 : 2) bounded(T* y) {
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) y[0] = 1.0f;
}

// y [6, 32] of x [4, 32], of which the rows are a to d; a block for each row, as a product with several uses is not fused.
__global__ void contractions(const float* x, float* y) {
    const int lane = threadIdx.x;
    const float a = x[lane], b = x[32 + lane], c = x[64 + lane], d = x[96 + lane];
    float r = 0.0f;
    if (blockIdx.x == 0) {
        r = a * b + c;
    } else if (blockIdx.x == 1) {
        r = a * b - c * d;
    } else if (blockIdx.x == 2) {
        r = __fmul_rn(a, b) + c;
    } else if (blockIdx.x == 3) {
        r = __fmul_rn(a, b) - __fmul_rn(c, d);
    } else if (blockIdx.x == 4) {
        r = __fadd_rn(a * b, c);
    } else {
        r = __fsub_rn(a * b, c);
    }
    y[32 * blockIdx.x + lane] = r;
}

}  // namespace rtk
