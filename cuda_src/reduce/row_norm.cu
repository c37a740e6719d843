// layer_norm with the statistics that aten keeps: y = (x - mean) * rstd * weight + bias over rows of `cols` elements,
// dense; mean and rstd in fp32. Without `mean` it is rms_norm: the mean is taken to be 0. A group of threads owns a row
// and reads it twice: for the statistics (Chan's formula), and to write it; the second time it comes from L1 or L2.
// Several loads are in flight per thread, because long rows are few and an SM works on one of them.
//
// Gradients of parameters: a block owns a tile of the columns and a slice of the rows; `across` threads are along the
// columns, N of them each, the others of the block share the rows. With several slices their sums go to `partial`
// [slices][2][cols], and the last block of a tile (`tickets`) adds them in order.
//
// Grid: rows / groups in a block, or tiles * slices; block: 256. Arithmetic: fp32, rounded once.
#include "reduce/group_state.cuh"
#include "reduce/reduce.cuh"
#include "reduce/row_batches.cuh"

namespace rtk {

// A vector of a parameter, or a constant in its place.
template <typename T, int N>
RTK_DEVICE void parameter(bool there, const Raw<sizeof(T) * N>& raw, float otherwise, float (&v)[N]) {
    unpack<T, N>(raw, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = there ? v[i] : otherwise;
}

template <typename T, int N>
RTK_DEVICE void norm_row(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 row, i64 rows,
                         i64 cols, float eps, const RowGroup& group) {
    Moments::State s = Moments::identity();
    const bool there = row < rows, centered = mean != nullptr;
    x += row * cols, y += row * cols;
    each_batch<N, RTK_NORM_READS>(there ? cols : 0, group, [&](i64 at, i64 step, auto number) {
        constexpr int kMany = decltype(number)::value;
        Raw<sizeof(T) * N> raw[kMany];
        load_all<T, N>(x + at, step, raw);
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            float v[N];
            unpack<T, N>(raw[k], v);
            if (centered) {
                Moments::absorb(s, v, 0, 0, Lift{0, 0.0f});
            } else {
#pragma unroll
                for (int i = 0; i < N; ++i) s.squares += v[i] * v[i];
            }
        }
    });
    if (!centered) s.count = 1.0f;  // with means of 0, combining adds the sums of squares
    s = combined<Moments>(s, group.threads);
    if (!there) return;
    const float center = centered ? s.mean : 0.0f;
    // Where threads have an element each, that of an infinity and of others combine to an infinite variance: it is NaN.
    const float inverse = rsqrtf(s.squares / static_cast<float>(cols) + eps) + center * 0.0f;
    if (group.thread == 0) {
        if (centered) mean[row] = center;
        rstd[row] = inverse;
    }
    each_batch<N, RTK_NORM_WRITES>(cols, group, [&](i64 at, i64 step, auto number) {
        constexpr int kMany = decltype(number)::value;
        Raw<sizeof(T) * N> raw[kMany], weights[kMany], biases[kMany];
        load_all<T, N>(x + at, step, raw);
        if (weight != nullptr) load_all<T, N>(weight + at, step, weights);
        if (bias != nullptr) load_all<T, N>(bias + at, step, biases);
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            float v[N], w[N], b[N];
            unpack<T, N>(raw[k], v);
            parameter<T, N>(weight != nullptr, weights[k], 1.0f, w);
            parameter<T, N>(bias != nullptr, biases[k], -0.0f, b);  // keeps the sign of zeros
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = (v[i] - center) * inverse * w[i] + b[i];
            store<T, N>(y + at + k * step, v);
        }
    });
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

// dx = rstd / n * (n * g - z * sum(g * z) - sum(g)), g = dy * weight, z = (x - mean) * rstd; without `mean` also without sum(g).
template <typename T, int N>
RTK_DEVICE void norm_row_bwd(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx, i64 row,
                             i64 rows, i64 cols, const RowGroup& group) {
    PairSum::State s = PairSum::identity();
    const bool there = row < rows;
    const bool centered = mean != nullptr;
    const float center = there && centered ? mean[row] : 0.0f, inverse = there ? rstd[row] : 0.0f;
    dy += row * cols, x += row * cols, dx += row * cols;
    // Calls f(place, g = dy * weight, z) for the vectors of a thread.
    const auto each = [&](i64 end, auto&& f) {
        each_batch<N, RTK_NORM_WRITES>(end, group, [&](i64 at, i64 step, auto number) {
            constexpr int kMany = decltype(number)::value;
            Raw<sizeof(T) * N> grads[kMany], raw[kMany], weights[kMany];
            load_all<T, N>(dy + at, step, grads);
            load_all<T, N>(x + at, step, raw);
            if (weight != nullptr) load_all<T, N>(weight + at, step, weights);
#pragma unroll
            for (int k = 0; k < kMany; ++k) {
                float g[N], z[N], w[N];
                unpack<T, N>(grads[k], g);
                unpack<T, N>(raw[k], z);
                parameter<T, N>(weight != nullptr, weights[k], 1.0f, w);
#pragma unroll
                for (int i = 0; i < N; ++i) g[i] *= w[i], z[i] = (z[i] - center) * inverse;
                f(at + k * step, g, z);
            }
        });
    };
    each(there ? cols : 0, [&](i64, float (&g)[N], float (&z)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s.a += g[i];
            s.b += g[i] * z[i];
        }
    });
    s = combined<PairSum>(s, group.threads);
    if (!there) return;
    const float many = static_cast<float>(cols), factor = 1.0f / many * inverse, first = centered ? s.a : 0.0f;
    each(cols, [&](i64 at, float (&g)[N], float (&z)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] = factor * (many * g[i] - z[i] * s.b - first);  // in torch's order
        store<T, N>(dx + at, g);
    });
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads, 3)
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

