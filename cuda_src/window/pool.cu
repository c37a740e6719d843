// Average and maximum pooling over the last two dimensions of (planes, height, width), any strides. fp32, rounded once;
// results are dense. A thread owns kDown elements of a column of the result, neighbours have neighbouring columns.
// Windows of KERNEL x KERNEL elements (0: of any size, or with columns that are not adjacent) are loaded without a
// branch, all of a thread's before the first is used: elements outside of the input are neutral, and a warp with all
// windows inside skips the bounds checks. Grid: threads / 256.
#include "window/places.cuh"

namespace rtk {

inline constexpr int kDown = 2;
inline constexpr u32 kWholeWarp = 0xffffffffu;

// A window's rows and columns, and the part of them that is inside the input.
struct Window {
    int top, left, row0, row1, column0, column1;
    RTK_DEVICE Window(int row, int column, int height, int width, int extent_h, int extent_w, int stride_h, int stride_w,
                      int pad_h, int pad_w) {
        top = row * stride_h - pad_h, left = column * stride_w - pad_w;
        row0 = max(top, 0), row1 = min(top + extent_h, height);
        column0 = max(left, 0), column1 = min(left + extent_w, width);
    }
};

// Shared by the kernels below: the column of a thread, and its elements.
struct PoolColumn {
    i64 plane;
    int row, column, rows;
    RTK_DEVICE PoolColumn(i64 at, i64 groups, i64 group_divisor, i64 out_height, i64 out_width, i64 width_divisor) {
        const PoolPlace place(at, groups, out_width, group_divisor, width_divisor);
        plane = place.plane, row = place.row * kDown, column = place.column;
        rows = min(kDown, static_cast<int>(out_height) - row);
    }

    // Calls work(k) for each element; LOOPS: without unrolling, because the work is already a loop.
    template <bool LOOPS, typename Work>
    RTK_DEVICE void each_row(const Work& work) const {
        if constexpr (LOOPS) {
#pragma unroll 1
            for (int k = 0; k < rows; ++k) work(k);
        } else {
#pragma unroll
            for (int k = 0; k < kDown; ++k)
                if (k < rows) work(k);
        }
    }
};

// All elements of the windows of a thread from the corner (top, left), possibly outside of the plane x; `none` for
// those that do not exist. Whole warps call this, including threads that are not `active`.
template <typename T, int KERNEL>
RTK_DEVICE void load_windows(bool active, const T* x, i64 x_row, int top, int left, int stride_h, int height, int width,
                             u32 none, Raw<sizeof(T)> (&raw)[kDown][KERNEL][KERNEL]) {
    const bool within = top >= 0 && left >= 0 && top + (kDown - 1) * stride_h + KERNEL <= height && left + KERNEL <= width;
    if (__all_sync(kWholeWarp, within && active)) {
#pragma unroll
        for (int k = 0; k < kDown; ++k) {
            const T* p = x + (top + k * stride_h) * x_row + left;
#pragma unroll
            for (int i = 0; i < KERNEL; ++i, p += x_row)
#pragma unroll
                for (int j = 0; j < KERNEL; ++j) raw[k][i][j] = ptx::ld_keep<sizeof(T)>(p + j);
        }
        return;
    }
    bool inside[KERNEL];
#pragma unroll
    for (int j = 0; j < KERNEL; ++j) inside[j] = active && static_cast<u32>(left + j) < static_cast<u32>(width);
#pragma unroll
    for (int k = 0; k < kDown; ++k) {
        const T* p = x + (top + k * stride_h) * x_row + left;
#pragma unroll
        for (int i = 0; i < KERNEL; ++i, p += x_row) {
            const bool exists = static_cast<u32>(top + k * stride_h + i) < static_cast<u32>(height);
#pragma unroll
            for (int j = 0; j < KERNEL; ++j) {
                raw[k][i][j].w[0] = none;
                ptx::ld_keep_if<sizeof(T)>(exists && inside[j], raw[k][i][j].w[0], p + j);
            }
        }
    }
}

// -inf
template <typename T>
RTK_DEVICE u32 lowest_bits() {
    return sizeof(T) == 4 ? 0xff800000u : is_same<T, bf16>::value ? 0xff80u : 0xfc00u;
}

// The sum of a window over `divisor`, or, for 0, over the number of elements: of the padded input, or of the input.
template <typename T, int KERNEL>
__global__ void __launch_bounds__(kPoolThreads)
    avg_pool(const T* x, T* y, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_width, i64 x_batch,
             i64 x_channel, i64 x_row, i64 x_column, i64 groups, i64 group_divisor, i64 width_divisor, i64 kernel_h,
             i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h, i64 pad_w, i64 count_padding, i64 divisor) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    const bool active = at < count;
    if (KERNEL == 0 && !active) return;
    const int h = static_cast<int>(height), w = static_cast<int>(width), window_h = static_cast<int>(kernel_h);
    const int window_w = static_cast<int>(kernel_w), step_h = static_cast<int>(stride_h), step_w = static_cast<int>(stride_w);
    const int border_h = static_cast<int>(pad_h), border_w = static_cast<int>(pad_w);
    const PoolColumn own(at, groups, group_divisor, out_height, out_width, width_divisor);
    x += plane_offset(own.plane, channels, x_batch, x_channel);
    y += (own.plane * out_height + own.row) * out_width + own.column;
    Raw<sizeof(T)> raw[kDown][KERNEL > 0 ? KERNEL : 1][KERNEL > 0 ? KERNEL : 1];
    if constexpr (KERNEL > 0)
        load_windows<T, KERNEL>(active, x, x_row, own.row * step_h - border_h, own.column * step_w - border_w, step_h, h, w,
                                0u, raw);
    if (!active) return;
    own.each_row<KERNEL == 0>([&](int k) {
        const Window window(own.row + k, own.column, h, w, window_h, window_w, step_h, step_w, border_h, border_w);
        float sum = 0.0f;
        if constexpr (KERNEL > 0) {
#pragma unroll
            for (int i = 0; i < KERNEL * KERNEL; ++i) {
                float v[1];
                unpack<T, 1>(raw[k][i / KERNEL][i % KERNEL], v);
                sum += v[0];
            }
        } else {
            const T* line = x + window.row0 * x_row + window.column0 * x_column;
            for (int row = window.row0; row < window.row1; ++row, line += x_row) {
                const T* p = line;
                for (int column = window.column0; column < window.column1; ++column, p += x_column) sum += element(p, 0);
            }
        }
        const int padded_h = min(window.top + window_h, h + border_h) - window.top;
        const int padded_w = min(window.left + window_w, w + border_w) - window.left;
        const float inside = static_cast<float>(max(window.row1 - window.row0, 0)) *
                             static_cast<float>(max(window.column1 - window.column0, 0));
        const float padded = static_cast<float>(padded_h) * static_cast<float>(padded_w);
        const float elements = divisor != 0 ? static_cast<float>(divisor) : count_padding ? padded : inside;
        const float averaged[1] = {inside == 0.0f ? 0.0f : average(sum, elements)};
        store<T, 1>(y + k * out_width, averaged);
    });
}

