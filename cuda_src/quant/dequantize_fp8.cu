// Dequantises fp8: q * scale in fp32, rounded once to the output type. Outputs are dense.
#include "quant/fp8_transposed.cuh"
#include "common/row_slices.cuh"

namespace rtk {

// The scale of an element is scale[(row >> row_shift) * scale_row + (column >> 7) * scale_column]; strides of 0 make it
// one per tensor, or per row.
template <typename T, typename F8, int VEC>
__global__ void __launch_bounds__(256, 4)
    dequantize_fp8(const F8* q, const float* scale, T* y, i64 rows, i64 cols, i64 q_stride, i64 threads_per_row,
                   i64 slices_per_row, i64 row_shift, i64 scale_row, i64 scale_column) {
    const RowSlices<VEC, 2> slices(rows, cols, threads_per_row, slices_per_row);
    for (i64 run = slices.first; run < slices.count; run += slices.step) {
        Raw<VEC> raw[slices.kInFlight];
        slices.load_each(run, q, q_stride, raw);
        const i64 row = slices.row(run);
        const float* row_scale = scale + (row >> row_shift) * scale_row;
        float factor[slices.kInFlight];
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            const i64 column = slices.column(run, row, i);
            float one[1] = {0.0f};
            if (column < cols) load_keep<float, 1>(row_scale + (column >> 7) * scale_column, one);
            factor[i] = one[0];
        }
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            const i64 column = slices.column(run, row, i);
            if (column < cols) {
                float v[VEC];
                unpack<F8, VEC>(raw[i], v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[k] *= factor[i];
                store<T, VEC>(y + row * cols + column, v);
            }
        }
    }
}

// Transposed codes q [cols, rows], scale [ceil(rows/128), cols], back to y [rows, cols].
template <typename T, typename F8>
__global__ void __launch_bounds__(128)
    dequantize_fp8_group_t(const F8* q, const float* scale, T* y, i64 rows, i64 cols, i64 q_stride, i64 column_tiles,
                           i64 whole_codes, i64 whole_output) {
    constexpr int N = 16 / sizeof(T);
    const TransposedTile<N> tile(rows, cols, column_tiles);
    Raw<16> codes[N];
    float factor[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const bool inside = i < tile.columns_here;
        codes[i] = load_part<F8, 16>(q + (tile.column + i) * q_stride + tile.row, inside ? tile.rows_here : 0,
                                     whole_codes != 0);
        float one[1] = {0.0f};
        if (inside) load_keep<float, 1>(scale + tile.tile_row * cols + tile.column + i, one);
        factor[i] = one[0];
    }
#pragma unroll
    for (int r = 0; r < kStripRows; r += 2) {
        float first_row[N], second_row[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            from_fp8x2<F8>((codes[i].w[r / 4] >> ((r & 2) * 8)) & 0xffffu, first_row[i], second_row[i]);
            first_row[i] *= factor[i];
            second_row[i] *= factor[i];
        }
        T* place = y + (tile.row + r) * cols + tile.column;
        if (r < tile.rows_here) store_part<T, N>(place, first_row, tile.columns_here, whole_output != 0);
        if (r + 1 < tile.rows_here) store_part<T, N>(place + cols, second_row, tile.columns_here, whole_output != 0);
    }
}

}  // namespace rtk
