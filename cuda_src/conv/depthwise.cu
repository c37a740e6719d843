// Depthwise convolutions of (batch, channels, depth, height, width) and their gradients: every channel of the input has
// `multiple` channels of the result, each with a window of its own. Inputs have any strides, weights and results are
// dense. fp32 sums in a fixed order, rounded once; padding is zeros. The host accepts sizes, strides, padding and extents
// of windows below 2^24, so that coordinates have 32 bits.
//
// Forward: a thread owns kDown x kAcross elements of a plane of the result, neighbours have neighbouring columns. Windows
// of K x K elements without dilation, kept in registers, slide over rows of the input that are loaded once; K = 0 is any
// window, with one row per thread. `flipped` reverses the windows: the gradient of the input, if the stride is 1.
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kDepthwiseThreads = 256;
inline constexpr int kAcross = 4, kDown = 4;
inline constexpr int kTaps = 8;  // of a row of a window, summed by one block of the weight's gradient

template <typename T>
RTK_DEVICE float element_at(const T* x, i64 at) {
    float v[1];
    load_keep<T, 1>(x + at, v);
    return v[0];
}

template <typename T>
RTK_DEVICE void put(T* y, float value) {
    const float v[1] = {value};
    store<T, 1>(y, v);
}

RTK_DEVICE i64 quotient(i64 a, i64 b) {  // of numbers that are not negative
    return (a | b) >> 32 == 0 ? static_cast<i64>(static_cast<u32>(a) / static_cast<u32>(b)) : a / b;
}

// Splits `at` by a size: returns the rest, and leaves the quotient.
RTK_DEVICE i64 split_off(i64& at, i64 size) {
    const i64 whole = quotient(at, size), rest = at - whole * size;
    at = whole;
    return rest;
}

template <typename T, int K, int S>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_fwd(const T* x, const T* weight, const T* bias, T* y, i64 count, i64 channels, i64 multiple, i64 depth,
                  i64 height, i64 width, i64 out_depth, i64 out_height, i64 out_width, i64 x_batch, i64 x_channel,
                  i64 x_depth, i64 x_row, i64 x_column, i64 kernel_d, i64 kernel_h, i64 kernel_w, i64 stride_d,
                  i64 stride_h, i64 stride_w, i64 pad_d, i64 pad_h, i64 pad_w, i64 dilation_d, i64 dilation_h,
                  i64 dilation_w, i64 flipped) {
    constexpr int kRows = K == 0 ? 1 : kDown;
    i64 at = static_cast<i64>(blockIdx.x) * kDepthwiseThreads + threadIdx.x;
    if (at >= count) return;
    const int column = static_cast<int>(split_off(at, (out_width + kAcross - 1) / kAcross)) * kAcross;
    const int row = static_cast<int>(split_off(at, (out_height + kRows - 1) / kRows)) * kRows;
    const int slice = static_cast<int>(split_off(at, out_depth));
    const i64 plane = at, out_channel = split_off(at, channels * multiple);
    const T* const from = x + at * x_batch + quotient(out_channel, multiple) * x_channel;
    const i64 taps = kernel_d * kernel_h * kernel_w;
    const T* const window = weight + out_channel * taps;
    float sums[kRows][kAcross];
    const float first = bias != nullptr ? element_at(bias, out_channel) : 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int j = 0; j < kAcross; ++j) sums[r][j] = 0.0f;
    if constexpr (K > 0) {
        constexpr int kWide = (kAcross - 1) * S + K, kHigh = (kRows - 1) * S + K;
        float w[K * K];
#pragma unroll
        for (int i = 0; i < K * K; ++i) w[i] = element_at(window, flipped != 0 ? K * K - 1 - i : i);
        const int top = row * S - static_cast<int>(pad_h), left = column * S - static_cast<int>(pad_w);
        const T* p = from + slice * x_depth + top * x_row + left * x_column;
#pragma unroll
        for (int i = 0; i < kHigh; ++i, p += x_row) {
            const bool inside = static_cast<u32>(top + i) < static_cast<u32>(height);
            float in[kWide];
#pragma unroll
            for (int j = 0; j < kWide; ++j)
                in[j] = inside && static_cast<u32>(left + j) < static_cast<u32>(width) ? element_at(p, j * x_column) : 0.0f;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int tap = i - r * S;
                if (tap < 0 || tap >= K) continue;
#pragma unroll
                for (int k = 0; k < K; ++k)
#pragma unroll
                    for (int j = 0; j < kAcross; ++j) sums[r][j] = fmaf(in[j * S + k], w[tap * K + k], sums[r][j]);
            }
        }
    } else {
        const int step = flipped != 0 ? -1 : 1;
        const T* tap = window + (flipped != 0 ? taps - 1 : 0);
        const int left = column * static_cast<int>(stride_w) - static_cast<int>(pad_w);
        for (int d = 0; d < static_cast<int>(kernel_d); ++d)
            for (int h = 0; h < static_cast<int>(kernel_h); ++h) {
                const int z = slice * static_cast<int>(stride_d) - static_cast<int>(pad_d) + d * static_cast<int>(dilation_d);
                const int v = row * static_cast<int>(stride_h) - static_cast<int>(pad_h) + h * static_cast<int>(dilation_h);
                const bool inside = static_cast<u32>(z) < static_cast<u32>(depth) && static_cast<u32>(v) < static_cast<u32>(height);
                const T* const line = from + z * x_depth + v * x_row;
                int u = left;
                for (int k = 0; k < static_cast<int>(kernel_w); ++k, tap += step, u += static_cast<int>(dilation_w)) {
                    if (!inside) continue;
                    const float w = element_at(tap, 0);
#pragma unroll
                    for (int j = 0; j < kAcross; ++j) {
                        const int at_column = u + j * static_cast<int>(stride_w);
                        if (static_cast<u32>(at_column) < static_cast<u32>(width))
                            sums[0][j] = fmaf(element_at(line, at_column * x_column), w, sums[0][j]);
                    }
                }
            }
    }
    T* const to = y + ((plane * out_depth + slice) * out_height + row) * out_width + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int j = 0; j < kAcross; ++j)
            if (row + r < out_height && column + j < out_width) put(to + r * out_width + j, sums[r][j] + first);
}

