// Gradients of pooling and nearest upsampling, over dense (planes, height, width). A thread owns one element of dx and
// adds up, in order, what comes from the windows that have it: no atomics. fp32, one rounding. Grid: elements of dx / 256.
#include "window/places.cuh"

namespace rtk {

// The windows [first, last] along one dimension that may have the element `at`.
struct Windows {
    int first, last;
    RTK_DEVICE Windows(int at, i64 extent, i64 stride, i64 pad, i64 count) {
        const u32 step = static_cast<u32>(stride), place = static_cast<u32>(at + static_cast<int>(pad));
        const int beyond = static_cast<int>(place) - static_cast<int>(extent);  // windows from here on end before the element
        first = beyond < 0 ? 0 : static_cast<int>(static_cast<u32>(beyond) / step) + 1;
        last = min(static_cast<int>(place / step), static_cast<int>(count) - 1);
    }
};

// Elements of the padded input that a window has: a part of what the average is divided by.
RTK_DEVICE int counted(int window, int kernel, int stride, int pad, int size, bool with_padding) {
    const int begin = window * stride - pad;
    return with_padding ? min(begin + kernel, size + pad) - begin : min(begin + kernel, size) - max(begin, 0);
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
    for (int row = down.first; row <= down.last; ++row) {
        const int rows = counted(row, static_cast<int>(kernel_h), static_cast<int>(stride_h), static_cast<int>(pad_h),
                                 static_cast<int>(height), count_padding != 0);
        const T* line = dy + row * out_width;
        for (int column = across.first; column <= across.last; ++column) {
            const int columns = counted(column, static_cast<int>(kernel_w), static_cast<int>(stride_w), static_cast<int>(pad_w),
                                        static_cast<int>(width), count_padding != 0);
            const float inside = static_cast<float>(rows) * static_cast<float>(columns);
            sum += element(line, column) / (divisor != 0 ? static_cast<float>(divisor) : inside);
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
    for (int row = down.first; row <= down.last; ++row) {
        const i64 line = base + row * out_width;
        for (int column = across.first; column <= across.last; ++column)
            if (indices[line + column] == own) sum += element(dy, line + column);
    }
    const float made[1] = {sum};
    store<T, 1>(dx + at, made);
}

// The elements [first, end) of the result whose nearest one is `at`.
struct Copies {
    int first, end;
    RTK_DEVICE Copies(int at, float scale, int size, int count) {
        const float near = static_cast<float>(at) / scale;  // to 2^-23 of itself: look for it from before
        first = max(static_cast<int>(near - near * 1e-6f) - 2, 0);
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
    const Copies down(place.row, static_cast<float>(scale_h), static_cast<int>(height), static_cast<int>(out_height));
    const Copies across(place.column, static_cast<float>(scale_w), static_cast<int>(width), static_cast<int>(out_width));
    dy += place.plane * out_height * out_width;
    float sum = 0.0f;
    for (int row = down.first; row < down.end; ++row) {
        const T* line = dy + row * out_width;
        for (int column = across.first; column < across.end; ++column) sum += element(line, column);
    }
    const float made[1] = {sum};
    store<T, 1>(dx + at, made);
}

}  // namespace rtk
