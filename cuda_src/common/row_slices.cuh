// How elementwise kernels cut a matrix: each group of threads takes runs of kInFlight accesses per thread, so that
// several loads are under way before the first is used. A run never leaves its row; a dense tensor is one row.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <int VEC, int IN_FLIGHT = VEC == 1 ? 8 : 4>
struct Runs {
    static constexpr int kInFlight = IN_FLIGHT;
    i64 rows, cols;
    i64 per_row, count;  // runs
    i64 first, step;     // of this thread's group
    int threads, thread;

    // `slices_per_row` comes from the host: a 64-bit division costs as much as the rest of a short run.
    RTK_DEVICE Runs(i64 rows_, i64 cols_, i64 threads_per_row, i64 slices_per_row)
        : rows(rows_), cols(cols_), per_row(slices_per_row) {
        const RowGroup group(threads_per_row);
        threads = group.threads;
        thread = group.thread;
        count = rows * per_row;
        first = static_cast<i64>(blockIdx.x) * group.count + group.index;
        step = static_cast<i64>(gridDim.x) * group.count;
    }

    RTK_DEVICE i64 row(i64 run) const { return rows == 1 ? 0 : run / per_row; }

    // First column of this thread in a run of `row`; its accesses are `pitch()` columns apart, those from cols on are
    // not there.
    RTK_DEVICE i64 column(i64 run, i64 row) const {
        return ((run - row * per_row) * (kInFlight * threads) + thread) * VEC;
    }
    RTK_DEVICE int pitch() const { return threads * VEC; }

    // Column of access i, and loads by it: 2 % faster than by a pitch in dequantize_fp8, slower elsewhere.
    RTK_DEVICE i64 column(i64 run, i64 row, int i) const {
        return (((run - row * per_row) * kInFlight + i) * threads + thread) * VEC;
    }
    template <typename T>
    RTK_DEVICE void load_each(i64 run, const T* x, i64 stride, Raw<sizeof(T) * VEC> (&raw)[kInFlight]) const {
        const i64 r = row(run);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const i64 c = column(run, r, i);
            clear(raw[i]);
            if (c < cols) raw[i] = load_raw<T, VEC>(x + r * stride + c);
        }
    }

    template <typename T>
    RTK_DEVICE void load(i64 run, const T* x, i64 stride, Raw<sizeof(T) * VEC> (&raw)[kInFlight]) const {
        const i64 r = row(run), first = column(run, r), left = cols - first;
        x += r * stride + first;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            clear(raw[i]);
            if (i * pitch() < left) raw[i] = load_raw<T, VEC>(x + i * pitch());
        }
    }
};

}  // namespace rtk
