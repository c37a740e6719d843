// RMS normalisation over the last dimension:  y = h * rstd * (offset + weight),  rstd = 1/sqrt(mean(h^2) + eps),
// h = x, or the rounded sum x + residual, which is then an output too. fp32 arithmetic, one rounding at each store.
//
// Rows are worked on by groups of threads (RowGroup). Inputs have any row stride; outputs are dense.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

// (offset + weight) of N columns, or ones without a weight.
template <typename W, int N>
RTK_DEVICE void load_gain(const W* weight, i64 column, float offset, float (&gain)[N]) {
    if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < N; ++i) gain[i] = 1.0f;
        return;
    }
    load_keep<W, N>(weight + column, gain);
#pragma unroll
    for (int i = 0; i < N; ++i) gain[i] += offset;
}

// h of N columns as stored: x, or x + residual rounded to T.
template <typename T, int N, bool kResidual>
RTK_DEVICE Raw<sizeof(T) * N> load_h(const T* x, const T* residual) {
    const auto x_raw = load_raw<T, N>(x);
    if constexpr (!kResidual) return x_raw;
    float h[N], r[N];
    load_stream<T, N>(residual, r);
    unpack<T, N>(x_raw, h);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] += r[i];
    return pack<T, N>(h);
}

// Forward with the row in registers. A thread owns vectors thread, thread + threads, ... (CHUNKS of them) of its row,
// so cols <= CHUNKS * VEC * threads_per_row. Grid: any; blocks stride over the rows.
template <typename T, typename W, int VEC, int CHUNKS, bool RESIDUAL>
__global__ void __launch_bounds__(512)
    rms_norm_fwd(const T* x, const T* residual, const W* weight, T* y, T* sum, i64 rows, i64 cols, i64 x_stride,
                 i64 residual_stride, i64 threads_per_row, double eps, double offset) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        Raw<sizeof(T) * VEC> raw[CHUNKS];
        float square[1] = {0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = static_cast<i64>(c * group.threads + group.thread) * VEC;
            raw[c] = {};
            if (row < rows && column < cols)
                raw[c] = load_h<T, VEC, RESIDUAL>(x + row * x_stride + column, residual + row * residual_stride + column);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float h[VEC];
            unpack<T, VEC>(raw[c], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square[0] += h[i] * h[i];
        }
        group_reduce<Sum, false>(square, group, scratch, phase);
        const float rstd = rsqrtf(square[0] / static_cast<float>(cols) + static_cast<float>(eps));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = static_cast<i64>(c * group.threads + group.thread) * VEC;
            if (row < rows && column < cols) {
                if constexpr (RESIDUAL) ptx::st<sizeof(T) * VEC>(sum + row * cols + column, raw[c]);
                float h[VEC], gain[VEC];
                unpack<T, VEC>(raw[c], h);
                load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
                for (int i = 0; i < VEC; ++i) h[i] *= rstd * gain[i];
                store<T, VEC>(y + row * cols + column, h);
            }
        }
    }
}

// Forward for rows that do not fit in registers or whose addresses allow only narrow accesses: reads the row twice.
template <typename T, typename W, int VEC, bool RESIDUAL>
__global__ void __launch_bounds__(1024)
    rms_norm_fwd_long(const T* x, const T* residual, const W* weight, T* y, T* sum, i64 rows, i64 cols, i64 x_stride,
                      i64 residual_stride, i64 threads_per_row, double eps, double offset) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const T* x_row = x + row * x_stride;
        const T* residual_row = residual + row * residual_stride;
        float square[1] = {0.0f};
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float h[VEC];
            unpack<T, VEC>(load_h<T, VEC, RESIDUAL>(x_row + column, residual_row + column), h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square[0] += h[i] * h[i];
        }
        group_reduce<Sum, false>(square, group, scratch, phase);
        const float rstd = rsqrtf(square[0] / static_cast<float>(cols) + static_cast<float>(eps));
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            const auto raw = load_h<T, VEC, RESIDUAL>(x_row + column, residual_row + column);
            if constexpr (RESIDUAL) ptx::st<sizeof(T) * VEC>(sum + row * cols + column, raw);
            float h[VEC], gain[VEC];
            unpack<T, VEC>(raw, h);
            load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] *= rstd * gain[i];
            store<T, VEC>(y + row * cols + column, h);
        }
    }
}

