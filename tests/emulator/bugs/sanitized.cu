// What AddressSanitizer and UBSan see and the emulator's own checks do not: a kernel's own arrays and arithmetic. And a kernel
// with more arguments than any of the library, all of which arrive.
#include "common/abi.cuh"

namespace rtk {

__global__ void local_overflow(float* y, i64 n) {
    float local[8];
    float* volatile hidden = local;  // or the compiler knows the object's size, and UBSan says it before AddressSanitizer
    float* p = hidden;
    for (i64 i = 0; i < n; ++i) *p++ = static_cast<float>(i);
    y[threadIdx.x] = local[threadIdx.x % 8];
}

__constant__ float kTable[8] = {1, 2, 3, 4, 5, 6, 7, 8};

__global__ void table_overflow(float* y, i64 n) { y[threadIdx.x] = kTable[n]; }

__global__ void shift_too_far(i64* y, i64 n) { y[threadIdx.x] = 1ll << n; }

// Correct: barriers, shuffles and shared memory between fibers.
__global__ void in_order(const float* x, float* y, i64 n) {
    __shared__ float all[64];
    float own[4];
    for (int i = 0; i < 4; ++i) own[i] = x[threadIdx.x] * static_cast<float>(i + 1);
    all[threadIdx.x] = own[threadIdx.x % 4];
    __syncthreads();
    const float other = all[63 - threadIdx.x];
    y[threadIdx.x] = other + __shfl_xor_sync(0xffffffffu, other, 1) + static_cast<float>(n);
}

#define RTK_EIGHT(name) i64 name##0, i64 name##1, i64 name##2, i64 name##3, i64 name##4, i64 name##5, i64 name##6, i64 name##7
#define RTK_SUM(name) name##0 + name##1 + name##2 + name##3 + name##4 + name##5 + name##6 + name##7

__global__ void many_arguments(i64* y, RTK_EIGHT(a), RTK_EIGHT(b), RTK_EIGHT(c), RTK_EIGHT(d), RTK_EIGHT(e), RTK_EIGHT(f),
                               RTK_EIGHT(g), RTK_EIGHT(h), RTK_EIGHT(i), RTK_EIGHT(j), RTK_EIGHT(k), RTK_EIGHT(l)) {
    y[threadIdx.x] = RTK_SUM(a) + RTK_SUM(b) + RTK_SUM(c) + RTK_SUM(d) + RTK_SUM(e) + RTK_SUM(f) + RTK_SUM(g) + RTK_SUM(h) +
                     RTK_SUM(i) + RTK_SUM(j) + RTK_SUM(k) + 1000 * (RTK_SUM(l));
}

}  // namespace rtk
