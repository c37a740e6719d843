// One AdamW step (decoupled weight decay) over lists of tensors: fp32 weights, moments and arithmetic, gradients of any
// of the three types, and optionally a bf16 or fp16 copy of the new weights.
//
// Lists: 0 weights, 1 gradients, 2 first moments, 3 second moments, 4 step counts (one fp32 number each), 5 copies. One
// block per chunk; a thread takes 4 elements at a time, at several places. adamw_advance runs first and adds 1 to every
// step count. With *found_inf != 0 neither changes anything.
#include "multi/list.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

enum : int { kWeight = 0, kGradient = 1, kFirst = 2, kSecond = 3, kStep = 4, kCopy = 5 };

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    adamw_advance(const i64* table, const float* found_inf, i64 tensors, i64 lists) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < tensors) *reinterpret_cast<float*>(table[i * (kMultiHeader + lists) + kMultiHeader + kStep]) += 1.0f;
}

struct Adam {
    float keep, beta1, rest1, beta2, rest2, rate, second, eps, inverse;

    RTK_DEVICE void apply(float& w, float g, float& m, float& v) const {
        g *= inverse;
        m = fmaf(rest1, g, beta1 * m);
        v = fmaf(rest2 * g, g, beta2 * v);
        w = fmaf(-rate * m, ptx::rcp(fmaf(sqrtf(v), second, eps)), w * keep);
    }
};

// kCount vectors of N elements, kMultiThreads vectors apart; all are loaded before the first is used.
template <typename G, int N, int kCount>
RTK_DEVICE void update(const Adam& adam, float* w, const G* g, float* m, float* v, u16* out, int copy) {
    constexpr int kStep = kMultiThreads * N;
    float weight[kCount][N], gradient[kCount][N], first[kCount][N], second[kCount][N];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
        load_parts<float, N>(w + k * kStep, weight[k]);
        load_parts<G, N>(g + k * kStep, gradient[k]);
        load_parts<float, N>(m + k * kStep, first[k]);
        load_parts<float, N>(v + k * kStep, second[k]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) adam.apply(weight[k][i], gradient[k][i], first[k][i], second[k][i]);
        store<float, N>(w + k * kStep, weight[k]);
        store<float, N>(m + k * kStep, first[k]);
        store<float, N>(v + k * kStep, second[k]);
        if (copy == 1) store<bf16, N>(reinterpret_cast<bf16*>(out) + k * kStep, weight[k]);
        if (copy == 2) store<fp16, N>(reinterpret_cast<fp16*>(out) + k * kStep, weight[k]);
    }
}

template <int kInFlight>
__global__ void __launch_bounds__(kMultiThreads)
    multi_adamw(const i64* table, const float* lr_by, const float* grad_scale, const float* found_inf, i64 tensors,
                i64 lists, i64 shift, double lr, double log_beta1, double log_beta2, double rest1, double rest2,
                double eps, double decay, double sign) {
    constexpr int N = 4;
    __shared__ Adam shared;
    const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), blockIdx.x);
    ptx::wait_for_previous();
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    if (threadIdx.x == 0) {
        const double step = static_cast<double>(*reinterpret_cast<const float*>(chunk.record[kMultiHeader + kStep]));
        const double rate = lr_by != nullptr ? static_cast<double>(*lr_by) : lr;
        const double scale = grad_scale != nullptr ? static_cast<double>(*grad_scale) : 1.0;
        shared.keep = static_cast<float>(1.0 - rate * decay);
        shared.beta1 = static_cast<float>(1.0 - rest1);
        shared.rest1 = static_cast<float>(rest1);
        shared.beta2 = static_cast<float>(1.0 - rest2);
        shared.rest2 = static_cast<float>(rest2);
        shared.rate = static_cast<float>(rate / (1.0 - exp(step * log_beta1)));
        shared.second = static_cast<float>(1.0 / sqrt(1.0 - exp(step * log_beta2)));
        shared.eps = static_cast<float>(eps);
        shared.inverse = static_cast<float>(sign / scale);
    }
    __syncthreads();
    const Adam adam = shared;
    const int me = static_cast<int>(threadIdx.x), copy = lists > kCopy ? chunk.kind(kCopy) : 0;
    const int vectors = chunk.aligned() ? chunk.count / N : 0;
    float* w = chunk.at<float>(kWeight);
    float* m = chunk.at<float>(kFirst);
    float* v = chunk.at<float>(kSecond);
    u16* out = copy != 0 ? chunk.at<u16>(kCopy) : nullptr;
    with_type(chunk.kind(kGradient), [&](auto type) {
        using G = decltype(type);
        const G* g = chunk.at<const G>(kGradient);
        int i = me;
#pragma unroll 1
        for (; i + (kInFlight - 1) * kMultiThreads < vectors; i += kInFlight * kMultiThreads)
            update<G, N, kInFlight>(adam, w + i * N, g + i * N, m + i * N, v + i * N, out + i * N, copy);
#pragma unroll 1
        for (; i < vectors; i += kMultiThreads)
            update<G, N, 1>(adam, w + i * N, g + i * N, m + i * N, v + i * N, out + i * N, copy);
#pragma unroll 1
        for (i = vectors * N + me; i < chunk.count; i += kMultiThreads)
            update<G, 1, 1>(adam, w + i, g + i, m + i, v + i, out + i, copy);
    });
}

}  // namespace rtk