// The sums of the threads that share a column, in order, for the first of them.
template <int N>
RTK_DEVICE void add_lanes(float (&sums)[N], int across) {
    __shared__ float shared[N][kReduceThreads];
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) shared[i][thread] = sums[i];
    __syncthreads();
    if (thread >= across) return;
    for (int other = thread + across; other < kReduceThreads; other += across) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += shared[i][other];
    }
}

template <typename T, int N>
RTK_DEVICE void norm_params(const T* dy, const T* x, const float* mean, const float* rstd, T* dw, T* db, float* partial,
                            u32* tickets, i64 rows, i64 cols, i64 slices, i64 per_slice, int across) {
    constexpr int kRows = 4;
    const int lane = static_cast<int>(threadIdx.x) / across, lanes = kReduceThreads / across;
    const i64 tiles = ceil_div(cols, across * N), slice = blockIdx.x / tiles, tile = blockIdx.x - slice * tiles;
    const i64 column = (tile * across + (static_cast<int>(threadIdx.x) - lane * across)) * N;
    const i64 end = column < cols ? min((slice + 1) * per_slice, rows) : 0;
    float sums[2 * N];  // of weights, of biases
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    for (i64 first = slice * per_slice + lane; first < end; first += lanes * kRows) {
        Raw<sizeof(T) * N> grads[kRows], raw[kRows];
        float center[kRows], inverse[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const i64 row = first + k * lanes;
            if (row >= end) continue;
            grads[k] = ptx::ld_keep<sizeof(T) * N>(dy + row * cols + column);
            raw[k] = ptx::ld_keep<sizeof(T) * N>(x + row * cols + column);
            center[k] = mean == nullptr ? 0.0f : mean[row], inverse[k] = rstd[row];
        }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            if (first + k * lanes >= end) continue;
            float g[N], v[N];
            unpack<T, N>(grads[k], g);
            unpack<T, N>(raw[k], v);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sums[i] += g[i] * (v[i] - center[k]) * inverse[k];
                sums[N + i] += g[i];
            }
        }
    }
    add_lanes(sums, across);
    const bool writes = lane == 0 && column < cols;
    if (slices > 1) {
        float* parts = partial + column;
        if (writes) {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) parts[(slice * 2 + i / N) * cols + i % N] = sums[i];
        }
        if (!is_last_block(tickets + tile, slices)) return;
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        for (i64 other = lane; column < cols && other < slices; other += lanes) {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) sums[i] += parts[(other * 2 + i / N) * cols + i % N];
        }
        add_lanes(sums, across);
    }
    if (!writes) return;
    float some[N];
#pragma unroll
    for (int i = 0; i < N; ++i) some[i] = sums[i];
    store<T, N>(dw + column, some);
    if (db == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) some[i] = sums[N + i];
    store<T, N>(db + column, some);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads, 3)
    row_norm_params(const T* dy, const T* x, const float* mean, const float* rstd, T* dw, T* db, float* partial, u32* tickets,
                    i64 rows, i64 cols, i64 slices, i64 per_slice, i64 across, i64 aligned) {
    if (aligned) {
        norm_params<T, 16 / sizeof(T)>(dy, x, mean, rstd, dw, db, partial, tickets, rows, cols, slices, per_slice,
                                       static_cast<int>(across));
    } else {
        norm_params<T, 1>(dy, x, mean, rstd, dw, db, partial, tickets, rows, cols, slices, per_slice,
                          static_cast<int>(across));
    }
}

}  // namespace rtk
