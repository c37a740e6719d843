// Windows over the last two dimensions of (planes, height, width), any strides: average and maximum pooling, and nearest upsampling.
// A thread owns one element of the result, which is dense; neighbours read neighbouring windows. fp32, one rounding.
// Grid: elements / 256.
#include "window/places.cuh"

namespace rtk {

// The sum of a window over `divisor`, or, for 0, over the elements that count: of the padded input, or of the input.
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool(const T* x, T* y, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_width, i64 x_batch,
             i64 x_channel, i64 x_row, i64 x_column, i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h,
             i64 pad_w, i64 count_padding, i64 divisor) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, out_height, out_width);
    const int h = static_cast<int>(height), w = static_cast<int>(width), window_h = static_cast<int>(kernel_h);
    const int window_w = static_cast<int>(kernel_w), border_h = static_cast<int>(pad_h), border_w = static_cast<int>(pad_w);
    const int top = place.row * static_cast<int>(stride_h) - border_h;
    const int left = place.column * static_cast<int>(stride_w) - border_w;
    const int padded_h = min(top + window_h, h + border_h) - top, padded_w = min(left + window_w, w + border_w) - left;
    const int row0 = max(top, 0), row1 = min(top + window_h, h), column0 = max(left, 0), column1 = min(left + window_w, w);
    x += plane_offset(place.plane, channels, x_batch, x_channel) + row0 * x_row + column0 * x_column;
    float sum = 0.0f;
    for (int row = row0; row < row1; ++row, x += x_row) {
        const T* p = x;
        for (int column = column0; column < column1; ++column, p += x_column) sum += element(p, 0);
    }
    const i64 inside = static_cast<i64>(max(row1 - row0, 0)) * max(column1 - column0, 0);
    const i64 elements = divisor != 0 ? divisor : count_padding ? static_cast<i64>(padded_h) * padded_w : inside;
    const float made[1] = {inside == 0 ? 0.0f : sum / static_cast<float>(elements)};
    store<T, 1>(y + at, made);
}

// The largest of a window, NaN if there is one, and its place in the plane; of equal ones the first.
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool(const T* x, T* y, i64* indices, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_width,
             i64 x_batch, i64 x_channel, i64 x_row, i64 x_column, i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w,
             i64 pad_h, i64 pad_w, i64 dilation_h, i64 dilation_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, out_height, out_width);
    const int apart_h = static_cast<int>(dilation_h), apart_w = static_cast<int>(dilation_w), w = static_cast<int>(width);
    int row = place.row * static_cast<int>(stride_h) - static_cast<int>(pad_h);
    int left = place.column * static_cast<int>(stride_w) - static_cast<int>(pad_w);
    const int bottom = min(row + (static_cast<int>(kernel_h) - 1) * apart_h + 1, static_cast<int>(height));
    const int right = min(left + (static_cast<int>(kernel_w) - 1) * apart_w + 1, w);
    while (row < 0) row += apart_h;
    while (left < 0) left += apart_w;
    x += plane_offset(place.plane, channels, x_batch, x_channel) + row * x_row + left * x_column;
    const i64 next_row = apart_h * x_row, next_column = apart_w * x_column;
    float best = __uint_as_float(0xff800000u);
    int best_row = row, best_column = left;
    for (; row < bottom; row += apart_h, x += next_row) {
        const T* p = x;
        for (int column = left; column < right; column += apart_w, p += next_column) {
            const float v = element(p, 0);
            if (v > best || v != v) best = v, best_row = row, best_column = column;
        }
    }
    const i64 index = static_cast<i64>(best_row) * w + best_column;
    const float made[1] = {best};
    store<T, 1>(y + at, made);
    indices[at] = index;
}

// The nearest element above and to the left, at `scale` elements of x for each of the result. Moves bytes; with `vectors` a thread owns
// 16 of them, side by side in a row of the result, and `count` are those.
template <int BYTES>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_nearest(const u8* x, u8* y, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_width,
                     i64 x_batch, i64 x_channel, i64 x_row, i64 x_column, double scale_h, double scale_w, i64 vectors) {
    constexpr int kEach = 16 / BYTES;
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(vectors ? at * kEach : at, out_height, out_width);
    const float across = static_cast<float>(scale_w);
    const int w = static_cast<int>(width), row = nearest(place.row, static_cast<float>(scale_h), static_cast<int>(height));
    x += (plane_offset(place.plane, channels, x_batch, x_channel) + row * x_row) * BYTES;
    if (!vectors) {
        const i64 from = nearest(place.column, across, w) * x_column;
        ptx::st<BYTES>(y + at * BYTES, ptx::ld_keep<BYTES>(x + from * BYTES));
        return;
    }
    Raw<16> made{};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const Raw<BYTES> one = ptx::ld_keep<BYTES>(x + nearest(place.column + i, across, w) * x_column * BYTES);
        constexpr u32 kMask = BYTES == 4 ? 0xffffffffu : (1u << (8 * BYTES % 32)) - 1u;
        made.w[i * BYTES / 4] |= (one.w[0] & kMask) << (i * BYTES % 4 * 8);
    }
    ptx::st<16>(y + at * 16, made);
}

}  // namespace rtk
