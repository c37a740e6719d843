// How elementwise kernels split a matrix: each group of threads takes slices of kInFlight accesses per thread, so that
// several loads are in flight before the first is used. A slice never leaves its row; a dense tensor is one row.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <int VEC, int IN_FLIGHT = VEC == 1 ? 8 : 4>
struct RowSlices {
    static constexpr int kInFlight = IN_FLIGHT;
    i64 rows, cols;
    i64 per_row, count;  // slices
    i64 first, step;     // of this thread's group
    int threads, thread;

    // `slices_per_row` comes from the host: a 64-bit division costs as much as the rest of a short slice.
    RTK_DEVICE RowSlices(i64 rows_, i64 cols_, i64 threads_per_row, i64 slices_per_row)
        : rows(rows_), cols(cols_), per_row(slices_per_row) {
        const RowGroup group(threads_per_row);
        threads = group.threads;
        thread = group.thread;
        count = rows * per_row;
        first = static_cast<i64>(blockIdx.x) * group.count + group.index;
        step = static_cast<i64>(gridDim.x) * group.count;
    }

    RTK_DEVICE i64 row(i64 slice) const { return rows == 1 ? 0 : slice / per_row; }

    // First column of this thread in a slice of `row`; its accesses are `pitch()` columns apart, and those from cols on
    // do not exist.
    RTK_DEVICE i64 column(i64 slice, i64 row) const {
        return ((slice - row * per_row) * (kInFlight * threads) + thread) * VEC;
    }
    RTK_DEVICE int pitch() const { return threads * VEC; }

    // Column of access i, and loads by column: faster than by a pitch in dequantize_fp8, slower elsewhere.
    RTK_DEVICE i64 column(i64 slice, i64 row, int i) const {
        return (((slice - row * per_row) * kInFlight + i) * threads + thread) * VEC;
    }
    template <typename T>
    RTK_DEVICE void load_each(i64 slice, const T* x, i64 stride, Raw<sizeof(T) * VEC> (&raw)[kInFlight]) const {
        const i64 r = row(slice);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const i64 c = column(slice, r, i);
            clear(raw[i]);
            if (c < cols) raw[i] = load_raw<T, VEC>(x + r * stride + c);
        }
    }

    template <typename T>
    RTK_DEVICE void load(i64 slice, const T* x, i64 stride, Raw<sizeof(T) * VEC> (&raw)[kInFlight]) const {
        const i64 r = row(slice), first = column(slice, r), left = cols - first;
        x += r * stride + first;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            clear(raw[i]);
            if (i * pitch() < left) raw[i] = load_raw<T, VEC>(x + i * pitch());
        }
    }
};

}  // namespace rtk