// The largest of a window, NaN if there is one, and its position in the plane; the first one in case of ties. KERNEL
// implies dilations of 1.
template <typename T, int KERNEL>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool(const T* x, T* y, i64* indices, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_width,
             i64 x_batch, i64 x_channel, i64 x_row, i64 x_column, i64 groups, i64 group_divisor, i64 width_divisor,
             i64 kernel_h, i64 kernel_w, i64 stride_h, i64 stride_w, i64 pad_h, i64 pad_w, i64 dilation_h, i64 dilation_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    const bool active = at < count;
    if (KERNEL == 0 && !active) return;
    const int h = static_cast<int>(height), w = static_cast<int>(width);
    const int step_h = static_cast<int>(stride_h), step_w = static_cast<int>(stride_w);
    const int border_h = static_cast<int>(pad_h), border_w = static_cast<int>(pad_w);
    const PoolColumn own(at, groups, group_divisor, out_height, out_width, width_divisor);
    x += plane_offset(own.plane, channels, x_batch, x_channel);
    const i64 first = (own.plane * out_height + own.row) * out_width + own.column;
    y += first;
    indices += first;
    const int apart_h = static_cast<int>(dilation_h), apart_w = static_cast<int>(dilation_w);
    Raw<sizeof(T)> raw[kDown][KERNEL > 0 ? KERNEL : 1][KERNEL > 0 ? KERNEL : 1];
    if constexpr (KERNEL > 0)
        load_windows<T, KERNEL>(active, x, x_row, own.row * step_h - border_h, own.column * step_w - border_w, step_h, h, w,
                                lowest_bits<T>(), raw);
    if (!active) return;
    own.each_row<KERNEL == 0>([&](int k) {
        const Window window(own.row + k, own.column, h, w, (static_cast<int>(kernel_h) - 1) * apart_h + 1,
                            (static_cast<int>(kernel_w) - 1) * apart_w + 1, step_h, step_w, border_h, border_w);
        float best[1] = {__uint_as_float(0xff800000u)};
        int best_row, best_column;
        if constexpr (KERNEL > 0) {
            best_row = window.row0, best_column = window.column0;
#pragma unroll
            for (int i = 0; i < KERNEL; ++i)
#pragma unroll
                for (int j = 0; j < KERNEL; ++j) {
                    float v[1];
                    unpack<T, 1>(raw[k][i][j], v);
                    if (v[0] > best[0] || v[0] != v[0]) best[0] = v[0], best_row = window.top + i, best_column = window.left + j;
                }
        } else {
            int row = window.top, left = window.left;
            while (row < 0) row += apart_h;
            while (left < 0) left += apart_w;
            best_row = row, best_column = left;
            const T* line = x + row * x_row + left * x_column;
            for (; row < window.row1; row += apart_h, line += apart_h * x_row) {
                const T* p = line;
                for (int column = left; column < window.column1; column += apart_w, p += apart_w * x_column) {
                    const float v = element(p, 0);
                    if (v > best[0] || v != v) best[0] = v, best_row = row, best_column = column;
                }
            }
        }
        store<T, 1>(y + k * out_width, best);
        indices[k * out_width] = static_cast<i64>(best_row) * w + best_column;
    });
}

}  // namespace rtk