// Backward:  dh = rstd * g - h * rstd^3 * mean(g * h) + dsum,  g = dy * gain;  dweight = sum over rows of dy * h * rstd.
// rstd is recomputed: h is read anyway, and the two row sums share one reduction.
//
// Persistent grid. Each thread keeps STAGES rows of its own columns in flight with cp.async; the ring slots are
// private to the thread, so no barrier guards them. Weight gradients are summed in registers over the rows of a
// group, over the groups of the block in shared memory, and written as one fp32 row per block (`partial`, [grid, cols];
// null when not wanted) for column_sum to add up: the order is fixed by the grid, never by timing.
template <typename T, typename W, int VEC, int CHUNKS, bool DSUM, int STAGES>
__global__ void __launch_bounds__(1024, 1)
    rms_norm_bwd(const T* dy, const T* h, const W* weight, const T* dsum, T* dh, float* partial, i64 rows, i64 cols,
                 i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps, double offset) {
    static_assert(VEC * sizeof(T) == 16, "the ring is made of 16-byte copies");
    constexpr int kInputs = DSUM ? 3 : 2;
    extern __shared__ __align__(16) u8 ring[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    const i64 step = static_cast<i64>(gridDim.x) * group.count;

    auto slot = [&](int stage, int input, int chunk) {
        const int position = (stage * kInputs + input) * CHUNKS + chunk;
        return ring + (static_cast<i64>(position) * blockDim.x + threadIdx.x) * 16;
    };
    auto column_of = [&](int chunk) { return static_cast<i64>(chunk * group.threads + group.thread) * VEC; };
    auto fetch = [&](i64 row, int stage) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = column_of(c);
            if (row < rows && column < cols) {
                ptx::cp_async_16(slot(stage, 0, c), dy + row * dy_stride + column);
                ptx::cp_async_16(slot(stage, 1, c), h + row * h_stride + column);
                if constexpr (DSUM) ptx::cp_async_16(slot(stage, 2, c), dsum + row * dsum_stride + column);
            }
        }
        ptx::cp_async_commit();
    };
    auto read = [&](int stage, int input, int chunk, float(&f)[VEC]) {
        unpack<T, VEC>(*reinterpret_cast<const Raw<16>*>(slot(stage, input, chunk)), f);
    };

    float dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = 0.0f;

    const i64 first = static_cast<i64>(blockIdx.x) * group.count;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(first + group.index + s * step, s);

    int stage = 0, phase = 0;
    for (i64 base = first; base < rows; base += step, phase ^= 1) {
        const i64 row = base + group.index;
        fetch(row + (STAGES - 1) * step, stage == 0 ? STAGES - 1 : stage - 1);
        ptx::cp_async_wait<STAGES - 1>();
        float sums[2] = {0.0f, 0.0f};  // h^2, g * h
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = column_of(c);
            if (row < rows && column < cols) {
                float g[VEC], v[VEC], gain[VEC];
                read(stage, 0, c, g);
                read(stage, 1, c, v);
                load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    sums[0] += v[i] * v[i];
                    sums[1] += g[i] * gain[i] * v[i];
                }
            }
        }
        group_reduce<Sum, true>(sums, group, scratch, phase);
        const float rstd = rsqrtf(sums[0] / static_cast<float>(cols) + static_cast<float>(eps));
        const float pull = sums[1] / static_cast<float>(cols) * rstd * rstd * rstd;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = column_of(c);
            if (row < rows && column < cols) {
                float g[VEC], v[VEC], gain[VEC];
                read(stage, 0, c, g);
                read(stage, 1, c, v);
                load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    dweight[c][i] += g[i] * (v[i] * rstd);
                    v[i] = g[i] * gain[i] * rstd - v[i] * pull;
                }
                if constexpr (DSUM) {
                    float d[VEC];
                    read(stage, 2, c, d);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) v[i] += d[i];
                }
                store<T, VEC>(dh + row * cols + column, v);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    if (partial == nullptr) return;
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* rows_of_groups = reinterpret_cast<float*>(ring);  // [groups, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const i64 column = column_of(c);
        if (column < cols) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) rows_of_groups[group.index * cols + column + i] = dweight[c][i];
        }
    }
    __syncthreads();
    for (i64 column = threadIdx.x; column < cols; column += blockDim.x) {
        float total = 0.0f;
        for (int g = 0; g < group.count; ++g) total += rows_of_groups[g * cols + column];
        partial[blockIdx.x * cols + column] = total;
    }
}

// Backward for rows that do not fit in registers or allow only narrow accesses: reads the row twice and leaves rstd
// of every row (fp32, [rows]; null when not wanted) for rms_norm_bwd_weight.
template <typename T, typename W, int VEC, bool DSUM>
__global__ void __launch_bounds__(1024)
    rms_norm_bwd_long(const T* dy, const T* h, const W* weight, const T* dsum, T* dh, float* rstd_out, i64 rows,
                      i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps,
                      double offset) {
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        float sums[2] = {0.0f, 0.0f};
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float g[VEC], v[VEC], gain[VEC];
            load_stream<T, VEC>(dy + row * dy_stride + column, g);
            load_stream<T, VEC>(h + row * h_stride + column, v);
            load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                sums[0] += v[i] * v[i];
                sums[1] += g[i] * gain[i] * v[i];
            }
        }
        group_reduce<Sum, false>(sums, group, scratch, phase);
        const float rstd = rsqrtf(sums[0] / static_cast<float>(cols) + static_cast<float>(eps));
        const float pull = sums[1] / static_cast<float>(cols) * rstd * rstd * rstd;
        if (rstd_out != nullptr && row < rows && group.thread == 0) rstd_out[row] = rstd;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float g[VEC], v[VEC], gain[VEC];
            load_stream<T, VEC>(dy + row * dy_stride + column, g);
            load_stream<T, VEC>(h + row * h_stride + column, v);
            load_gain<W, VEC>(weight, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = g[i] * gain[i] * rstd - v[i] * pull;
            if constexpr (DSUM) {
                float d[VEC];
                load_stream<T, VEC>(dsum + row * dsum_stride + column, d);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[i] += d[i];
            }
            store<T, VEC>(dh + row * cols + column, v);
        }
    }
}

// Partial weight gradients for the long rows: block (x, y) sums dy * h * rstd over every gridDim.y-th row for the
// blockDim.x * VEC columns it owns, into row y of `partial` [gridDim.y, cols].
template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    rms_norm_bwd_weight(const T* dy, const T* h, const float* rstd, float* partial, i64 rows, i64 cols, i64 dy_stride,
                        i64 h_stride) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (column >= cols) return;
    float total[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) total[i] = 0.0f;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float g[VEC], v[VEC];
        load_stream<T, VEC>(dy + row * dy_stride + column, g);
        load_stream<T, VEC>(h + row * h_stride + column, v);
        const float scale = rstd[row];
#pragma unroll
        for (int i = 0; i < VEC; ++i) total[i] += g[i] * (v[i] * scale);
    }
    store<float, VEC>(partial + blockIdx.y * cols + column, total);
}

}  // namespace rtk
