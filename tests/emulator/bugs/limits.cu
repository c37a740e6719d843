// Numbers that an emulator with counters or arrays of a fixed size gets wrong, and addresses that its shadow has no place for.
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

// 16 of each row's ones by `value`: 16 * value in every sum, `commits` groups after the kernel's first.
__global__ void product_after_commits(float* y, i64 commits) {
    __shared__ __align__(1024) u16 a[64 * 64];
    for (int i = threadIdx.x; i < 64 * 64; i += 128) a[i] = 0x3f80;  // bf16
    ptx::fence_async_shared();
    __syncthreads();
    const u64 of_a = ptx::matrix_descriptor(ptx::shared_address(a), 0);
    float sums[4] = {};
    for (i64 i = 0; i < commits; ++i) ptx::wgmma_commit();
    ptx::wgmma_shared<bf16, false>(sums, of_a, of_a, 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    y[threadIdx.x] = sums[0];
}

// Products that are pending while the blocks of a cluster wait for each other: each block has its own.
__global__ void products_of_a_cluster(float* y) {
    __shared__ __align__(1024) u16 a[64 * 64];
    const u16 value = ptx::cluster_rank() == 0 ? 0x3f80 : 0x4000;  // 1 and 2
    for (int i = threadIdx.x; i < 64 * 64; i += 128) a[i] = value;
    ptx::fence_async_shared();
    __syncthreads();
    const u64 of_a = ptx::matrix_descriptor(ptx::shared_address(a), 0);
    float sums[4] = {};
    ptx::wgmma_shared<bf16, false>(sums, of_a, of_a, 0);
    ptx::wgmma_commit();
    ptx::cluster_barrier();
    ptx::wgmma_wait<0>();
    y[blockIdx.x * 128 + threadIdx.x] = sums[0];
}

__global__ void operand_elsewhere(const float* x, float* y) {
    const u64 of_x = ptx::matrix_descriptor(ptx::shared_address(x), 0);
    float sums[4] = {};
    ptx::wgmma_shared<bf16, false>(sums, of_x, of_x, 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    y[threadIdx.x] = sums[0];
}

__global__ void bulk_target_elsewhere(const float* x, float* y) {
    __shared__ __align__(8) u64 barrier;
    ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::mbarrier_fence_init();
    ptx::bulk_load(ptx::shared_address(y), x, 64, ptx::shared_address(&barrier));
}

__global__ void undefined_elsewhere(float* y) { ptx::leave_undefined(ptx::shared_address(y), 16); }

__global__ void copy_of_bytes(const float* x, i64 bytes) {
    __shared__ __align__(16) float row[4];
    ptx::cp_async_16_partial(ptx::shared_address(row), x, static_cast<int>(bytes));
}

__global__ void barrier_of(i64 arrivals, i64 bytes) {
    __shared__ __align__(8) u64 barrier;
    ptx::mbarrier_init(ptx::shared_address(&barrier), static_cast<u32>(arrivals));
    if (bytes != 0) ptx::mbarrier_arrive_expect(ptx::shared_address(&barrier), static_cast<u32>(bytes));
}

// A box by an instruction for `coordinates` of them; x has two dimensions.
__global__ void box_of_rank(const __grid_constant__ ptx::TensorMap x, i64 coordinates, i64 stores) {
    __shared__ __align__(1024) float box[8 * 32];
    __shared__ __align__(8) u64 barrier;
    const ptx::SharedAddress place = ptx::shared_address(box), at = ptx::shared_address(&barrier);
    ptx::mbarrier_init(at, 1);
    ptx::mbarrier_fence_init();
    if (stores != 0) {
        for (int i = 0; i < 8 * 32; ++i) box[i] = 3.0f;
        ptx::fence_async_shared();
        coordinates == 2 ? ptx::tma_store_2d(x, place, 0, 0) : ptx::tma_store_3d(x, place, 0, 0, 0);
        ptx::bulk_store_commit();
        ptx::bulk_store_wait();
        return;
    }
    ptx::mbarrier_arrive_expect(at, sizeof(box));
    coordinates == 2 ? ptx::tma_load_2d(place, x, at, 0, 0) : ptx::tma_load_3d(place, x, at, 0, 0, 0);
    ptx::mbarrier_wait(at, 0);
}

// The last thread of a block writes so many bytes away from a variable on its stack.
__global__ void beside_the_stack(i64* y, i64 bytes) {
    volatile u8 own = 1;
    if (threadIdx.x == blockDim.x - 1) *(&own + bytes) = 2;
    y[threadIdx.x] = own;
}

}  // namespace rtk
