// softmax and log_softmax, and their gradients, over the middle dimension of a dense (outer, n, inner): neighbours in
// memory are different rows. A block owns 32 threads * N neighbouring columns of one outer index; its eight warps take
// every eighth element along n, and their states are combined in shared memory. Everything is read twice: for the
// state, and to write. A column of only -inf is NaN, as in torch. Grid: outer * ceil(inner / (32 * N)); block: 256.
// Arithmetic: fp32, rounded once.
#include "reduce/group_state.cuh"

namespace rtk {

inline constexpr int kColumnWarps = kReduceThreads / kWarp;

// The largest element so far, and the sum of exponentials relative to it.
struct SoftmaxState {
    float top, sum;
    RTK_DEVICE static float base(float top) { return top == __uint_as_float(0xff800000u) ? 0.0f : top; }
    RTK_DEVICE void absorb(float v) {
        if (v > top) {
            sum = sum * expf(top - v) + 1.0f;
            top = v;
        } else {
            sum += expf(v - base(top));
        }
    }
    RTK_DEVICE void absorb(const SoftmaxState& other) {
        const float larger = fmaxf(top, other.top), zero = base(larger);
        sum = sum * expf(top - zero) + other.sum * expf(other.top - zero);
        top = larger;
    }
};

template <int N>
struct ColumnBlock {
    i64 first, step;  // offset of the first element of this thread's columns, and stride along n
    int lane, warp;
    bool there;
    RTK_DEVICE ColumnBlock(i64 n, i64 inner) {
        const i64 tiles = ceil_div(inner, kWarp * N), outer = blockIdx.x / tiles;
        lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
        const i64 column = (blockIdx.x - outer * tiles) * kWarp * N + lane * N;
        first = outer * n * inner + column, step = inner;
        there = column < inner;
    }
};

template <typename T, int N>
RTK_DEVICE void softmax_column(const T* x, T* y, i64 n, i64 inner, i64 log) {
    __shared__ SoftmaxState parts[kColumnWarps][kWarp * N];
    const ColumnBlock<N> block(n, inner);
    SoftmaxState s[N];
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = {__uint_as_float(0xff800000u), 0.0f};
    for (i64 k = block.warp; block.there && k < n; k += kColumnWarps) {
        float v[N];
        load_keep<T, N>(x + block.first + k * block.step, v);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i].absorb(v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) parts[block.warp][block.lane * N + i] = s[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[i] = parts[0][block.lane * N + i];
        for (int warp = 1; warp < kColumnWarps; ++warp) s[i].absorb(parts[warp][block.lane * N + i]);
        s[i].top = SoftmaxState::base(s[i].top);
        s[i].sum = log ? logf(s[i].sum) : 1.0f / s[i].sum;
    }
    for (i64 k = block.warp; block.there && k < n; k += kColumnWarps) {
        float v[N];
        load_keep<T, N>(x + block.first + k * block.step, v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = log ? v[i] - s[i].top - s[i].sum : expf(v[i] - s[i].top) * s[i].sum;
        store<T, N>(y + block.first + k * block.step, v);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    softmax_columns_fwd(const T* x, T* y, i64 n, i64 inner, i64 log, i64 vectors) {
    if (vectors) {
        softmax_column<T, 4>(x, y, n, inner, log);
    } else {
        softmax_column<T, 1>(x, y, n, inner, log);
    }
}

// dx = y * dy - y * sum(dy * y), or dy - exp(y) * sum(dy).
template <typename T, int N>
RTK_DEVICE void softmax_column_bwd(const T* dy, const T* y, T* dx, i64 n, i64 inner, i64 log) {
    __shared__ float parts[kColumnWarps][kWarp * N];
    const ColumnBlock<N> block(n, inner);
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.0f;
    for (i64 k = block.warp; block.there && k < n; k += kColumnWarps) {
        float g[N], v[N];
        load_keep<T, N>(dy + block.first + k * block.step, g);
        if (!log) load_keep<T, N>(y + block.first + k * block.step, v);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += log ? g[i] : g[i] * v[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) parts[block.warp][block.lane * N + i] = sums[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sums[i] = 0.0f;
        for (int warp = 0; warp < kColumnWarps; ++warp) sums[i] += parts[warp][block.lane * N + i];
    }
    for (i64 k = block.warp; block.there && k < n; k += kColumnWarps) {
        float g[N], v[N];
        load_keep<T, N>(dy + block.first + k * block.step, g);
        load_keep<T, N>(y + block.first + k * block.step, v);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] = log ? g[i] - expf(v[i]) * sums[i] : v[i] * g[i] - v[i] * sums[i];
        store<T, N>(dx + block.first + k * block.step, g);
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    softmax_columns_bwd(const T* dy, const T* y, T* dx, i64 n, i64 inner, i64 log, i64 vectors) {
    if (vectors) {
        softmax_column_bwd<T, 4>(dy, y, dx, n, inner, log);
    } else {
        softmax_column_bwd<T, 1>(dy, y, dx, n, inner, log);
    }
}

}  // namespace rtk
