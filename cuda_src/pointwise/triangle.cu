// Triangles: element (r, c) of each matrix where c - r >= diagonal (UPPER) or <= diagonal, else zero. Elements are
// moved as bits of type T. The output is dense; strides of the input are those of an element, of a row, of a matrix and
// of `inner` matrices. A thread owns N consecutive columns, or one. Grid: enough blocks for all of them.
#include "pointwise/element.cuh"

namespace rtk {

template <typename T, bool UPPER>
__global__ void __launch_bounds__(256)
    triangle(const T* x, T* y, i64 rows, i64 columns, i64 matrices, i64 inner, i64 outer_stride, i64 matrix_stride,
             i64 row_stride, i64 column_stride, i64 diagonal, i64 vectors) {
    constexpr int N = 16 / sizeof(T);
    const i64 per_row = vectors != 0 ? columns / N : columns;
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, count = matrices * rows * per_row;
    if (index >= count) return;
    // 64-bit divisions would take longer than the memory accesses.
    const bool small = count < (i64{1} << 31);
    const auto quotient = [&](i64 a, i64 b) -> i64 {
        return small ? static_cast<u32>(a) / static_cast<u32>(b) : a / b;
    };
    const i64 line = quotient(index, per_row), column = (index - line * per_row) * (vectors != 0 ? N : 1);
    i64 row = line;
    if (matrices > 1) {
        const i64 matrix = quotient(line, rows), outer = quotient(matrix, inner);
        row -= matrix * rows;
        x += outer * outer_stride + (matrix - outer * inner) * matrix_stride;
    }
    x += row * row_stride + column * column_stride;
    y += line * columns + column;
    const i64 edge = row + diagonal;  // the last column to keep below, the first one above
    if (vectors != 0) {
        Compute<T> value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = 0;
        if (UPPER ? column + N - 1 >= edge : column <= edge) load_elements<T, N>(x, value);
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (UPPER ? column + i < edge : column + i > edge) value[i] = 0;
        store_elements<T, N>(y, value);
    } else {
        Compute<T> value[1] = {0};
        if (UPPER ? column >= edge : column <= edge) load_elements<T, 1>(x, value);
        store_elements<T, 1>(y, value);
    }
}

}  // namespace rtk
