// out = F(a, b, d; s0..s3), element by element, for any shapes and strides that broadcast: the kernels behind the pointwise and
// copy families. F is a functor (functors.cuh, or the expression of a user). T is the dtype that operands are converted to
// (torch's promoted dtype), O that of the result, A, B, D those of the operands. An operand whose pointer is null is the number
// na, nb or nd. F::kInputs says how many operands there are, F::kOwnType (a bit each) which of them are not converted to T
// (masks). Arithmetic happens in Compute<T>; the result is rounded once.
//
// Strides are in elements and may be zero or negative; dimension 0 is the innermost one of the output.
#pragma once
#include "pointwise/element.cuh"

#define RTK_NUMBERS i64 na, i64 nb, i64 nd, i64 s0, i64 s1, i64 s2, i64 s3

namespace rtk {

inline constexpr int kDims = 6;
inline constexpr int kPointwiseThreads = 256;

template <typename T>
struct Scalars {
    Compute<T> s0, s1, s2, s3;
    RTK_DEVICE Scalars(i64 b0, i64 b1, i64 b2, i64 b3)
        : s0(number<T>(b0)), s1(number<T>(b1)), s2(number<T>(b2)), s3(number<T>(b3)) {}
};

template <typename A, typename B>
struct Larger {
    static constexpr int kBytes = sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B);
};

// Elements of a vector: 16 bytes of the smallest type that matters, at least 4 and at most 8 of them.
template <typename O, typename A>
inline constexpr int kVector = Larger<O, A>::kBytes <= 2 ? 8 : 4;

// The type an operand has inside of the functor.
template <typename T, typename A, bool kOwn>
struct Inside {
    using Type = Compute<T>;
};
template <typename T, typename A>
struct Inside<T, A, true> {
    using Type = Compute<A>;
};

// N values of one operand, as the functor takes them. They are loaded first and unpacked once the loads of all operands
// are in flight, because a conversion waits for its load.
template <typename T, typename A, bool kOwn, int N>
struct Operand {
    using Type = typename Inside<T, A, kOwn>::Type;
    Type value[N];
    RawElements<A, N> raw;

    RTK_DEVICE void fill(Type one) {
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = one;
    }

    RTK_DEVICE static Type number_of(i64 bits) {
        if constexpr (kOwn) return number<A>(bits);
        return number<T>(bits);
    }

    // N consecutive elements, or one N times.
    RTK_DEVICE void fetch(const A* p, bool steps) {
        if (steps || N == 1) {
            raw.load(p);
        } else {
            raw.load_repeated(p);
        }
    }

    RTK_DEVICE void unpack_fetched() {
        Compute<A> own[N];
        raw.unpack_to(own);
#pragma unroll
        for (int i = 0; i < N; ++i) set(i, own[i]);
    }

    RTK_DEVICE void set(int i, Compute<A> own) {
        if constexpr (kOwn) {
            value[i] = own;
        } else {
            value[i] = promoted<T, A>(own);
        }
    }
};

template <typename F, typename T, typename A, typename B, typename D, int N>
struct Operands {
    static constexpr int kInputs = F::kInputs;
    Operand<T, A, (F::kOwnType & 1) != 0, N> a;
    Operand<T, B, (F::kOwnType & 2) != 0, N> b;
    Operand<T, D, (F::kOwnType & 4) != 0, N> d;

    RTK_DEVICE void fetch(const A* pa, const B* pb, const D* pd, i64 at_a, i64 at_b, i64 at_d, i64 steps) {
        if constexpr (kInputs > 0) {
            if (pa != nullptr) a.fetch(pa + at_a, steps & 1);
        }
        if constexpr (kInputs > 1) {
            if (pb != nullptr) b.fetch(pb + at_b, steps & 2);
        }
        if constexpr (kInputs > 2) {
            if (pd != nullptr) d.fetch(pd + at_d, steps & 4);
        }
    }

    RTK_DEVICE void unpack_fetched(const A* pa, const B* pb, const D* pd, i64 na, i64 nb, i64 nd) {
        if constexpr (kInputs > 0) {
            if (pa != nullptr) a.unpack_fetched();
            else a.fill(a.number_of(na));
        }
        if constexpr (kInputs > 1) {
            if (pb != nullptr) b.unpack_fetched();
            else b.fill(b.number_of(nb));
        }
        if constexpr (kInputs > 2) {
            if (pd != nullptr) d.unpack_fetched();
            else d.fill(d.number_of(nd));
        }
    }

    template <typename O>
    RTK_DEVICE Compute<O> result(int i, const Scalars<T>& s) const {
        if constexpr (kInputs == 0) return converted<O>(F::template apply<T>(s));
        else if constexpr (kInputs == 1) return converted<O>(F::template apply<T>(a.value[i], s));
        else if constexpr (kInputs == 2) return converted<O>(F::template apply<T>(a.value[i], b.value[i], s));
        else return converted<O>(F::template apply<T>(a.value[i], b.value[i], d.value[i], s));
    }

    template <typename O>
    RTK_DEVICE void store(O* p, const Scalars<T>& s) const {
        Compute<O> results[N];
#pragma unroll
        for (int i = 0; i < N; ++i) results[i] = result<O>(i, s);
        store_elements<O, N>(p, results);
    }
};

