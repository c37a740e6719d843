// What reductions compute: for each kind of result a state, how elements enter it, how two states combine, and what is
// stored in the end. Combining is commutative up to rounding, so any fixed order will do; indices decide ties.
#pragma once
#include "common/values.cuh"
#include "ptx/math.cuh"

namespace rtk {

// Transformation of an element before it enters. kLiftFlip, which can be added, turns maxima into minima.
inline constexpr int kLiftAbs = 1, kLiftSquare = 2, kLiftPower = 3, kLiftNonzero = 4, kLiftFlip = 8;

struct Lift {
    int kind;
    float power;
};

// Transformation of the final state (rtkernels/ops/reduce/reduction.py).
inline constexpr int kFinishValue = 0, kFinishDivide = 1, kFinishRoot = 2, kFinishPower = 3, kFinishAny = 4,
                     kFinishAll = 5;

struct Finish {
    int kind, type;  // type of the stored result
    double number;
    int lift;
    void *out, *second;
};

// x to a power, for x >= 0: within 2^-21 for exponents up to 16 over the range of norms, and a tenth of powf's code.
RTK_DEVICE float power_of(float x, float exponent) { return exp2f(exponent * log2f(x)); }

template <int N, typename F>
RTK_DEVICE void each_of(float (&v)[N], F&& f) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = f(v[i]);
}

// One branch for all elements: these are the inner loops of norms and extremes.
template <int N>
RTK_DEVICE void lifted(float (&v)[N], const Lift& lift) {
    if (lift.kind == 0) return;
    switch (lift.kind & 7) {
        case kLiftAbs: each_of(v, [](float x) { return fabsf(x); }); break;
        case kLiftSquare: each_of(v, [](float x) { return x * x; }); break;
        case kLiftPower: each_of(v, [&](float x) { return power_of(fabsf(x), lift.power); }); break;
        case kLiftNonzero: each_of(v, [](float x) { return x != 0.0f ? 1.0f : 0.0f; }); break;
    }
    if (lift.kind & kLiftFlip) each_of(v, [](float x) { return -x; });
}

template <int N>
RTK_DEVICE void lifted(i64 (&v)[N], const Lift& lift) {
    if (lift.kind == 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if ((lift.kind & 7) == kLiftNonzero) v[i] = v[i] != 0;
        if (lift.kind & kLiftFlip) v[i] = ~v[i];  // reverses the order without overflow
    }
}

RTK_DEVICE float flipped_back(float v, int lift) { return lift & kLiftFlip ? -v : v; }
RTK_DEVICE i64 flipped_back(i64 v, int lift) { return lift & kLiftFlip ? ~v : v; }

// NaN is larger than everything else.
RTK_DEVICE bool exceeds(float a, float b) { return !(a <= b) && b == b; }
RTK_DEVICE bool exceeds(i64 a, i64 b) { return a > b; }
RTK_DEVICE bool equals(float a, float b) { return a == b || (a != a && b != b); }
RTK_DEVICE bool equals(i64 a, i64 b) { return a == b; }

RTK_DEVICE float larger_of(float a, float b) { return ptx::max_nan(a, b); }
RTK_DEVICE i64 larger_of(i64 a, i64 b) { return a > b ? a : b; }

template <typename V>
RTK_DEVICE V smallest() {
    if constexpr (is_same<V, float>::value) return __uint_as_float(0xff800000u);
    return static_cast<V>(0x8000000000000000ull);
}

