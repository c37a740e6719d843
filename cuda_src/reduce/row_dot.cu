// out[r] = sum over c of x[r, c] * y[r, c], in fp32, and its gradients. A group of threads per row; matrices with row
// strides.
#include "common/reduce.cuh"
#include "common/row_slices.cuh"

namespace rtk {

template <typename T, int VEC>
RTK_DEVICE float dot(const Raw<sizeof(T) * VEC>& a, const Raw<sizeof(T) * VEC>& b, float total = 0.0f) {
    float v[VEC], w[VEC];
    unpack<T, VEC>(a, v);
    unpack<T, VEC>(b, w);
#pragma unroll
    for (int k = 0; k < VEC; ++k) total = fmaf(v[k], w[k], total);
    return total;
}

// A thread's part of one row, with kInFlight accesses of VEC elements of x and of y at a time.
template <int VEC, int kInFlight, typename T>
RTK_DEVICE float partial_dot(const T* x, const T* y, int cols, const RowGroup& group, u64 policy) {
    const int step = group.threads * VEC;
    x += group.thread * VEC;
    y += group.thread * VEC;
    float total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int left = cols - group.thread * VEC; left > 0; left -= kInFlight * step) {
        Raw<sizeof(T) * VEC> a[kInFlight];
        Raw<sizeof(T) * VEC> b[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            clear(a[i]);
            clear(b[i]);
            if (i * step < left) {
                a[i] = load_raw<T, VEC>(x + i * step, policy);
                b[i] = load_raw<T, VEC>(y + i * step, policy);
            }
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) total[i % 2] = dot<T, VEC>(a[i], b[i], total[i % 2]);
        x += kInFlight * step;
        y += kInFlight * step;
    }
    return total[0] + total[1];
}

// Grid: rows / groups per block. `evict_first`: L2 should evict rows first. `aligned16`: 0 if rows do not allow 16-byte
// accesses, 1 if one access per thread covers a row, else 2.
template <typename T>
__global__ void __launch_bounds__(512)
    row_dot_fwd(const T* x, const T* y, T* out, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 threads_per_row,
                i64 aligned16, i64 evict_first) {
    constexpr int N = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    const u64 policy = ptx::l2_policy(evict_first != 0);
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const T* a = x + row * x_stride;
    const T* b = y + row * y_stride;
    const float part = aligned16 == 0   ? partial_dot<1, 8>(a, b, end, group, policy)
                       : aligned16 == 1 ? partial_dot<N, 1>(a, b, end, group, policy)
                                   : partial_dot<N, 2>(a, b, end, group, policy);
    const float total[1] = {group_reduce<Sum, false>(part, group, scratch, 0)};
    if (row < rows && group.thread == 0) store<T, 1>(out + row, total);
}

template <int VEC, typename T>
RTK_DEVICE void scale_slices(const T* g, const T* x, T* out, i64 rows, i64 cols, i64 x_stride, i64 threads_per_row,
                           i64 slices_per_row) {
    const RowSlices<VEC> slices(rows, cols, threads_per_row, slices_per_row);
    for (i64 run = slices.first; run < slices.count; run += slices.step) {
        Raw<sizeof(T) * VEC> raw[slices.kInFlight];
        slices.load(run, x, x_stride, raw);
        const i64 row = slices.row(run), first = slices.column(run, row), left = cols - first;
        float factor[1];
        load_keep<T, 1>(g + row, factor);
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            if (i * slices.pitch() < left) {
                float v[VEC];
                unpack<T, VEC>(raw[i], v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[k] *= factor[0];
                store<T, VEC>(out + row * cols + first + i * slices.pitch(), v);
            }
        }
    }
}

// dx = g y and dy = g x, each row times its number; a null output is skipped.
template <typename T>
__global__ void __launch_bounds__(256)
    row_dot_bwd(const T* g, const T* x, const T* y, T* dx, T* dy, i64 rows, i64 cols, i64 x_stride, i64 y_stride,
                i64 threads_per_row, i64 slices_per_row, i64 aligned16) {
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const T* from = which == 0 ? y : x;
        T* to = which == 0 ? dx : dy;
        const i64 stride = which == 0 ? y_stride : x_stride;
        if (to == nullptr) continue;
        if (aligned16 != 0) {
            scale_slices<16 / sizeof(T)>(g, from, to, rows, cols, stride, threads_per_row, slices_per_row);
        } else {
            scale_slices<1>(g, from, to, rows, cols, stride, threads_per_row, slices_per_row);
        }
    }
}

}  // namespace rtk
