// Gradients of pooling, over dense (planes, height, width). A thread owns VEC neighbours in a row of dx, 16 bytes or an
// element, and sums, in order, the contributions of the windows that contain any of them: no atomics. fp32, rounded
// once. Grid: threads / 256.
#include "window/places.cuh"

namespace rtk {

// The windows [first, last] along one dimension that may contain elements from `at` to `at + more`.
struct Windows {
    int first, last;
    RTK_DEVICE Windows(int at, int more, i64 extent, i64 pad, i64 count, i64 stride_divisor) {
        const int place = at + static_cast<int>(pad);
        const int beyond = place - static_cast<int>(extent);  // windows from here on end before the element
        first = beyond < 0 ? 0 : static_cast<int>(divided(static_cast<u32>(beyond), stride_divisor)) + 1;
        last = min(static_cast<int>(divided(static_cast<u32>(place + more), stride_divisor)), static_cast<int>(count) - 1);
    }
};

// Number of elements of the padded input in a window along one dimension: a factor of the average's divisor.
RTK_DEVICE int counted(int begin, int kernel, int pad, int size, bool with_padding) {
    return with_padding ? min(begin + kernel, size + pad) - begin : min(begin + kernel, size) - max(begin, 0);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool_bwd(const T* dy, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width, i64 height_divisor,
                 i64 width_divisor, i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h, i64 pad_w,
                 i64 stride_h_divisor, i64 stride_w_divisor, i64 count_padding, i64 divisor) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width / VEC, height_divisor, width_divisor);
    const int left = place.column * VEC, h = static_cast<int>(height), w = static_cast<int>(width);
    const int window_h = static_cast<int>(kernel_h), window_w = static_cast<int>(kernel_w);
    const int border_h = static_cast<int>(pad_h), border_w = static_cast<int>(pad_w);
    const Windows down(place.row, 0, kernel_h, pad_h, out_height, stride_h_divisor);
    const Windows across(left, VEC - 1, kernel_w, pad_w, out_width, stride_w_divisor);
    dy += (place.plane * out_height + down.first) * out_width;
    float sum[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
    for (int row = down.first; row <= down.last; ++row, dy += out_width) {
        const int top = row * static_cast<int>(stride_h) - border_h;
        const float rows = static_cast<float>(counted(top, window_h, border_h, h, count_padding != 0));
        int begin = across.first * static_cast<int>(stride_w) - border_w;
#pragma unroll 4
        for (int column = across.first; column <= across.last; ++column, begin += static_cast<int>(stride_w)) {
            const float columns = static_cast<float>(counted(begin, window_w, border_w, w, count_padding != 0));
            const float v = average(element(dy, column), divisor != 0 ? static_cast<float>(divisor) : rows * columns);
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                sum[i] += static_cast<u32>(left + i - begin) < static_cast<u32>(window_w) ? v : 0.0f;
        }
    }
    store<T, VEC>(dx + at * VEC, sum);
}

// A window's index names the element it came from; nothing else is tested.
template <typename T, int VEC>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_bwd(const T* dy, const i64* indices, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width,
                 i64 height_divisor, i64 width_divisor, i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h,
                 i64 pad_w, i64 stride_h_divisor, i64 stride_w_divisor, i64 dilation_h, i64 dilation_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width / VEC, height_divisor, width_divisor);
    const int left = place.column * VEC;
    const Windows down(place.row, 0, (kernel_h - 1) * dilation_h + 1, pad_h, out_height, stride_h_divisor);
    const Windows across(left, VEC - 1, (kernel_w - 1) * dilation_w + 1, pad_w, out_width, stride_w_divisor);
    const i64 line = (place.plane * out_height + down.first) * out_width, own = place.row * width + left;
    dy += line;
    indices += line;
    float sum[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
    for (int row = down.first; row <= down.last; ++row, dy += out_width, indices += out_width) {
#pragma unroll 4
        for (int column = across.first; column <= across.last; ++column) {
            const i64 from = indices[column] - own;
            const float v = element(dy, column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] += from == i ? v : 0.0f;
        }
    }
    store<T, VEC>(dx + at * VEC, sum);
}

}  // namespace rtk
