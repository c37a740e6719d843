// y = residual + rms_norm(x) of the few rows of a decoding step: n = x * rstd * (offset + weight) is rounded to T, then
// added to the residual, and the sum is rounded.
//
// A block owns a row; a thread has every blockDim.x-th vector of it. x is read twice, the second time from cache. The
// kernel may start before the previous one has ended, and waits for it.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kStepNormThreads = 256;

// Not read-only: the previous kernel may write after this one has started.
template <typename T>
RTK_DEVICE void step_norm_load(const T* p, float (&f)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(p);
    unpack<T, 8>(Raw<16>{{words.x, words.y, words.z, words.w}}, f);
}

template <typename T>
__global__ void __launch_bounds__(kStepNormThreads)
    step_norm(const T* x, const T* weight, const T* residual, T* y, i64 cols, i64 x_row, i64 residual_row, double eps,
              double offset) {
    __shared__ float of_warps[kStepNormThreads / 32];
    ptx::launch_dependents();
    ptx::wait_for_previous();
    const i64 row = blockIdx.x, vectors = cols / 8;
    const T* const own = x + row * x_row;
    const T* const added = residual + row * residual_row;
    float square = 0.0f, first[8] = {}, sum[8] = {}, gain[8] = {};
    if (threadIdx.x < vectors) {
        step_norm_load(own + threadIdx.x * 8, first);
        step_norm_load(added + threadIdx.x * 8, sum);
        step_norm_load(weight + threadIdx.x * 8, gain);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) square += first[e] * first[e];
#pragma unroll 2
    for (i64 v = threadIdx.x + kStepNormThreads; v < vectors; v += kStepNormThreads) {
        float value[8];
        step_norm_load(own + v * 8, value);
#pragma unroll
        for (int e = 0; e < 8; ++e) square += value[e] * value[e];
    }
    square = warp_reduce<Sum>(square);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0.0f;
#pragma unroll
    for (int w = 0; w < kStepNormThreads / 32; ++w) square += of_warps[w];
    const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
    auto write = [&](i64 v, const float(&value)[8], const float(&other)[8], const float(&factor)[8]) {
        float normed[8], total[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) normed[e] = value[e] * rstd * (static_cast<float>(offset) + factor[e]);
        unpack<T, 8>(pack<T, 8>(normed), normed);
#pragma unroll
        for (int e = 0; e < 8; ++e) total[e] = other[e] + normed[e];
        store<T, 8>(y + row * cols + v * 8, total);
    };
    if (threadIdx.x < vectors) write(threadIdx.x, first, sum, gain);
#pragma unroll 1
    for (i64 v = threadIdx.x + kStepNormThreads; v < vectors; v += kStepNormThreads) {
        float value[8], other[8], factor[8];
        step_norm_load(own + v * 8, value);
        step_norm_load(added + v * 8, other);
        step_norm_load(weight + v * 8, factor);
        write(v, value, other, factor);
    }
}

}  // namespace rtk
