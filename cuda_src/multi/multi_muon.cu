// The two passes of Muon over lists of tensors, before and after matrices are orthogonalised; fp32 arithmetic.
//
// muon_momentum: lists 0 averages (fp32), 1 gradients, 2 updates (written). average = lerp(average, g, rest), update =
// lerp(g, average, momentum) with `nesterov`, else the average; g is the gradient times `sign`.
// muon_apply: lists 0 weights, 1 directions, 2 copies of the weights (may be absent). weight = weight * (1 - lr * decay)
// - lr * factor * direction.
// One block per chunk; a thread takes 4 elements at a time.
#include "multi/list.cuh"

namespace rtk {

template <int N>
struct Vector {
    enum : int { value = N };
};

// Calls f(first element, Vector<N>) for this thread's vectors, and f(element, Vector<1>) for the rest.
template <int N, typename F>
RTK_DEVICE void for_vectors(const Chunk& chunk, const F& f) {
    const int vectors = chunk.aligned() ? chunk.count / N : 0, me = static_cast<int>(threadIdx.x);
#pragma unroll 2
    for (int i = me; i < vectors; i += kMultiThreads) f(i * N, Vector<N>());
#pragma unroll 1
    for (int i = vectors * N + me; i < chunk.count; i += kMultiThreads) f(i, Vector<1>());
}

template <int N>
__global__ void __launch_bounds__(kMultiThreads)
    muon_momentum(const i64* table, i64 tensors, i64 lists, i64 shift, double momentum, double nesterov, double sign) {
    const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), blockIdx.x);
    const float keep = static_cast<float>(momentum), rest = static_cast<float>(1.0 - momentum);
    const float times = static_cast<float>(sign);
    const bool is_nesterov = nesterov != 0.0;
    float* const average = chunk.at<float>(0);
    with_type(chunk.kind(1), [&](auto from) {
        using G = decltype(from);
        const G* const gradient = chunk.at<const G>(1);
        with_type(chunk.kind(2), [&](auto to) {
            using U = decltype(to);
            U* const update = chunk.at<U>(2);
            for_vectors<N>(chunk, [&](int at, auto width) {
                constexpr int kCount = decltype(width)::value;
                float a[kCount], g[kCount], u[kCount];
                load_parts<float, kCount>(average + at, a);
                load_parts<G, kCount>(gradient + at, g);
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    g[i] *= times;
                    a[i] = fmaf(rest, g[i], keep * a[i]);
                    u[i] = is_nesterov ? fmaf(keep, a[i], rest * g[i]) : a[i];
                }
                store<float, kCount>(average + at, a);
                store<U, kCount>(update + at, u);
            });
        });
    });
}

template <int N>
__global__ void __launch_bounds__(kMultiThreads)
    muon_apply(const i64* table, const float* lr_by, i64 tensors, i64 lists, i64 shift, double lr, double factor,
               double decay) {
    const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), blockIdx.x);
    const double rate = lr_by != nullptr ? static_cast<double>(*lr_by) : lr;
    const float keep = static_cast<float>(1.0 - rate * decay), times = static_cast<float>(-rate * factor);
    const int copy = lists > 2 ? chunk.kind(2) : 0;
    with_type(chunk.kind(0), [&](auto own) {
        using W = decltype(own);
        W* const weight = chunk.at<W>(0);
        with_type(chunk.kind(1), [&](auto from) {
            using X = decltype(from);
            const X* const direction = chunk.at<const X>(1);
            for_vectors<N>(chunk, [&](int at, auto width) {
                constexpr int kCount = decltype(width)::value;
                float w[kCount], x[kCount];
                load_parts<W, kCount>(weight + at, w);
                load_parts<X, kCount>(direction + at, x);
#pragma unroll
                for (int i = 0; i < kCount; ++i) w[i] = fmaf(times, x[i], w[i] * keep);
                store<W, kCount>(weight + at, w);
                if (copy == 1) store<bf16, kCount>(chunk.at<bf16>(2) + at, w);
                if (copy == 2) store<fp16, kCount>(chunk.at<fp16>(2) + at, w);
            });
        });
    });
}

}  // namespace rtk
