// The rate of the tensor cores of sm_90a without memory traffic: a loop of m64n256 products of operands that stay in
// shared memory, sums in registers. Two warpgroups a block, each with 64 rows of its own; one block per SM. Operands are
// pseudo-random, because the clock under load depends on the bits that change.
#include "common/abi.cuh"
#include "gemm/operand.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk {

inline constexpr int kPeakThreads = 256;
inline constexpr int kPeakProducts = 16;  // instructions per step
inline constexpr u32 kLeftBytes = 64 * kTileRow, kRightBytes = 256 * kTileRow;

// Four bytes of finite operands near 1: random signs and mantissas, one of few exponents.
template <typename T>
RTK_DEVICE u32 peak_operand(u32 i) {
    u32 h = (i + 1) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h ^= h >> 13;
    if constexpr (sizeof(T) == 2) return (h & 0x80ff80ffu) | 0x3f003f00u;
    if constexpr (is_same<T, e4m3>::value) return (h & 0x87878787u) | 0x30303030u;
    return h;
}

template <typename T, typename SUM>
__global__ void __launch_bounds__(kPeakThreads, 1) wgmma_peak(float* out, i64 steps) {
    __shared__ __align__(1024) u8 memory[2 * kLeftBytes + kRightBytes];
    for (u32 i = threadIdx.x; i < sizeof(memory) / 4; i += kPeakThreads) {
        reinterpret_cast<u32*>(memory)[i] = peak_operand<T>(i);
    }
    ptx::fence_async_shared();
    __syncthreads();
    const ptx::SharedAddress base = ptx::shared_address(memory);
    const u64 left = k_major_descriptor(base + threadIdx.x / 128 * kLeftBytes);
    const u64 right = k_major_descriptor(base + 2 * kLeftBytes);
    SUM sums[128];
    // While one warpgroup waits for its products, those of the other keep the tensor cores busy.
    for (i64 step = 0; step < steps; ++step) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kPeakProducts; ++i) {  // a row of 128 bytes is four instructions deep
            const u64 next = i % 4 * kNextKMajor;
            ptx::wgmma_typed<T, T, false, false>(sums, left + next, right + next, step != 0 || i != 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
    }
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) total += static_cast<float>(sums[i]);
    out[static_cast<i64>(blockIdx.x) * kPeakThreads + threadIdx.x] = total;
}

}  // namespace rtk