// A sum in fp32; of |x|^p for norms.
struct FloatSum {
    using Value = float;
    struct State {
        float sum;
    };
    RTK_DEVICE static State identity() { return {0.0f}; }
    template <int N>
    RTK_DEVICE static void absorb(State& s, float (&v)[N], i64, i64, const Lift& lift) {
        lifted(v, lift);
#pragma unroll
        for (int width = 1; width < N; width *= 2)
#pragma unroll
            for (int i = 0; i + width < N; i += 2 * width) v[i] += v[i + width];
        s.sum += v[0];
    }
    RTK_DEVICE static State combine(const State& a, const State& b) { return {a.sum + b.sum}; }
    RTK_DEVICE static State exchanged(const State& s, int lanes) { return {__shfl_xor_sync(0xffffffffu, s.sum, lanes)}; }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) {
        float y = s.sum;
        if (f.kind == kFinishDivide) y = y / static_cast<float>(f.number);
        if (f.kind == kFinishRoot) y = sqrtf(y);
        if (f.kind == kFinishPower) y = power_of(y, static_cast<float>(f.number));
        store_value(f.out, f.type, at, y);
    }
};

// A sum of integers, or the number of elements that are not 0, in 64 bits. Floats are always counted.
struct IntegerSum {
    using Value = i64;
    struct State {
        i64 sum;
    };
    RTK_DEVICE static State identity() { return {0}; }
    template <typename V, int N>
    RTK_DEVICE static void absorb(State& s, V (&v)[N], i64, i64, const Lift& lift) {
        i64 sum = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (is_same<V, float>::value) {
                sum += v[i] != 0.0f;
            } else {
                sum += lift.kind == kLiftNonzero ? static_cast<i64>(v[i] != 0) : v[i];
            }
        }
        s.sum += sum;
    }
    RTK_DEVICE static State combine(const State& a, const State& b) { return {a.sum + b.sum}; }
    RTK_DEVICE static State exchanged(const State& s, int lanes) { return {__shfl_xor_sync(0xffffffffu, s.sum, lanes)}; }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) {
        i64 y = s.sum;
        if (f.kind == kFinishAny) y = y != 0;
        if (f.kind == kFinishAll) y = y == static_cast<i64>(f.number);
        store_value(f.out, f.type, at, y);
    }
};

template <typename V>
struct Product {
    using Value = V;
    struct State {
        V product;
    };
    RTK_DEVICE static State identity() { return {static_cast<V>(1)}; }
    template <int N>
    RTK_DEVICE static void absorb(State& s, V (&v)[N], i64, i64, const Lift&) {
#pragma unroll
        for (int width = 1; width < N; width *= 2)
#pragma unroll
            for (int i = 0; i + width < N; i += 2 * width) v[i] *= v[i + width];
        s.product *= v[0];
    }
    RTK_DEVICE static State combine(const State& a, const State& b) { return {a.product * b.product}; }
    RTK_DEVICE static State exchanged(const State& s, int lanes) {
        return {__shfl_xor_sync(0xffffffffu, s.product, lanes)};
    }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) { store_value(f.out, f.type, at, s.product); }
};

// The largest element; NaN if there is one.
template <typename V>
struct Maximum {
    using Value = V;
    struct State {
        V value;
    };
    RTK_DEVICE static State identity() { return {smallest<V>()}; }
    template <int N>
    RTK_DEVICE static void absorb(State& s, V (&v)[N], i64, i64, const Lift& lift) {
        lifted(v, lift);
#pragma unroll
        for (int i = 0; i < N; ++i) s.value = larger_of(s.value, v[i]);
    }
    RTK_DEVICE static State combine(const State& a, const State& b) { return {larger_of(a.value, b.value)}; }
    RTK_DEVICE static State exchanged(const State& s, int lanes) {
        return {__shfl_xor_sync(0xffffffffu, s.value, lanes)};
    }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) {
        store_value(f.out, f.type, at, flipped_back(s.value, f.lift));
    }
};

