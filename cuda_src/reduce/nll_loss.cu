// The loss -weight[t] * x[t] of log-probabilities at the target class t of each place, and its gradient. x is (batch, classes, spatial) at
// any strides, spatial 1 for the plain loss; targets, one for each batch entry and spatial place, are int64 and dense. A target
// that is ignore_index counts as nothing; one outside of the classes stops the kernel, as it stops torch's.
//
// Forward: a thread owns places, a block writes the sums of losses and weights to `partial`, or, if it is the only one, the results;
// nll_finish adds partial sums up in order. Backward: a thread owns N neighbouring elements of dx, dense, and writes zeros or the
// gradient. Arithmetic: fp32, one rounding.
#include "reduce/group_state.cuh"

namespace rtk {

inline constexpr int kNone = 0, kMean = 1;  // aten's numbers of reductions; 2: the sum

template <typename T>
RTK_DEVICE float scalar(const T* p, i64 at) {
    float v[1];
    load_keep<T, 1>(p + at, v);
    return v[0];
}

template <typename T>
RTK_DEVICE void write_loss(const PairSum::State& s, T* out, T* total, i64 reduction) {
    const float loss[1] = {reduction == kMean ? s.a / s.b : s.a}, weight[1] = {s.b};
    store<T, 1>(out, loss);
    store<T, 1>(total, weight);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    nll_forward(const T* x, const i64* targets, const T* weight, T* out, T* total, float* partial, i64 count, i64 spatial,
                i64 batch_stride, i64 class_stride, i64 spatial_stride, i64 classes, i64 ignore_index, i64 reduction) {
    PairSum::State s = PairSum::identity();
    const i64 step = static_cast<i64>(gridDim.x) * kReduceThreads;
    for (i64 at = static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x; at < count; at += step) {
        const i64 target = targets[at], batch = at / spatial;
        float loss[1] = {0.0f};
        if (target != ignore_index) {
            if (static_cast<u64>(target) >= static_cast<u64>(classes)) __trap();
            const float w = weight == nullptr ? 1.0f : scalar(weight, target);
            loss[0] = -w * scalar(x, batch * batch_stride + target * class_stride + (at - batch * spatial) * spatial_stride);
            s.a += loss[0];
            s.b += w;
        }
        if (reduction == kNone) store<T, 1>(out + at, loss);
    }
    if (reduction == kNone) {
        const float none[1] = {0.0f};
        if (blockIdx.x == 0 && threadIdx.x == 0) store<T, 1>(total, none);
        return;
    }
    s = combined<PairSum>(s, kReduceThreads);
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1) {
        write_loss(s, out, total, reduction);
    } else {
        partial[2 * blockIdx.x] = s.a, partial[2 * blockIdx.x + 1] = s.b;
    }
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    nll_finish(const float* partial, T* out, T* total, i64 blocks, i64 reduction) {
    PairSum::State s = PairSum::identity();
    for (i64 i = threadIdx.x; i < blocks; i += kReduceThreads) s.a += partial[2 * i], s.b += partial[2 * i + 1];
    s = combined<PairSum>(s, kReduceThreads);
    if (threadIdx.x == 0) write_loss(s, out, total, reduction);
}

// N > 1 only for spatial 1 and classes in multiples of N. Dividers are 0 for 2^31 elements or more.
template <typename T, int N>
RTK_DEVICE void nll_gradient(const T* dy, const i64* targets, const T* weight, const T* total, T* dx, i64 at, i64 classes,
                             i64 spatial, i64 class_divider, i64 spatial_divider, i64 ignore_index, i64 reduction) {
    i64 plane, batch;
    if (class_divider != 0) {
        plane = divided(static_cast<u32>(at), spatial_divider);
        batch = divided(static_cast<u32>(plane), class_divider);
    } else {
        plane = at / spatial, batch = plane / classes;
    }
    const i64 place = batch * spatial + (at - plane * spatial), target = targets[place];
    const i64 here = target - (plane - batch * classes);  // of this thread's elements
    float g[N];
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = 0.0f;
    if (target != ignore_index && here >= 0 && here < N) {
        float gradient = -scalar(dy, reduction == kNone ? place : 0);
        if (weight != nullptr) gradient *= scalar(weight, target);
        if (reduction == kMean) gradient /= scalar(total, 0);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] = here == i ? gradient : 0.0f;
    }
    store<T, N>(dx + at, g);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    nll_backward(const T* dy, const i64* targets, const T* weight, const T* total, T* dx, i64 count, i64 classes, i64 spatial,
                 i64 class_divider, i64 spatial_divider, i64 ignore_index, i64 reduction, i64 vectors) {
    constexpr int kVector = 16 / sizeof(T);
    const i64 at = (static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x) * (vectors ? kVector : 1);
    if (at >= count) return;
    if (vectors) {
        nll_gradient<T, kVector>(dy, targets, weight, total, dx, at, classes, spatial, class_divider, spatial_divider,
                                 ignore_index, reduction);
    } else {
        nll_gradient<T, 1>(dy, targets, weight, total, dx, at, classes, spatial, class_divider, spatial_divider, ignore_index,
                           reduction);
    }
}

}  // namespace rtk
