// Depthwise convolutions of (batch, channels, height, width) with windows of K x K elements at a stride of S: every
// channel of the input has `multiple` channels of the result, each with a window of its own. Inputs have any strides,
// weights and results are dense. fp32 sums in a fixed order, rounded once; padding is zeros, and may be negative.
//
// A thread owns kDown x kAcross elements of a plane of the result, neighbours have neighbouring columns. The window is in
// registers, and slides over rows of the input that are loaded once. `flipped` reverses windows: the gradient of the
// input, if S is 1. The host accepts sizes below 2^24, so that coordinates have 32 bits. Grid: threads / 256.
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kDepthwiseThreads = 256;
inline constexpr int kAcross = 4, kDown = 4;

template <typename T>
RTK_DEVICE float element_at(const T* x, i64 at) {
    float v[1];
    load_keep<T, 1>(x + at, v);
    return v[0];
}

// Splits `at` by a size: returns the rest, and leaves the quotient. Most numbers fit 32 bits.
RTK_DEVICE i64 split_off(i64& at, i64 size) {
    const bool small = (at | size) >> 32 == 0;
    const i64 whole = small ? static_cast<i64>(static_cast<u32>(at) / static_cast<u32>(size)) : at / size;
    const i64 rest = at - whole * size;
    at = whole;
    return rest;
}

template <typename T, int K, int S>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_conv(const T* x, const T* weight, const T* bias, T* y, i64 count, i64 channels, i64 multiple, i64 height,
                   i64 width, i64 out_height, i64 out_width, i64 x_batch, i64 x_channel, i64 x_row, i64 x_column,
                   i64 pad_h, i64 pad_w, i64 flipped) {
    constexpr int kInColumns = (kAcross - 1) * S + K, kInRows = (kDown - 1) * S + K;
    i64 at = static_cast<i64>(blockIdx.x) * kDepthwiseThreads + threadIdx.x;
    if (at >= count) return;
    const int column = static_cast<int>(split_off(at, (out_width + kAcross - 1) / kAcross)) * kAcross;
    const int row = static_cast<int>(split_off(at, (out_height + kDown - 1) / kDown)) * kDown;
    const i64 plane = at, out_channel = split_off(at, channels * multiple);
    i64 channel = out_channel;
    split_off(channel, multiple);
    const T* const window = weight + out_channel * (K * K);
    float w[K * K];
#pragma unroll
    for (int i = 0; i < K * K; ++i) w[i] = element_at(window, flipped != 0 ? K * K - 1 - i : i);
    const float first = bias != nullptr ? element_at(bias, out_channel) : 0.0f;
    float sums[kDown][kAcross];
#pragma unroll
    for (int r = 0; r < kDown; ++r)
#pragma unroll
        for (int j = 0; j < kAcross; ++j) sums[r][j] = 0.0f;
    const int top = row * S - static_cast<int>(pad_h), left = column * S - static_cast<int>(pad_w);
    const T* p = x + at * x_batch + channel * x_channel + top * x_row + left * x_column;
#pragma unroll
    for (int i = 0; i < kInRows; ++i, p += x_row) {
        const bool inside = static_cast<u32>(top + i) < static_cast<u32>(height);
        float in[kInColumns];
#pragma unroll
        for (int j = 0; j < kInColumns; ++j)
            in[j] = inside && static_cast<u32>(left + j) < static_cast<u32>(width) ? element_at(p, j * x_column) : 0.0f;
#pragma unroll
        for (int r = 0; r < kDown; ++r) {
            const int tap = i - r * S;
            if (tap < 0 || tap >= K) continue;
#pragma unroll
            for (int k = 0; k < K; ++k)
#pragma unroll
                for (int j = 0; j < kAcross; ++j) sums[r][j] = fmaf(in[j * S + k], w[tap * K + k], sums[r][j]);
        }
    }
    T* const to = y + (plane * out_height + row) * out_width + column;
#pragma unroll
    for (int r = 0; r < kDown; ++r)
#pragma unroll
        for (int j = 0; j < kAcross; ++j)
            if (row + r < out_height && column + j < out_width) {
                const float value[1] = {sums[r][j] + first};
                store<T, 1>(to + r * out_width + j, value);
            }
}

}  // namespace rtk
