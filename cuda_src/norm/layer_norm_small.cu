// Forward of layer normalisation (norm/layer_norm.cu) for inputs so small that latency dominates.
#include "common/reduce.cuh"
#include "norm/common.cuh"
#include "ptx/forget.cuh"

namespace rtk {

// One block of whole warps per row; thread i owns the 16-byte vectors i, i + threads, ... (CHUNKS of them; the first
// one of every warp exists). All inputs are loaded at the start, and there is one barrier: every warp uses differences
// from the mean of its own columns, and these are merged as differences from the first warp's. residual (then sum is
// written) and both parameters may be null; `weight_fp32`: parameters are fp32, otherwise T.
//
// Everything that the first loads need is in the first 64 bytes of arguments, which arrive together; two numbers share
// one argument (the first in its lower half): columns and weight_fp32; eps and offset, of fp32.
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(1024, 1)
    layer_norm_fwd_small(const T* x, const T* residual, const void* weight, const void* bias, T* y, T* sum, i64 cols_weight_fp32,
                         i64 x_stride, i64 residual_stride, i64 eps_offset) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ float4 of_warps[kWarp];  // number near the mean, sums of differences and of their squares, share of the row
    const int cols = static_cast<int>(lower(cols_weight_fp32)), threads = static_cast<int>(blockDim.x);
    const bool weight_fp32 = upper(cols_weight_fp32) != 0;
    const int column = static_cast<int>(threadIdx.x) * VEC, pitch = threads * VEC;
    const int room = cols - column;  // columns from this thread's first one on
    x += blockIdx.x * x_stride + column;
    Raw<16> raw[CHUNKS];
    AskedGain<T, VEC> gains[CHUNKS], biases[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        if (c * pitch < room) raw[c] = load_raw<T, VEC>(x + c * pitch);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(gains[c].raw), clear(biases[c].raw);
        if (weight != nullptr && c * pitch < room) gains[c].ask(weight, weight_fp32, column + c * pitch);
        if (bias != nullptr && c * pitch < room) biases[c].ask(bias, weight_fp32, column + c * pitch);
    }
    if (residual != nullptr) {
        residual += blockIdx.x * residual_stride + column;
        sum += static_cast<i64>(blockIdx.x) * cols + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * pitch < room) {
                raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
                ptx::st<16>(sum + c * pitch, raw[c]);
            }
        }
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = threads / kWarp;
    int warp_columns = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) warp_columns += min(max(room + lane * VEC - c * pitch, 0), kWarp * VEC);
    const float own_count = static_cast<float>(warp_columns), count = static_cast<float>(cols);
    const float per_column = ptx::rcp(count);
    const float epsilon = __uint_as_float(lower(eps_offset));

    float rough = 0.0f, differences = 0.0f, square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch < room) {
            float h[VEC];
            unpack<T, VEC>(raw[c], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) rough += h[i] * kSmallPart;
        }
    }
    rough = mean_of_parts(warp_reduce<Sum>(rough), own_count);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch < room) {
            ptx::forget(raw[c]);
            float h[VEC];
            unpack<T, VEC>(raw[c], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = h[i] - rough;
                differences += d;
                square += d * d;
            }
        }
    }
    warp_reduce_pair<Sum>(differences, square, kWarp);
    RowStatistics found;
    if (warps == 1) {
        found = statistics_of(rough, differences, square, count, epsilon);
    } else {
        if (lane == 0) of_warps[threadIdx.x / kWarp] = make_float4(rough, differences, square, own_count * per_column);
        __syncthreads();
        const float centre = of_warps[0].x;
        float4 part = make_float4(centre, 0.0f, 0.0f, 0.0f);
        if (lane < warps) part = of_warps[lane];
        const float away = part.x - centre;
        const float more = warp_reduce<Sum>(part.w * away + part.y * per_column);  // from `centre` to the mean
        const float left = away - more;
        square = warp_reduce<Sum>(part.z + left * (2.0f * part.y + part.w * count * left));
        found = {centre + more, rsqrtf(square * per_column + epsilon)};
    }
    const float base = weight != nullptr ? __uint_as_float(upper(eps_offset)) : 1.0f;
    y += static_cast<i64>(blockIdx.x) * cols + column;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch < room) {
            ptx::forget(raw[c]);
            float h[VEC], gain[VEC], shift[VEC];
            unpack<T, VEC>(raw[c], h);
            gains[c].get(weight_fp32, base, gain);
            biases[c].get(weight_fp32, 0.0f, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] = (h[i] - found.mean) * found.rstd * gain[i] + shift[i];
            store<T, VEC>(y + c * pitch, h);
        }
    }
}

// The same for one 16-byte vector per thread, a weight and a bias of T, no offset and no residual. At these sizes
// fetching instructions takes as long as everything else, so there are as few of them as possible.
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_vector(const T* x, const T*, const T* weight, const T* bias, T* y, T*, i64 cols_eps, i64 x_stride) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ float4 of_warps[kWarp];
    const int cols = static_cast<int>(lower(cols_eps));
    const u32 column = threadIdx.x * VEC, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    const bool exists = static_cast<int>(column) < cols;
    Raw<16> raw, gains, biases;
    clear(raw);
    if (exists) {
        raw = load_raw<T, VEC>(x + (blockIdx.x * x_stride + column));
        gains = ptx::ld_keep<16>(weight + column);
        biases = ptx::ld_keep<16>(bias + column);
    }
    const float count = static_cast<float>(cols);
    const float own_count = static_cast<float>(min(cols - static_cast<int>(column - lane * VEC), kWarp * VEC));
    const float per_column = ptx::rcp(count);
    float h[VEC], rough = 0.0f, differences = 0.0f, square = 0.0f;
    unpack<T, VEC>(raw, h);
#pragma unroll
    for (int i = 0; i < VEC; ++i) rough += h[i] * kSmallPart;
    rough = mean_of_parts(warp_reduce<Sum>(rough), own_count);
    if (exists) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            h[i] -= rough;
            if (!kExactSums<T>) differences += h[i];
            square += h[i] * h[i];
        }
    }
    square = warp_reduce<Sum>(square);
    if constexpr (!kExactSums<T>) differences = warp_reduce<Sum>(differences);
    if (lane == 0) of_warps[threadIdx.x / kWarp] = make_float4(rough, differences, square, own_count * per_column);
    __syncthreads();
    // Exchanges the warps' approximate means; each lane holds that of one warp.
    float4 part = make_float4(rough, 0.0f, 0.0f, 0.0f);
    if (lane < warps) part = of_warps[lane];
    const float away = part.x - rough;
    const float more = warp_reduce<Sum>(part.w * away + part.y * per_column), left = away - more;
    square = warp_reduce<Sum>(part.z + left * (2.0f * part.y + part.w * count * left));
    const float rstd = rsqrtf(square * per_column + __uint_as_float(upper(cols_eps)));
    if (exists) {
        float gain[VEC], shift[VEC];
        unpack<T, VEC>(gains, gain);
        unpack<T, VEC>(biases, shift);
        const float mean_from_rough = (rough + more) - rough;  // of the mean as fp32 has it
#pragma unroll
        for (int i = 0; i < VEC; ++i) h[i] = (h[i] - mean_from_rough) * rstd * gain[i] + shift[i];
        store<T, VEC>(y + (static_cast<i64>(blockIdx.x) * cols + column), h);
    }
}

}  // namespace rtk
