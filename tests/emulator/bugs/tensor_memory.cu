// A product of 128 x 32 x 16 in tensor memory, and what can go wrong around it.
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"

namespace rtk {

enum Bug { kNone, kReadEarly, kFreeEarly, kNoFence, kWrongLane, kTooManyColumns };

template <int BUG>
__global__ void multiply(const u16* a, const u16* b, float* out) {
    extern __shared__ __align__(1024) u8 memory[];
    const ptx::SharedAddress left = ptx::shared_address(memory), right = left + 128 * 128, barrier = right + 32 * 128;
    const ptx::SharedAddress place = barrier + 8;
    auto put = [&](u32 row, const u16* from, u8* to) {  // 16 elements, swizzled as TMA does it
        for (u32 i = 0; i < 16; ++i)
            *reinterpret_cast<u16*>(to + row * 128 + ((i / 8 ^ (row & 7u)) << 4) + i % 8 * 2) = from[row * 16 + i];
    };
    put(threadIdx.x, a, memory);
    if (threadIdx.x < 32) put(threadIdx.x, b, memory + 128 * 128);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::mbarrier_fence_init();
    }
    if (BUG != kNoFence) ptx::fence_async_shared();
    if (threadIdx.x < 32) ptx::tensor_alloc<32>(place);
    __syncthreads();
    const u32 tensor = *reinterpret_cast<u32*>(memory + (place - left));
    if (threadIdx.x == 0) {
        ptx::tensor_product<ptx::kTensorF16>(tensor, ptx::tensor_descriptor(left), ptx::tensor_descriptor(right),
                                             1u << 4 | 1u << 7 | 1u << 10 | (BUG == kTooManyColumns ? 8u : 4u) << 17 | 8u << 24, false);
        ptx::tensor_commit(barrier);
    }
    if (BUG == kFreeEarly && threadIdx.x < 32) ptx::tensor_free<32>(tensor);
    if (BUG != kReadEarly) ptx::mbarrier_wait(barrier, 0);
    u32 words[32];
    ptx::tensor_load(tensor + ((BUG == kWrongLane ? 0u : threadIdx.x / 32 * 32) << 16), words);
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = __uint_as_float(words[i]);
    __syncthreads();
    if (BUG != kFreeEarly && threadIdx.x < 32) ptx::tensor_free<32>(tensor);
}

}  // namespace rtk
