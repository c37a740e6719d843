// Correct kernels that together use every part of the execution model the emulator offers.
#include "common/abi.cuh"
#include "common/convert.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

namespace rtk {

template <typename T>
__global__ void narrow(const float* x, T* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        const float v[1] = {x[i]};
        store<T, 1>(y + i, v);
    }
}

template <typename T>
__global__ void widen(const T* x, float* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        float v[1];
        load_keep<T, 1>(x + i, v);
        y[i] = v[0];
    }
}

// Row k of `out` [rows, 32] holds what operation k gives each lane.
__global__ void warp_operations(int* out) {
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x;
    int row = 0;
    auto put = [&](int v) { out[32 * row++ + lane] = v; };
    put(__shfl_sync(all, lane * 3, 5));
    put(__shfl_sync(all, lane * 3, lane + 1, 8));
    put(__shfl_up_sync(all, lane, 3));
    put(__shfl_down_sync(all, lane, 3, 16));
    put(__shfl_xor_sync(all, lane, 9));
    put(static_cast<int>(__shfl_xor_sync(all, 1.5 * lane, 1) * 2));
    put(static_cast<int>(__ballot_sync(all, lane % 3 == 0)));
    put(__any_sync(all, lane == 7));
    put(__all_sync(all, lane < 31));
    put(static_cast<int>(__match_any_sync(all, lane % 5)));
    int same;
    put(static_cast<int>(__match_all_sync(all, 42, &same)));
    put(same);
    put(static_cast<int>(__reduce_add_sync(all, static_cast<unsigned>(lane))));
    put(__reduce_min_sync(all, -lane));
    put(__reduce_max_sync(all, lane ^ 21));
    put(static_cast<int>(__reduce_xor_sync(all, 1u << lane)));
    if (lane < 16) {  // two halves of the warp, each on its own
        put(__shfl_xor_sync(0x0000ffffu, lane, 1));
    } else {
        put(static_cast<int>(__reduce_add_sync(0xffff0000u, 1u)));
    }
    __syncwarp();
    put(static_cast<int>(__activemask()));
}

// Four warps; pairs of warps meet at their own named barrier. out: [5, 128].
__global__ void barriers(int* out) {
    __shared__ int slot[4];
    const int thread = threadIdx.x, warp = thread / 32, pair = warp / 2;
    out[thread] = __syncthreads_count(thread % 3 == 0);
    out[128 + thread] = __syncthreads_and(thread < 128);
    out[256 + thread] = __syncthreads_or(thread == 200);
    if (thread % 32 == 0) slot[warp] = 10 * (warp + 1);
    ptx::named_barrier_sync(pair + 1, 64);
    out[384 + thread] = slot[2 * pair] + slot[2 * pair + 1];
    __syncthreads();
    out[512 + thread] = slot[3 - warp];
}

// counters: [8] ints, total: [1] float, last: [1], which block came last (every block counts itself in).
__global__ void atomics(int* counters, float* total, int* last) {
    __shared__ int hits;
    if (threadIdx.x == 0) hits = 0;
    __syncthreads();
    atomicAdd(&hits, 1);
    atomicAdd(total, 0.5f);
    atomicMax(counters + 1, static_cast<int>(threadIdx.x));
    atomicMin(counters + 2, -static_cast<int>(blockIdx.x));
    atomicOr(counters + 3, 1 << (threadIdx.x % 8));
    atomicCAS(counters + 4, 0, 77);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(counters, hits);
        const unsigned ticket = atomicInc(reinterpret_cast<unsigned*>(counters + 5), gridDim.x - 1);
        if (ticket == gridDim.x - 1) last[0] = 1;
    }
}

// Reverses each block's part of x through dynamic shared memory; blocks and threads in three dimensions.
__global__ void dynamic_shared(const float* x, float* y) {
    extern __shared__ __align__(16) u8 bytes[];
    float* buffer = reinterpret_cast<float*>(bytes);
    const int n = blockDim.x * blockDim.y * blockDim.z;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    buffer[thread] = x[block * n + thread];
    __syncthreads();
    y[block * n + thread] = buffer[n - 1 - thread];
}

