// Up to three results of the same operands in one pass: r0 = F0(a, b, d), r1 = F1(...), r2 = F2(...), element by element. All
// functors take the same operands, so F0 says how many there are; an absent F2 is F0 with a null pointer r2. Results have one
// shape and the same strides, of dtypes O, P and Q. The rest is as in kernels.cuh: T, numbers, strides, blocks.
#pragma once
#include "pointwise/kernels.cuh"

namespace rtk {

template <typename O, typename P, typename Q>
struct Largest {
    static constexpr int kFirst = sizeof(O) > sizeof(P) ? sizeof(O) : sizeof(P);
    static constexpr int kBytes = kFirst > static_cast<int>(sizeof(Q)) ? kFirst : sizeof(Q);
};

template <typename O, typename P, typename Q, typename A>
inline constexpr int kVectorOfSeveral = Largest<O, P, Q>::kBytes <= 2 && sizeof(A) <= 2 ? 8 : 4;

template <typename F, typename O, typename T, typename In, int N>
RTK_DEVICE void store_result(O* p, const In& in, const Scalars<T>& s) {
    Compute<O> results[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (In::kInputs == 1) results[i] = converted<O>(F::template apply<T>(in.a.value[i], s));
        else if constexpr (In::kInputs == 2) results[i] = converted<O>(F::template apply<T>(in.a.value[i], in.b.value[i], s));
        else results[i] = converted<O>(F::template apply<T>(in.a.value[i], in.b.value[i], in.d.value[i], s));
    }
    store_elements<O, N>(p, results);
}

#define RTK_SEVERAL_TYPES                                                                                                \
    typename F0, typename F1, typename F2, typename T, typename O, typename P, typename Q, typename A, typename B, \
        typename D
#define RTK_STORE_SEVERAL(N, IN, AT)                                                          \
    store_result<F0, O, T, Operands<F0, T, A, B, D, N>, N>(r0 + (AT), IN, s);                 \
    store_result<F1, P, T, Operands<F0, T, A, B, D, N>, N>(r1 + (AT), IN, s);                 \
    if (r2 != nullptr) store_result<F2, Q, T, Operands<F0, T, A, B, D, N>, N>(r2 + (AT), IN, s)

template <RTK_SEVERAL_TYPES>
__global__ void __launch_bounds__(kPointwiseThreads)
    several_flat(O* r0, P* r1, Q* r2, const A* a, const B* b, const D* d, RTK_NUMBERS, i64 count, i64 steps, i64 aligned16) {
    constexpr int N = kVectorOfSeveral<O, P, Q, A>, kInFlight = 2;
    const Scalars<T> s(s0, s1, s2, s3);
    const i64 first = static_cast<i64>(blockIdx.x) * (kInFlight * kPointwiseThreads * N);
    const i64 last = first + kInFlight * kPointwiseThreads * N;
    if (aligned16 != 0 && last <= count) {
        Operands<F0, T, A, B, D, N> in[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
            const i64 at = first + (u * kPointwiseThreads + static_cast<int>(threadIdx.x)) * N;
            in[u].fetch(a, b, d, steps & 1 ? at : 0, steps & 2 ? at : 0, steps & 4 ? at : 0, steps);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
            in[u].unpack_fetched(a, b, d, na, nb, nd);
            const i64 at = first + (u * kPointwiseThreads + static_cast<int>(threadIdx.x)) * N;
            RTK_STORE_SEVERAL(N, in[u], at);
        }
        return;
    }
    const i64 end = last < count ? last : count;
    for (i64 at = first + threadIdx.x; at < end; at += kPointwiseThreads) {
        Operands<F0, T, A, B, D, 1> in;
        in.fetch(a, b, d, steps & 1 ? at : 0, steps & 2 ? at : 0, steps & 4 ? at : 0, 0);
        in.unpack_fetched(a, b, d, na, nb, nd);
        RTK_STORE_SEVERAL(1, in, at);
    }
}

template <RTK_SEVERAL_TYPES, int N, int kInFlight, bool INDEX64>
RTK_DEVICE void several_elements(O* r0, P* r1, Q* r2, const A* a, const B* b, const D* d, i64 na, i64 nb, i64 nd,
                                 const Scalars<T>& s, const Strides<INDEX64>& strides, i64 count, i64 steps, int dims) {
    Operands<F0, T, A, B, D, N> in[kInFlight];
    i64 to[kInFlight];
    const i64 first = static_cast<i64>(blockIdx.x) * (kInFlight * kPointwiseThreads) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        const i64 index = first + u * kPointwiseThreads;
        if (index < count) {
            const Offsets where = strides.template at<0, F0::kInputs>(index, dims);
            to[u] = where.out;
            in[u].fetch(a, b, d, where.a, where.b, where.d, steps);
        }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        if (first + u * kPointwiseThreads < count) {
            in[u].unpack_fetched(a, b, d, na, nb, nd);
            RTK_STORE_SEVERAL(N, in[u], to[u]);
        }
    }
}

template <typename O, typename P, typename Q, typename A, typename B, typename D, bool INDEX64>
struct SeveralArguments {
    O* r0;
    P* r1;
    Q* r2;
    const A* a;
    const B* b;
    const D* d;
    i64 na, nb, nd, s0, s1, s2, s3;
    Strides<INDEX64> strides;
    i64 count, dims, steps, vectors;
};

template <RTK_SEVERAL_TYPES, bool INDEX64>
__global__ void __launch_bounds__(kPointwiseThreads)
    several_strided(const __grid_constant__ SeveralArguments<O, P, Q, A, B, D, INDEX64> args) {
    const Scalars<T> s(args.s0, args.s1, args.s2, args.s3);
    const int dims = static_cast<int>(args.dims);
    if (args.vectors != 0) {
        constexpr int N = kVectorOfSeveral<O, P, Q, A>;
        several_elements<F0, F1, F2, T, O, P, Q, A, B, D, N, 2>(args.r0, args.r1, args.r2, args.a, args.b, args.d, args.na,
                                                               args.nb, args.nd, s, args.strides, args.count,
                                                               args.steps, dims);
    } else {
        several_elements<F0, F1, F2, T, O, P, Q, A, B, D, 1, 4>(args.r0, args.r1, args.r2, args.a, args.b, args.d, args.na,
                                                               args.nb, args.nd, s, args.strides, args.count, 0, dims);
    }
}

}  // namespace rtk