// The same with its index, the first one in case of ties. `out`: values, if needed; `second`: indices.
template <typename V>
struct ArgMaximum {
    using Value = V;
    struct State {
        V value;
        i64 index;  // -1: nothing yet
    };
    RTK_DEVICE static State identity() { return {smallest<V>(), -1}; }
    template <int N>
    RTK_DEVICE static void absorb(State& s, V (&v)[N], i64 first, i64 step, const Lift& lift) {
        lifted(v, lift);
        V best = v[0];
#pragma unroll
        for (int i = 1; i < N; ++i) best = larger_of(best, v[i]);
        // A thread processes its elements in order, so the first of equal ones stays.
        if (s.index >= 0 && !exceeds(best, s.value)) return;
        int at = 0;
#pragma unroll
        for (int i = N - 1; i >= 0; --i)
            if (equals(v[i], best)) best = v[i], at = i;  // which may be another zero
        s = State{best, first + at * step};
    }
    // The same for adjacent elements, one by one: with eight and more in short rows, some lane of a warp has a larger
    // one in almost every vector, and the search above would be paid on top of the maximum.
    template <int N>
    RTK_DEVICE static void absorb_each(State& s, V (&v)[N], i64 first, const Lift& lift) {
        lifted(v, lift);
        V best = v[0];
        int at = 0;  // the first of equal ones
#pragma unroll
        for (int i = 1; i < N; ++i)
            if (exceeds(v[i], best)) best = v[i], at = i;
        if (s.index < 0 || exceeds(best, s.value)) s = State{best, first + at};
    }
    RTK_DEVICE static State combine(const State& a, const State& b) {
        if (a.index < 0) return b;
        if (b.index < 0) return a;
        const bool first = exceeds(a.value, b.value) || (equals(a.value, b.value) && a.index < b.index);
        return first ? a : b;
    }
    RTK_DEVICE static State exchanged(const State& s, int lanes) {
        return {__shfl_xor_sync(0xffffffffu, s.value, lanes), __shfl_xor_sync(0xffffffffu, s.index, lanes)};
    }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) {
        if (f.out != nullptr) store_value(f.out, f.type, at, flipped_back(s.value, f.lift));
        static_cast<i64*>(f.second)[at] = s.index;
    }
};

template <typename M>
inline constexpr bool kHasIndex = false;
template <typename V>
inline constexpr bool kHasIndex<ArgMaximum<V>> = true;

// Mean and sum of squared differences from it, by Chan's formula. `out`: the variance or its root; `second`: the mean.
struct Moments {
    using Value = float;
    struct State {
        float mean, squares, count;
    };
    RTK_DEVICE static State identity() { return {0.0f, 0.0f, 0.0f}; }
    template <int N>
    RTK_DEVICE static void absorb(State& s, float (&v)[N], i64, i64, const Lift&) {
        float mean = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) mean += v[i] * (1.0f / N);  // a sum of large ones may be infinite
#pragma unroll
        for (int i = 0; i < N; ++i) squares += N == 1 ? 0.0f : (v[i] - mean) * (v[i] - mean);
        s = combine(s, State{mean, squares, static_cast<float>(N)});
    }
    RTK_DEVICE static State combine(const State& a, const State& b) {
        if (a.count == 0.0f) return b;
        if (b.count == 0.0f) return a;
        const float count = a.count + b.count, delta = b.mean - a.mean, share = b.count * ptx::rcp(count);
        return {a.mean + delta * share, a.squares + b.squares + delta * delta * (a.count * share), count};
    }
    RTK_DEVICE static State exchanged(const State& s, int lanes) {
        constexpr u32 kAll = 0xffffffffu;
        return {__shfl_xor_sync(kAll, s.mean, lanes), __shfl_xor_sync(kAll, s.squares, lanes),
                __shfl_xor_sync(kAll, s.count, lanes)};
    }
    RTK_DEVICE static void finish(const State& s, const Finish& f, i64 at) {
        if (f.out != nullptr) {
            // An infinity or NaN among the elements makes the differences NaN, even for a single element, which has
            // none.
            const float squares = s.squares + (s.mean - s.mean);
            const float variance = squares / static_cast<float>(f.number);
            store_value(f.out, f.type, at, f.kind == kFinishRoot ? sqrtf(variance) : variance);
        }
        if (f.second != nullptr) store_value(f.second, f.type, at, s.mean);
    }
};

}  // namespace rtk