__global__ void bit_intrinsics(int* out) {
    const int t = threadIdx.x;
    int row = 0;
    auto put = [&](int v) { out[32 * row++ + t] = v; };
    put(__popc(0xf0f0u + t));
    put(__clz(1 << t));
    put(__ffs(1 << t));
    put(static_cast<int>(__brev(1u << t)));
    put(static_cast<int>(__byte_perm(0x33221100u, 0x77665544u, 0x7531u)));
    put(static_cast<int>(__umulhi(0x80000000u, static_cast<u32>(t))));
    put(__float2int_rn(t + 0.5f));
    put(static_cast<int>(__float_as_uint(__fdividef(1.0f, 4.0f))));
    put(__clz(0));
}

// One warp: d [16, 8] = a [16, k] * b [8, k]^T with k = 16 (bf16, fp16), 8 (fp32 as tf32) or 32 (e4m3, int8 as i32).
template <typename T>
__global__ void mma_tile(const T* a, const T* b, float* d) {
    constexpr int kRow = 32 / sizeof(T);  // every operand row is 32 bytes
    __shared__ __align__(16) u8 left[16 * 32];
    __shared__ __align__(16) u8 right[8 * 32];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    ptx::cp_async_16(ptx::shared_address(left + 16 * lane), reinterpret_cast<const u8*>(a) + 16 * lane);
    if (lane < 16) ptx::cp_async_16(ptx::shared_address(right + 16 * lane), reinterpret_cast<const u8*>(b) + 16 * lane);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
    u32 x[4], y[2];
    // Matrix i of x: rows 8 (i % 2) ..., bytes 16 (i / 2) ... of the left operand; of y: all rows, bytes 16 i ...
    ptx::ldmatrix_x4(x, left + (lane % 16) * 32 + lane / 16 * 16);
    ptx::ldmatrix_x2(y, right + (lane % 8) * 32 + lane / 8 % 2 * 16);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (is_same<T, bf16>::value) {
        ptx::mma_m16n8k16_bf16(sum, x, y);
    } else if constexpr (is_same<T, fp16>::value) {
        ptx::mma_m16n8k16_f16(sum, x, y);
    } else if constexpr (is_same<T, float>::value) {
        ptx::mma_m16n8k8_tf32(sum, x, y);
    } else if constexpr (is_same<T, signed char>::value) {
        i32 whole[4] = {0, 0, 0, 0};
        ptx::mma_m16n8k32_s8(whole, x, y);
        for (int i = 0; i < 4; ++i) sum[i] = static_cast<float>(whole[i]);
    } else {
#if RTK_HAS_FP8_CVT
        ptx::mma_m16n8k32_e4m3(sum, x, y);
#endif
    }
    static_assert(kRow * sizeof(T) == 32, "rows of 32 bytes");
    for (int r = 0; r < 2; ++r)
        for (int c = 0; c < 2; ++c) d[(g + 8 * r) * 8 + 2 * t + c] = sum[2 * r + c];
}

// y [8, 8] = transpose of x [8, 8], 16-bit elements; ldmatrix wants four matrices, all the same here.
__global__ void transpose_tile(const u16* x, u16* y) {
    __shared__ __align__(16) u16 tile[64];
    const int lane = threadIdx.x;
    tile[2 * lane] = x[2 * lane];
    tile[2 * lane + 1] = x[2 * lane + 1];
    __syncwarp();
    u32 r[4];
    ptx::ldmatrix_x4_trans(r, tile + lane % 8 * 8);
    y[2 * lane] = static_cast<u16>(r[3]);
    y[2 * lane + 1] = static_cast<u16>(r[3] >> 16);
}

// A ring of two cp.async stages over `rows` rows of 128 floats: y = 2 x.
__global__ void pipelined_copy(const float* x, float* y, i64 rows) {
    __shared__ __align__(16) float ring[2][128];
    const int at = 4 * threadIdx.x;
    ptx::cp_async_16(ptx::shared_address(&ring[0][at]), x + at);
    ptx::cp_async_commit();
    for (i64 row = 0; row < rows; ++row) {
        if (row + 1 < rows)
            ptx::cp_async_16(ptx::shared_address(&ring[(row + 1) % 2][at]), x + (row + 1) * 128 + at);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        for (int i = 0; i < 4; ++i) y[row * 128 + at + i] = 2.0f * ring[row % 2][127 - at - i];
        __syncthreads();
    }
}

}  // namespace rtk
