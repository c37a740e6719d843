// The loss -weight[t] * x[t] of log-probabilities at the target class t of each position, and its gradient. x is
// (batch, classes, spatial) in any strides, spatial 1 for the plain loss; targets, one per batch entry and spatial
// position, are int64 and dense. A target equal to ignore_index does not count; one outside of the classes traps, as in
// torch.
//
// Forward: a thread owns positions, a block writes the sums of losses and weights to `partial`, or, if it is the only
// one, the results; nll_finish adds the partial sums in order. Backward: dx is dense; a thread reads the targets of up
// to 16 bytes of neighbouring positions once and writes these positions for kClasses classes, zeros or the gradient.
// Without spatial dimensions it owns 16 bytes of neighbouring classes. Arithmetic: fp32, rounded once.
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

// The gradient at the target class of a position.
template <typename T>
RTK_DEVICE float nll_gradient(const T* dy, const T* weight, const T* total, i64 place, i64 target, i64 reduction) {
    float gradient = -scalar(dy, reduction == kNone ? place : 0);
    if (weight != nullptr) gradient *= scalar(weight, target);
    if (reduction == kMean) gradient /= scalar(total, 0);
    return gradient;
}

// kVector neighbouring classes of a row. class_divider is 0 for 2^31 elements or more.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    nll_backward(const T* dy, const i64* targets, const T* weight, const T* total, T* dx, i64 count, i64 classes,
                 i64 class_divider, i64 ignore_index, i64 reduction) {
    constexpr int kVector = 16 / sizeof(T);
    const i64 at = (static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x) * kVector;
    if (at >= count) return;
    const i64 row = class_divider != 0 ? static_cast<i64>(divided(static_cast<u32>(at), class_divider)) : at / classes;
    const i64 target = targets[row], here = target - (at - row * classes);
    float g[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) g[i] = 0.0f;
    if (target != ignore_index && here >= 0 && here < kVector) {
        const float gradient = nll_gradient(dy, weight, total, row, target, reduction);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[i] = here == i ? gradient : 0.0f;
    }
    store<T, kVector>(dx + at, g);
}

inline constexpr int kClasses = 8;

template <typename T, int N>
RTK_DEVICE void write_places(const T* dy, const i64* targets, const T* weight, const T* total, T* dx, i64 batch, i64 place,
                             i64 first, int step, i64 classes, i64 spatial, i64 ignore_index, i64 reduction) {
    const i64 number = batch * spatial + place;
    i64 target[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        target[i] = targets[number + i];
        if (target[i] == ignore_index) target[i] = -1;
    }
    T* to = dx + (batch * classes + first) * spatial + place;
#pragma unroll
    for (int k = 0; k < kClasses; ++k, to += step * spatial) {
        const i64 which = first + k * step;
        if (which >= classes) return;
        float g[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            g[i] = target[i] == which ? nll_gradient(dy, weight, total, number + i, which, reduction) : 0.0f;
        store<T, N>(to, g);
    }
}

// A block has `across` (a power of two) threads for neighbouring positions, with `vectors` 16 bytes each, and 256 /
// across classes at a time, kClasses times. Grid: tiles of positions, tiles of classes, batch; numbered in this order.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    nll_backward_places(const T* dy, const i64* targets, const T* weight, const T* total, T* dx, i64 classes, i64 spatial,
                        i64 ignore_index, i64 reduction, i64 across, i64 place_tiles, i64 class_tiles, i64 vectors) {
    constexpr int kVector = 16 / sizeof(T);
    const u32 lanes = static_cast<u32>(across), rest = blockIdx.x / static_cast<u32>(place_tiles);
    const u32 tile = blockIdx.x - rest * static_cast<u32>(place_tiles), batch = rest / static_cast<u32>(class_tiles);
    const int step = static_cast<int>(kReduceThreads / lanes);
    const i64 first = static_cast<i64>(rest - batch * static_cast<u32>(class_tiles)) * (step * kClasses) + threadIdx.x / lanes;
    const i64 place = (static_cast<i64>(tile) * lanes + threadIdx.x % lanes) * (vectors ? kVector : 1);
    if (place >= spatial || first >= classes) return;
    if (vectors) {
        write_places<T, kVector>(dy, targets, weight, total, dx, batch, place, first, step, classes, spatial, ignore_index,
                                 reduction);
    } else {
        write_places<T, 1>(dy, targets, weight, total, dx, batch, place, first, step, classes, spatial, ignore_index, reduction);
    }
}

}  // namespace rtk
