// RMS normalisation over the last dimension:  y = h * rstd * (offset + weight),  rstd = 1/sqrt(mean(h^2) + eps),
// h = x, or the rounded sum x + residual, which is then an output too. fp32 arithmetic, one rounding at each store.
//
// Rows are worked on by groups of threads (RowGroup). Inputs have any row stride; outputs are dense.
#include "common/reduce.cuh"
#include "common/row_ring.cuh"
#include "ptx/pdl.cuh"

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

// x + residual as stored, rounded to T.
template <typename T, int N>
RTK_DEVICE Raw<sizeof(T) * N> add_rounded(const Raw<sizeof(T) * N>& x, const Raw<sizeof(T) * N>& residual) {
    float h[N], r[N];
    unpack<T, N>(x, h);
    unpack<T, N>(residual, r);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] += r[i];
    return pack<T, N>(h);
}

// h of N columns as stored.
template <typename T, int N, bool kResidual>
RTK_DEVICE Raw<sizeof(T) * N> load_h(const T* x, const T* residual) {
    if constexpr (kResidual) return add_rounded<T, N>(load_raw<T, N>(x), load_raw<T, N>(residual));
    return load_raw<T, N>(x);
}


template <typename T, typename W, int CHUNKS, bool DSUM, int DEPTH, int MAXT, int MINB>
__global__ void __launch_bounds__(MAXT, MINB)
    rms_bwd_reg(const T* dy, const T* h, const W* weight, const T* dsum, T* dh, float* partial, i64 rows, i64 cols,
                 i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    const float inverse = 1.0f / static_cast<float>(cols);
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const int end = static_cast<int>(cols);
    const i64 step = gridDim.x;
    Raw<16> dy_raw[DEPTH][CHUNKS], h_raw[DEPTH][CHUNKS];
    auto fetch = [&](i64 row, int d) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            dy_raw[d][c] = {}; h_raw[d][c] = {};
            if (row < rows && column + c * pitch < end) {
                dy_raw[d][c] = load_raw<T, VEC>(dy + row * dy_stride + column + c * pitch);
                h_raw[d][c] = load_raw<T, VEC>(h + row * h_stride + column + c * pitch);
            }
        }
    };
    i64 row = blockIdx.x;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) fetch(row + d * step, d);
    float gain[CHUNKS][VEC], dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) gain[c][i] = dweight[c][i] = 0.0f;
        if (column + c * pitch < end) load_gain<W, VEC>(weight, column + c * pitch, static_cast<float>(offset), gain[c]);
    }
    int phase = 0;
    while (row < rows) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (row < rows) {
            float g[CHUNKS][VEC], v[CHUNKS][VEC];
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                unpack<T, VEC>(dy_raw[d][c], g[c]);
                unpack<T, VEC>(h_raw[d][c], v[c]);
            }
            fetch(row + DEPTH * step, d);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    sums[0] += v[c][i] * v[c][i];
                    sums[1] += g[c][i] * gain[c][i] * v[c][i];
                }
            group_reduce<Sum, false>(sums, group, scratch, phase);
            phase ^= 1;
            const float rstd = rsqrtf(sums[0] * inverse + static_cast<float>(eps));
            const float mean = sums[1] * inverse * rstd;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float out[VEC];
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float n = v[c][i] * rstd;
                    dweight[c][i] += g[c][i] * n;
                    out[i] = (g[c][i] * gain[c][i] - n * mean) * rstd;
                }
                if (column + c * pitch < end) store<T, VEC>(dh + row * cols + column + c * pitch, out);
            }
            }
            row += step;
        }
    }
    ptx::launch_dependents();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (column + c * pitch < end) store<float, VEC>(partial + blockIdx.x * cols + column + c * pitch, dweight[c]);
}
}  // namespace rtk
