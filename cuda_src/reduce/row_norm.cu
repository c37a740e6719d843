// layer_norm with the statistics that aten keeps: y = (x - mean) * rstd * weight + bias over rows of `cols` elements, dense; mean and
// rstd in fp32. Without `mean` it is rms_norm: the mean is taken to be 0. A group of threads owns a row, which it reads two times: for the statistics (Chan's formula), and to write
// it; the second time it comes from L1 or L2. Parameters' gradients: a thread owns a column and a slice of the rows, and writes
// sums to `partial` [slices][2][cols], which a reduction adds up in order.
//
// Grid: rows / groups in a block, or columns / 256 * slices; block: 256. Arithmetic: fp32, one rounding.
#include "reduce/group_state.cuh"

namespace rtk {

template <typename T, int N>
RTK_DEVICE void parameter(const T* p, i64 at, float otherwise, float (&v)[N]) {
    if (p != nullptr) {
        load_keep<T, N>(p + at, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = otherwise;
    }
}

template <typename T, int N>
RTK_DEVICE void norm_row(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 row, i64 rows,
                         i64 cols, float eps, const RowGroup& group) {
    Moments::State s = Moments::identity();
    const bool there = row < rows;
    for (i64 at = group.thread * N; there && at < cols; at += group.threads * N) {
        float v[N];
        load_keep<T, N>(x + row * cols + at, v);
        Moments::absorb(s, v, 0, 0, Lift{0, 0.0f});
    }
    s = combined<Moments>(s, group.threads);
    if (!there) return;
    const bool centered = mean != nullptr;
    const float center = centered ? s.mean : 0.0f, moved = s.mean - center;
    const float inverse = rsqrtf(s.squares / static_cast<float>(cols) + moved * moved + eps);
    if (group.thread == 0) {
        if (centered) mean[row] = center;
        rstd[row] = inverse;
    }
    for (i64 at = group.thread * N; at < cols; at += group.threads * N) {
        float v[N], w[N], b[N];
        load_keep<T, N>(x + row * cols + at, v);
        parameter<T, N>(weight, at, 1.0f, w);
        parameter<T, N>(bias, at, 0.0f, b);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = (v[i] - center) * inverse * w[i] + b[i];
        store<T, N>(y + row * cols + at, v);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    row_norm_fwd(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 rows, i64 cols, double eps,
                 i64 threads_per_row, i64 aligned) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (aligned) {
        norm_row<T, 16 / sizeof(T)>(x, weight, bias, y, mean, rstd, row, rows, cols, static_cast<float>(eps), group);
    } else {
        norm_row<T, 1>(x, weight, bias, y, mean, rstd, row, rows, cols, static_cast<float>(eps), group);
    }
}

// dx = rstd * (g - mean(g) - z * mean(g * z)), g = dy * weight, z = (x - mean) * rstd; without `mean` also without mean(g).
template <typename T, int N>
RTK_DEVICE void norm_row_bwd(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx, i64 row,
                             i64 rows, i64 cols, const RowGroup& group) {
    PairSum::State s = PairSum::identity();
    const bool there = row < rows;
    const bool centered = mean != nullptr;
    const float center = there && centered ? mean[row] : 0.0f, inverse = there ? rstd[row] : 0.0f;
    for (i64 at = group.thread * N; there && at < cols; at += group.threads * N) {
        float g[N], v[N], w[N];
        load_keep<T, N>(dy + row * cols + at, g);
        load_keep<T, N>(x + row * cols + at, v);
        parameter<T, N>(weight, at, 1.0f, w);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float scaled = g[i] * w[i];
            s.a += scaled;
            s.b += scaled * ((v[i] - center) * inverse);
        }
    }
    s = combined<PairSum>(s, group.threads);
    if (!there) return;
    const float over = 1.0f / static_cast<float>(cols), first = centered ? s.a * over : 0.0f, second = s.b * over;
    for (i64 at = group.thread * N; at < cols; at += group.threads * N) {
        float g[N], v[N], w[N];
        load_keep<T, N>(dy + row * cols + at, g);
        load_keep<T, N>(x + row * cols + at, v);
        parameter<T, N>(weight, at, 1.0f, w);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] = inverse * (g[i] * w[i] - first - (v[i] - center) * inverse * second);
        store<T, N>(dx + row * cols + at, g);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    row_norm_bwd(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx, i64 rows, i64 cols,
                 i64 threads_per_row, i64 aligned) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (aligned) {
        norm_row_bwd<T, 16 / sizeof(T)>(dy, x, weight, mean, rstd, dx, row, rows, cols, group);
    } else {
        norm_row_bwd<T, 1>(dy, x, weight, mean, rstd, dx, row, rows, cols, group);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    row_norm_params(const T* dy, const T* x, const float* mean, const float* rstd, float* partial, i64 rows, i64 cols,
                    i64 per_slice) {
    const i64 tiles = ceil_div(cols, kReduceThreads), slice = blockIdx.x / tiles;
    const i64 column = (blockIdx.x - slice * tiles) * kReduceThreads + threadIdx.x;
    if (column >= cols) return;
    const i64 end = min((slice + 1) * per_slice, rows);
    float weights = 0.0f, biases = 0.0f;
#pragma unroll 4
    for (i64 row = slice * per_slice; row < end; ++row) {
        float g[1], v[1];
        load_keep<T, 1>(dy + row * cols + column, g);
        load_keep<T, 1>(x + row * cols + column, v);
        biases += g[0];
        weights += g[0] * ((v[0] - (mean == nullptr ? 0.0f : mean[row])) * rstd[row]);
    }
    partial[slice * 2 * cols + column] = weights;
    partial[(slice * 2 + 1) * cols + column] = biases;
}

}  // namespace rtk
