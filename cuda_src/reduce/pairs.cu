// Sums over pairs of elements of two dense tensors: squared differences, or the number of pairs that are not close. A
// block sums every gridDim-th vector and writes one fp32 number to `partial`; a reduction adds those in order. fp32, no
// atomics.
#include "reduce/group_state.cuh"

namespace rtk {

// The `kind` arguments (rtkernels/ops/reduce/pairs.py).
inline constexpr int kSquaredDifference = 0, kNotClose = 1;

// 1 unless |a - b| <= atol + rtol * |b|, or both are equal; with the steps and roundings of torch.isclose.
RTK_DEVICE float not_close(float a, float b, float rtol, float atol, bool equal_nan) {
    if (a == b || (equal_nan && a != a && b != b)) return 0.0f;
    const float allowed = __fadd_rn(fabsf(__fmul_rn(b, rtol)), atol), actual = fabsf(__fsub_rn(a, b));
    return actual <= allowed && actual < __uint_as_float(0x7f800000u) ? 0.0f : 1.0f;
}

template <typename T, int N>
RTK_DEVICE float pair_sum(const T* x, const T* y, i64 n, int kind, float rtol, float atol, bool equal_nan) {
    float sum = 0.0f;
    const i64 step = static_cast<i64>(gridDim.x) * kReduceThreads * N;
    for (i64 at = (static_cast<i64>(blockIdx.x) * kReduceThreads + threadIdx.x) * N; at < n; at += step) {
        float a[N], b[N];
        load_keep<T, N>(x + at, a);
        load_keep<T, N>(y + at, b);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float difference = a[i] - b[i];
            part += kind == kNotClose ? not_close(a[i], b[i], rtol, atol, equal_nan) : difference * difference;
        }
        sum += part;
    }
    return sum;
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_pairs(const T* x, const T* y, float* partial, i64 n, i64 kind, double rtol, double atol, i64 equal_nan,
                 i64 aligned) {
    const float r = static_cast<float>(rtol), a = static_cast<float>(atol);
    FloatSum::State s;
    if (aligned) {
        s.sum = pair_sum<T, 16 / sizeof(T)>(x, y, n, static_cast<int>(kind), r, a, equal_nan != 0);
    } else {
        s.sum = pair_sum<T, 1>(x, y, n, static_cast<int>(kind), r, a, equal_nan != 0);
    }
    s = combined<FloatSum>(s, kReduceThreads);
    if (threadIdx.x == 0) partial[blockIdx.x] = s.sum;
}

}  // namespace rtk