// Whether a window begins `distance` before an element, and which one: those of results, `stride` apart.
RTK_DEVICE bool met(int distance, i64 stride, i64 size, int& index) {
    const u32 whole = static_cast<u32>(distance) / static_cast<u32>(stride);
    index = static_cast<int>(whole);
    return distance >= 0 && whole * static_cast<u32>(stride) == static_cast<u32>(distance) && whole < static_cast<u32>(size);
}

// The gradient of the input for any stride: a thread owns an element, and adds the windows that contain it.
template <typename T>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_bwd_input(const T* dy, const T* weight, T* dx, i64 count, i64 channels, i64 multiple, i64 depth, i64 height,
                        i64 width, i64 out_depth, i64 out_height, i64 out_width, i64 kernel_d, i64 kernel_h, i64 kernel_w,
                        i64 stride_d, i64 stride_h, i64 stride_w, i64 pad_d, i64 pad_h, i64 pad_w, i64 dilation_d,
                        i64 dilation_h, i64 dilation_w) {
    const i64 own = static_cast<i64>(blockIdx.x) * kDepthwiseThreads + threadIdx.x;
    if (own >= count) return;
    i64 at = own;
    const int column = static_cast<int>(split_off(at, width)), row = static_cast<int>(split_off(at, height));
    const int slice = static_cast<int>(split_off(at, depth));
    const i64 channel = split_off(at, channels);
    float sum = 0.0f;
    const i64 volume = out_depth * out_height * out_width;
    const T* tap = weight + channel * multiple * kernel_d * kernel_h * kernel_w;
    const T* from = dy + (at * channels + channel) * multiple * volume;
    for (i64 m = 0; m < multiple; ++m, from += volume)
        for (int d = 0; d < static_cast<int>(kernel_d); ++d)
            for (int h = 0; h < static_cast<int>(kernel_h); ++h)
                for (int k = 0; k < static_cast<int>(kernel_w); ++k, ++tap) {
                    int z, v, u;
                    if (!met(slice + static_cast<int>(pad_d) - d * static_cast<int>(dilation_d), stride_d, out_depth, z)) continue;
                    if (!met(row + static_cast<int>(pad_h) - h * static_cast<int>(dilation_h), stride_h, out_height, v)) continue;
                    if (!met(column + static_cast<int>(pad_w) - k * static_cast<int>(dilation_w), stride_w, out_width, u)) continue;
                    sum = fmaf(element_at(from, (z * out_height + v) * out_width + u), element_at(tap, 0), sum);
                }
    put(dx + own, sum);
}

// The gradients of weight and bias. Block (channel of the result, row of the window, kTaps elements of that row): its
// threads share the elements of the result, and their sums are added in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_bwd_weight(const T* dy, const T* x, T* dw, T* db, i64 batch, i64 channels, i64 multiple, i64 depth,
                         i64 height, i64 width, i64 out_depth, i64 out_height, i64 out_width, i64 x_batch, i64 x_channel,
                         i64 x_depth, i64 x_row, i64 x_column, i64 kernel_d, i64 kernel_h, i64 kernel_w, i64 stride_d,
                         i64 stride_h, i64 stride_w, i64 pad_d, i64 pad_h, i64 pad_w, i64 dilation_d, i64 dilation_h,
                         i64 dilation_w) {
    __shared__ GroupScratch<1> scratch;
    const i64 out_channel = blockIdx.x, k0 = static_cast<i64>(blockIdx.z) * kTaps;
    i64 d = blockIdx.y;
    const i64 h = split_off(d, kernel_h);
    const i64 volume = out_depth * out_height * out_width;
    const T* const from = x + quotient(out_channel, multiple) * x_channel;
    const T* const incoming = dy + out_channel * volume;
    float sums[kTaps], all = 0.0f;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) sums[k] = 0.0f;
    for (i64 e = threadIdx.x; e < batch * volume; e += kDepthwiseThreads) {
        i64 at = e;
        const i64 place = split_off(at, volume);
        const float g = element_at(incoming, at * channels * multiple * volume + place);
        all += g;
        i64 rest = place;
        const i64 column = split_off(rest, out_width), row = split_off(rest, out_height);
        const i64 z = rest * stride_d - pad_d + d * dilation_d, v = row * stride_h - pad_h + h * dilation_h;
        if (z < 0 || z >= depth || v < 0 || v >= height) continue;
        const T* const line = from + at * x_batch + z * x_depth + v * x_row;
        const i64 left = column * stride_w - pad_w + k0 * dilation_w;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
            const i64 u = left + k * dilation_w;
            if (k0 + k < kernel_w && u >= 0 && u < width) sums[k] = fmaf(g, element_at(line, u * x_column), sums[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
        const float sum = block_reduce<Sum>(sums[k], scratch);
        if (threadIdx.x == 0 && dw != nullptr && k0 + k < kernel_w)
            put(dw + ((out_channel * kernel_d + d) * kernel_h + h) * kernel_w + k0 + k, sum);
        __syncthreads();
    }
    if (db == nullptr || blockIdx.y != 0 || blockIdx.z != 0) return;
    const float sum = block_reduce<Sum>(all, scratch);
    if (threadIdx.x == 0) put(db + out_channel, sum);
}

}  // namespace rtk
