// w = v * g / norm over rows of `cols` elements, dense, norm the square root of the row's sum of squares, kept in fp32;
// and the gradients dg = t / norm, dv = g * (dw / norm - v * t / norm^3), t the row's sum of dw * v. A group of threads
// owns a row and reads it twice, the second time from L1 or L2. Grid: rows / groups in a block; block: 256. Arithmetic:
// fp32, rounded once.
#include "reduce/group_state.cuh"
#include "reduce/row_batches.cuh"

namespace rtk {

template <typename T>
RTK_DEVICE float row_scale(const T* g, i64 row) {
    float v[1];
    load_keep<T, 1>(g + row, v);
    return v[0];
}

template <typename T, int N>
RTK_DEVICE void weight_row(const T* v, const T* g, T* w, float* norms, i64 row, i64 rows, i64 cols, const RowGroup& group) {
    PairSum::State s = PairSum::identity();
    const bool there = row < rows;
    v += row * cols, w += row * cols;
    each_batch<N, RTK_NORM_READS>(there ? cols : 0, group, [&](i64 at, i64 step, auto number) {
        constexpr int kMany = decltype(number)::value;
        Raw<sizeof(T) * N> raw[kMany];
        load_all<T, N>(v + at, step, raw);
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            float x[N];
            unpack<T, N>(raw[k], x);
#pragma unroll
            for (int i = 0; i < N; ++i) s.a += x[i] * x[i];
        }
    });
    s = combined<PairSum>(s, group.threads);
    if (!there) return;
    const float norm = sqrtf(s.a), scale = row_scale(g, row) / norm;
    if (group.thread == 0) norms[row] = norm;
    each_batch<N, RTK_NORM_READS>(cols, group, [&](i64 at, i64 step, auto number) {
        constexpr int kMany = decltype(number)::value;
        Raw<sizeof(T) * N> raw[kMany];
        load_all<T, N>(v + at, step, raw);
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            float x[N];
            unpack<T, N>(raw[k], x);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] *= scale;
            store<T, N>(w + at + k * step, x);
        }
    });
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    weight_norm_fwd(const T* v, const T* g, T* w, float* norms, i64 rows, i64 cols, i64 threads_per_row, i64 aligned) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (aligned) {
        weight_row<T, 16 / sizeof(T)>(v, g, w, norms, row, rows, cols, group);
    } else {
        weight_row<T, 1>(v, g, w, norms, row, rows, cols, group);
    }
}

template <typename T, int N>
RTK_DEVICE void weight_row_bwd(const T* dw, const T* v, const T* g, const float* norms, T* dv, T* dg, i64 row, i64 rows,
                               i64 cols, const RowGroup& group) {
    PairSum::State s = PairSum::identity();
    const bool there = row < rows;
    dw += row * cols, v += row * cols, dv += row * cols;
    // Calls f(place, dw, v) for the vectors of a thread.
    const auto each = [&](i64 end, auto&& f) {
        each_batch<N, RTK_NORM_WRITES>(end, group, [&](i64 at, i64 step, auto number) {
            constexpr int kMany = decltype(number)::value;
            Raw<sizeof(T) * N> grads[kMany], raw[kMany];
            load_all<T, N>(dw + at, step, grads);
            load_all<T, N>(v + at, step, raw);
#pragma unroll
            for (int k = 0; k < kMany; ++k) {
                float d[N], x[N];
                unpack<T, N>(grads[k], d);
                unpack<T, N>(raw[k], x);
                f(at + k * step, d, x);
            }
        });
    };
    each(there ? cols : 0, [&](i64, float (&d)[N], float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) s.a += d[i] * x[i];
    });
    s = combined<PairSum>(s, group.threads);
    if (!there) return;
    const float inverse = 1.0f / norms[row], scale = row_scale(g, row) * inverse, along = s.a * inverse * inverse;
    if (group.thread == 0) {
        const float gradient[1] = {s.a * inverse};
        store<T, 1>(dg + row, gradient);
    }
    each(cols, [&](i64 at, float (&d)[N], float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] = scale * (d[i] - x[i] * along);
        store<T, N>(dv + at, d);
    });
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    weight_norm_bwd(const T* dw, const T* v, const T* g, const float* norms, T* dv, T* dg, i64 rows, i64 cols,
                    i64 threads_per_row, i64 aligned) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (aligned) {
        weight_row_bwd<T, 16 / sizeof(T)>(dw, v, g, norms, dv, dg, row, rows, cols, group);
    } else {
        weight_row_bwd<T, 1>(dw, v, g, norms, dv, dg, row, rows, cols, group);
    }
}

}  // namespace rtk
