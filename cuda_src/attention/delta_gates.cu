// Gates of the gated delta rule: log decays from raw g [rows][columns], a head's `inner` columns side by side, and strengths
// from beta [rows][heads],
//     decay = -exp(A_log) softplus(g + dt_bias),  or  bound sigmoid(exp(A_log) (g + dt_bias)),
//     strength = factor sigmoid(beta),  or  factor beta,
// in fp32, and their gradients. Blocks have a slice of the rows; a thread owns the same columns of every `lanes`-th of them,
// N of g or one of beta, and loads four rows of g at a time, in the backward two. Grid: tiles of columns of g, then those of
// beta; slices. Sums over rows are written for each slice and added by delta_gates_sum, all in the order of rows.
#include "attention/gates.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <typename T, int N>
__global__ void __launch_bounds__(256)
    delta_gates_fwd(const T* g, const void* beta, const void* a_log, const void* dt_bias, float* decay, float* strength,
                    i64 rows, i64 columns, i64 heads, i64 inner, i64 g_stride, i64 beta_stride, i64 tiles, i64 slice,
                    i64 flags, double bound, double factor) {
    constexpr int kInFlight = 4;
    const i64 tile = blockIdx.x, from = static_cast<i64>(blockIdx.y) * slice, end = from + slice < rows ? from + slice : rows;
    if (tile >= tiles) {
        const GateLanes own(heads, tile - tiles, 1);
        if (!own.inside) return;
        const int type = gate_type(flags, kGateBeta);
        for (i64 row = from + own.lane; row < end; row += own.lanes) {
            const float x = load_any(beta, type, row * beta_stride + own.column);
            strength[row * heads + own.column] = strength_of(x, flags & 1, static_cast<float>(factor));
        }
        return;
    }
    const GateLanes own(columns, tile, N);
    if (!own.inside) return;
    const GateFactors<N> factors(a_log, gate_type(flags, kGateRate), dt_bias, gate_type(flags, kGateBias), own.column, inner);
    for (i64 row = from + own.lane; row < end; row += kInFlight * own.lanes) {
        Raw<N * sizeof(T)> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            clear(raw[k]);
            const i64 at = row + k * own.lanes;
            if (at < end) raw[k] = load_raw<T, N>(g + at * g_stride + own.column);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = row + k * own.lanes;
            if (at >= end) break;
            float x[N];
            unpack<T, N>(raw[k], x);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = log_decay(x[i] + factors.bias[i], factors.rate[i], static_cast<float>(bound));
            store<float, N>(decay + at * columns + own.column, x);
        }
    }
}

// `partial` [2][slices][columns]: sums of gradients of dt_bias, and for each column of those of A_log; dg, dbeta and
// partial may be null.
template <typename T, int N>
__global__ void __launch_bounds__(256, 4)
    delta_gates_bwd(const float* ddecay, const float* dstrength, const T* g, const void* beta, const void* a_log,
                    const void* dt_bias, T* dg, void* dbeta, float* partial, i64 rows, i64 columns, i64 heads, i64 inner,
                    i64 g_stride, i64 beta_stride, i64 tiles, i64 slice, i64 flags, double bound, double factor) {
    __shared__ __align__(16) float shared[2][256 * N];
    constexpr int kInFlight = 2;
    const i64 tile = blockIdx.x, from = static_cast<i64>(blockIdx.y) * slice, end = from + slice < rows ? from + slice : rows;
    if (tile >= tiles) {
        const GateLanes own(heads, tile - tiles, 1);
        if (!own.inside) return;
        const int type = gate_type(flags, kGateBeta);
        for (i64 row = from + own.lane; row < end; row += own.lanes) {
            const float by = dstrength[row * heads + own.column] * static_cast<float>(factor);
            const float slope = flags & 1 ? sigmoid_slope(load_any(beta, type, row * beta_stride + own.column)) : 1.0f;
            store_any(dbeta, type, row * heads + own.column, by == 0.0f ? 0.0f : by * slope);
        }
        return;
    }
    const GateLanes own(columns, tile, N);
    float sums[2][N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[0][i] = sums[1][i] = 0.0f;
    if (own.inside) {
        const GateFactors<N> factors(a_log, gate_type(flags, kGateRate), dt_bias, gate_type(flags, kGateBias), own.column, inner);
        for (i64 row = from + own.lane; row < end; row += kInFlight * own.lanes) {
            Raw<N * sizeof(T)> raw[kInFlight];
            Raw<N * sizeof(float)> incoming[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                clear(raw[k]), clear(incoming[k]);
                const i64 at = row + k * own.lanes;
                if (at < end) raw[k] = load_raw<T, N>(g + at * g_stride + own.column);
                if (at < end) incoming[k] = load_raw<float, N>(ddecay + at * columns + own.column);
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const i64 at = row + k * own.lanes;
                if (at >= end) break;
                float x[N], by[N];
                unpack<T, N>(raw[k], x), unpack<float, N>(incoming[k], by);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const DecaySlopes slopes =
                        decay_slopes(by[i], x[i] + factors.bias[i], factors.rate[i], static_cast<float>(bound));
                    x[i] = slopes.x, sums[0][i] += slopes.x, sums[1][i] += slopes.log_rate;
                }
                if (dg != nullptr) store<T, N>(dg + at * columns + own.column, x);
            }
        }
    }
    if (partial == nullptr) return;
    const int across = own.width * N, at = static_cast<int>(threadIdx.x) * N;
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < N; ++i) shared[which][at + i] = sums[which][i];
    __syncthreads();
    const i64 column0 = tile * across;
    for (int c = static_cast<int>(threadIdx.x); c < 2 * across; c += static_cast<int>(blockDim.x)) {
        const int which = c >= across, column = which ? c - across : c;
        if (column0 + column >= columns) continue;
        float total = 0.0f;
        for (int lane = 0; lane < own.lanes; ++lane) total += shared[which][lane * across + column];
        partial[(which * static_cast<i64>(gridDim.y) + blockIdx.y) * columns + column0 + column] = total;
    }
}

// The sums of all slices for one head per block, 16 slices at a time: those of dt_bias, and over a
// head's columns of A_log. drate and dbias have the types of A_log and dt_bias, and may be null.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    delta_gates_sum(const float* partial, void* drate, void* dbias, i64 slices, i64 columns, i64 inner, i64 flags) {
    __shared__ float shared[2][THREADS];
    __shared__ GroupScratch<1> scratch;
    const int thread = static_cast<int>(threadIdx.x), width = static_cast<int>(inner);
    const int lanes = min(THREADS / width, 16), lane = thread / width;
    const i64 column = static_cast<i64>(blockIdx.x) * inner + thread % width;
    float sums[2] = {0.0f, 0.0f};
    if (lane >= lanes) slices = 0;
#pragma unroll 8
    for (i64 row = lane; row < slices; row += lanes)
        sums[0] += partial[row * columns + column], sums[1] += partial[(slices + row) * columns + column];
    shared[0][thread] = sums[0], shared[1][thread] = sums[1];
    __syncthreads();
    float total[2] = {0.0f, 0.0f};
    if (thread < width)
        for (int l = 0; l < lanes; ++l) total[0] += shared[0][l * width + thread], total[1] += shared[1][l * width + thread];
    if (thread < width && dbias != nullptr) store_any(dbias, gate_type(flags, kGateBias), column, total[0]);
    const float all = block_reduce<Sum>(total[1], scratch);
    if (thread == 0 && drate != nullptr) store_any(drate, gate_type(flags, kGateRate), blockIdx.x, all);
}

}  // namespace rtk
