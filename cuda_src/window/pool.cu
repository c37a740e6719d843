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
    const i64 top = place.row * stride_h - pad_h, left = place.column * stride_w - pad_w;
    const i64 padded_h = min(top + kernel_h, height + pad_h) - top, padded_w = min(left + kernel_w, width + pad_w) - left;
    const i64 row0 = max(top, 0ll), row1 = min(top + kernel_h, height);
    const i64 column0 = max(left, 0ll), column1 = min(left + kernel_w, width);
    x += plane_offset(place.plane, channels, x_batch, x_channel);
    float sum = 0.0f;
    for (i64 row = row0; row < row1; ++row)
        for (i64 column = column0; column < column1; ++column) sum += element(x, row * x_row + column * x_column);
    const i64 inside = max(row1 - row0, 0ll) * max(column1 - column0, 0ll);
    const i64 elements = divisor != 0 ? divisor : count_padding ? padded_h * padded_w : inside;
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
    i64 row = place.row * stride_h - pad_h, left = place.column * stride_w - pad_w;
    const i64 bottom = min(row + (kernel_h - 1) * dilation_h + 1, height);
    const i64 right = min(left + (kernel_w - 1) * dilation_w + 1, width);
    while (row < 0) row += dilation_h;
    while (left < 0) left += dilation_w;
    x += plane_offset(place.plane, channels, x_batch, x_channel);
    float best = __uint_as_float(0xff800000u);
    i64 index = row * width + left;
    for (; row < bottom; row += dilation_h) {
        for (i64 column = left; column < right; column += dilation_w) {
            const float v = element(x, row * x_row + column * x_column);
            if (v > best || v != v) best = v, index = row * width + column;
        }
    }
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
    const i64 row = nearest(place.row, scale_h, height);
    x += (plane_offset(place.plane, channels, x_batch, x_channel) + row * x_row) * BYTES;
    if (!vectors) {
        const i64 from = nearest(place.column, scale_w, width) * x_column;
        ptx::st<BYTES>(y + at * BYTES, ptx::ld_keep<BYTES>(x + from * BYTES));
        return;
    }
    Raw<16> made{};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const Raw<BYTES> one = ptx::ld_keep<BYTES>(x + nearest(place.column + i, scale_w, width) * x_column * BYTES);
        constexpr u32 kMask = BYTES == 4 ? 0xffffffffu : (1u << (8 * BYTES % 32)) - 1u;
        made.w[i * BYTES / 4] |= (one.w[0] & kMask) << (i * BYTES % 4 * 8);
    }
    ptx::st<16>(y + at * 16, made);
}

}  // namespace rtk