// Class V: one dimension, every operand contiguous or a single element. A block owns 2 * 256 vectors; `steps` has a bit
// for each contiguous operand. `aligned16`: all of these start at multiples of their vectors. Grid: as many blocks as
// needed.
template <typename F, typename T, typename O, typename A, typename B, typename D>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_flat(O* out, const A* a, const B* b, const D* d, RTK_NUMBERS, i64 count, i64 steps, i64 aligned16) {
    constexpr int N = kVector<O, A>, kInFlight = 2;
    const Scalars<T> s(s0, s1, s2, s3);
    const i64 first = static_cast<i64>(blockIdx.x) * (kInFlight * kPointwiseThreads * N);
    const i64 last = first + kInFlight * kPointwiseThreads * N;
    if (aligned16 != 0 && last <= count) {
        Operands<F, T, A, B, D, N> in[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
            const i64 at = first + (u * kPointwiseThreads + static_cast<int>(threadIdx.x)) * N;
            in[u].fetch(a, b, d, steps & 1 ? at : 0, steps & 2 ? at : 0, steps & 4 ? at : 0, steps);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
            in[u].unpack_fetched(a, b, d, na, nb, nd);
            in[u].store(out + first + (u * kPointwiseThreads + static_cast<int>(threadIdx.x)) * N, s);
        }
        return;
    }
    const i64 end = last < count ? last : count;
    for (i64 at = first + threadIdx.x; at < end; at += kPointwiseThreads) {
        Operands<F, T, A, B, D, 1> in;
        in.fetch(a, b, d, steps & 1 ? at : 0, steps & 2 ? at : 0, steps & 4 ? at : 0, 0);
        in.unpack_fetched(a, b, d, na, nb, nd);
        in.store(out + at, s);
    }
}

// Offsets of one element, or of the first of a vector, in all operands.
struct Offsets {
    i64 out = 0, a = 0, b = 0, d = 0;
};

template <bool kIndex64>
struct Strides {
    i64 n[kDims], q[kDims], o[kDims], a[kDims], b[kDims], d[kDims];

    // Offset of element `index` in the output's order, from dimension kFirst on.
    template <int kFirst, int kInputs>
    RTK_DEVICE Offsets at(i64 index, int dims) const {
        Offsets where;
        i64 rest = index;
#pragma unroll
        for (int i = kFirst; i < kDims; ++i) {
            if (i < dims) {
                i64 position = rest;
                if (i + 1 < dims) {
                    if constexpr (kIndex64) {
                        rest = position / n[i];
                    } else {
                        rest = divided(static_cast<u32>(position), q[i]);
                    }
                    position -= rest * n[i];
                }
                where.out += position * o[i];
                if constexpr (kInputs > 0) where.a += position * a[i];
                if constexpr (kInputs > 1) where.b += position * b[i];
                if constexpr (kInputs > 2) where.d += position * d[i];
            }
        }
        return where;
    }
};

// The first arguments of the kernels for operands with strides.
template <typename O, typename A, typename B, typename D, bool INDEX64>
struct StridedOperands {
    O* out;
    const A* a;
    const B* b;
    const D* d;
    i64 na, nb, nd, s0, s1, s2, s3;
    Strides<INDEX64> strides;
};

template <typename O, typename A, typename B, typename D, bool INDEX64>
struct StridedArguments : StridedOperands<O, A, B, D, INDEX64> {
    i64 count, dims, steps, vectors;
};

// N elements per index, kInFlight indices per thread: `count` indices in the order of the output.
template <typename F, typename T, typename O, typename A, typename B, typename D, int N, int kInFlight, bool INDEX64>
RTK_DEVICE void strided_elements(O* out, const A* a, const B* b, const D* d, i64 na, i64 nb, i64 nd, const Scalars<T>& s,
                                 const Strides<INDEX64>& strides, i64 count, i64 steps, int dims) {
    Operands<F, T, A, B, D, N> in[kInFlight];
    i64 to[kInFlight];
    const i64 first = static_cast<i64>(blockIdx.x) * (kInFlight * kPointwiseThreads) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        const i64 index = first + u * kPointwiseThreads;
        if (index < count) {
            const Offsets where = strides.template at<0, F::kInputs>(index, dims);
            to[u] = where.out;
            in[u].fetch(a, b, d, where.a, where.b, where.d, steps);
        }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        if (first + u * kPointwiseThreads < count) {
            in[u].unpack_fetched(a, b, d, na, nb, nd);
            in[u].store(out + to[u], s);
        }
    }
}

// Classes R and G: up to six dimensions of any strides. With `vectors`, dimension 0 is contiguous or constant in every
// operand and counts vectors (n0 and its strides are those of vectors; `steps` as above); else it counts elements.
// INDEX64: more than 2^31 of them, too many for divisors. Blocks own 2 * 256 vectors or 4 * 256 elements.
template <typename F, typename T, typename O, typename A, typename B, typename D, bool INDEX64>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_strided(const __grid_constant__ StridedArguments<O, A, B, D, INDEX64> args) {
    const Scalars<T> s(args.s0, args.s1, args.s2, args.s3);
    const int dims = static_cast<int>(args.dims);
    if (args.vectors != 0) {
        strided_elements<F, T, O, A, B, D, kVector<O, A>, 2>(args.out, args.a, args.b, args.d, args.na, args.nb, args.nd,
                                                            s, args.strides, args.count, args.steps, dims);
    } else {
        strided_elements<F, T, O, A, B, D, 1, 4>(args.out, args.a, args.b, args.d, args.na, args.nb, args.nd, s,
                                                 args.strides, args.count, 0, dims);
    }
}

}  // namespace rtk
