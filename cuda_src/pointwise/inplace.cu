// x = beta * x + alpha * y in fp32, rounded once, in place. Matrices with row strides; a dense tensor is one row.
#include "common/row_slices.cuh"

namespace rtk {

template <int VEC, typename T, typename U>
RTK_DEVICE void add_slices(T* x, const U* y, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 threads_per_row,
                         i64 slices_per_row, float alpha, float beta) {
    const RowSlices<VEC, VEC == 1 ? 8 : 2> slices(rows, cols, threads_per_row, slices_per_row);
    const bool reads = beta != 0.0f || y == nullptr;
    for (i64 run = slices.first; run < slices.count; run += slices.step) {
        Raw<sizeof(T) * VEC> old[slices.kInFlight];
        Raw<sizeof(U) * VEC> more[slices.kInFlight];
        const i64 row = slices.row(run), first = slices.column(run, row), left = cols - first;
        const int step = slices.pitch();
        T* to = x + row * x_stride + first;
        const U* from = y + row * y_stride + first;
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            clear(old[i]);
            clear(more[i]);
            if (i * step < left && reads) old[i] = load_raw<T, VEC>(to + i * step);
            if (i * step < left && y != nullptr) more[i] = load_raw<U, VEC>(from + i * step);
        }
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            if (i * step < left) {
                float a[VEC], b[VEC];
                unpack<T, VEC>(old[i], a);
                unpack<U, VEC>(more[i], b);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    // Without one of the terms: adding zero could change the sign of a zero.
                    const float scaled = beta * a[k];
                    a[k] = y == nullptr ? scaled : reads ? fmaf(alpha, b[k], scaled) : alpha * b[k];
                }
                store<T, VEC>(to + i * step, a);
            }
        }
    }
}

// Without `y`, x is only scaled; without beta it is not read. `factor`, if not null, is a number that multiplies beta.
// `aligned16`: rows allow 16-byte accesses of the wider type.
template <typename T, typename U>
__global__ void __launch_bounds__(128)
    add_in_place(T* x, const U* y, const float* factor, i64 rows, i64 cols, i64 x_stride, i64 y_stride,
                 i64 threads_per_row, i64 slices_per_row, i64 aligned16, double alpha, double beta) {
    constexpr int N = 16 / (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));
    float times = static_cast<float>(beta);
    if (factor != nullptr) times *= *factor;
    if (aligned16 != 0) {
        add_slices<N>(x, y, rows, cols, x_stride, y_stride, threads_per_row, slices_per_row, static_cast<float>(alpha), times);
    } else {
        add_slices<1>(x, y, rows, cols, x_stride, y_stride, threads_per_row, slices_per_row, static_cast<float>(alpha), times);
    }
}

}  // namespace rtk
