// Gradients of pooling and nearest upsampling, over dense (planes, height, width). A thread owns one element of dx and
// adds up, in order, what comes from the windows that have it: no atomics. fp32, one rounding. Grid: elements of dx / 256.
#include "window/places.cuh"

namespace rtk {

// The windows [first, last] along one dimension that may have the element `at`.
struct Windows {
    i64 first, last;
    RTK_DEVICE Windows(i64 at, i64 extent, i64 stride, i64 pad, i64 count) {
        const i64 beyond = at + pad - extent;  // windows that begin here or before end before the element
        first = beyond < 0 ? 0 : quotient(beyond, stride) + 1;
        last = min(quotient(at + pad, stride), count - 1);
    }
};

// Elements of the padded input that a window has: a part of what the average is divided by.
RTK_DEVICE i64 counted(i64 window, i64 kernel, i64 stride, i64 pad, i64 size, i64 with_padding) {
    const i64 begin = window * stride - pad;
    return with_padding ? min(begin + kernel, size + pad) - begin : min(begin + kernel, size) - max(begin, 0ll);
}

template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool_bwd(const T* dy, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width, i64 kernel_h,
                 i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h, i64 pad_w, i64 count_padding, i64 divisor) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width);
    const Windows down(place.row, kernel_h, stride_h, pad_h, out_height);
    const Windows across(place.column, kernel_w, stride_w, pad_w, out_width);
    dy += place.plane * out_height * out_width;
    float sum = 0.0f;
    for (i64 row = down.first; row <= down.last; ++row) {
        const i64 rows = counted(row, kernel_h, stride_h, pad_h, height, count_padding);
        for (i64 column = across.first; column <= across.last; ++column) {
            const i64 columns = counted(column, kernel_w, stride_w, pad_w, width, count_padding);
            sum += element(dy, row * out_width + column) / static_cast<float>(divisor != 0 ? divisor : rows * columns);
        }
    }
    const float made[1] = {sum};
    store<T, 1>(dx + at, made);
}

template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_bwd(const T* dy, const i64* indices, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width,
                 i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h, i64 pad_w, i64 dilation_h,
                 i64 dilation_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width);
    const Windows down(place.row, (kernel_h - 1) * dilation_h + 1, stride_h, pad_h, out_height);
    const Windows across(place.column, (kernel_w - 1) * dilation_w + 1, stride_w, pad_w, out_width);
    const i64 base = place.plane * out_height * out_width, own = place.row * width + place.column;
    float sum = 0.0f;
    for (i64 row = down.first; row <= down.last; ++row) {
        for (i64 column = across.first; column <= across.last; ++column) {
            const i64 from = base + row * out_width + column;
            if (indices[from] == own) sum += element(dy, from);
        }
    }
    const float made[1] = {sum};
    store<T, 1>(dx + at, made);
}

// The elements [first, end) of the result whose nearest one is `at`.
struct Copies {
    i64 first, end;
    RTK_DEVICE Copies(i64 at, double scale, i64 size, i64 count) {
        first = max(static_cast<i64>(static_cast<double>(at) / scale) - 2, 0ll);  // rounded: look for it from before
        while (first < count && nearest(first, scale, size) < at) ++first;
        end = first;
        while (end < count && nearest(end, scale, size) == at) ++end;
    }
};

template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_nearest_bwd(const T* dy, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width, double scale_h,
                         double scale_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width);
    const Copies down(place.row, scale_h, height, out_height), across(place.column, scale_w, width, out_width);
    dy += place.plane * out_height * out_width;
    float sum = 0.0f;
    for (i64 row = down.first; row < down.end; ++row)
        for (i64 column = across.first; column < across.end; ++column) sum += element(dy, row * out_width + column);
    const float made[1] = {sum};
    store<T, 1>(dx + at, made);
}

}  // namespace rtk
