// What scans compute, from left to right: prefix sums, and running maxima with the index of the last of equal ones.
#pragma once
#include "common/values.cuh"

namespace rtk {

inline constexpr u32 kScanLanes = 0xffffffffu;

template <typename V>
struct RunningSum {
    using Value = V;
    struct State {
        V sum;
    };
    RTK_DEVICE static State identity() { return {static_cast<V>(0)}; }
    RTK_DEVICE static State of(V v, i64, bool) { return {v}; }
    RTK_DEVICE static State combine(const State& a, const State& b) { return {a.sum + b.sum}; }
    RTK_DEVICE static State from(const State& s, int lanes) { return {__shfl_up_sync(kScanLanes, s.sum, lanes)}; }
    RTK_DEVICE static State of_lane(const State& s, int lane) { return {__shfl_sync(kScanLanes, s.sum, lane)}; }
    RTK_DEVICE static V value(const State& s, bool) { return s.sum; }
    RTK_DEVICE static i64 index(const State&) { return 0; }
};

// NaN is larger than everything, and the last NaN counts. `flip`: minima.
template <typename V>
struct RunningMaximum {
    using Value = V;
    struct State {
        V value;
        int index;  // -1: nothing yet
    };
    RTK_DEVICE static V flipped(V v) {
        if constexpr (is_same<V, float>::value) return -v;
        return static_cast<V>(~static_cast<i64>(v));
    }
    RTK_DEVICE static State identity() { return {static_cast<V>(0), -1}; }
    RTK_DEVICE static State of(V v, i64 index, bool flip) { return {flip ? flipped(v) : v, static_cast<int>(index)}; }
    RTK_DEVICE static State combine(const State& a, const State& b) {
        if (a.index < 0) return b;
        if (b.index < 0) return a;
        return b.value != b.value || b.value >= a.value ? b : a;  // a NaN in `a` stays: it is not below anything
    }
    RTK_DEVICE static State from(const State& s, int lanes) {
        return {__shfl_up_sync(kScanLanes, s.value, lanes), __shfl_up_sync(kScanLanes, s.index, lanes)};
    }
    RTK_DEVICE static State of_lane(const State& s, int lane) {
        return {__shfl_sync(kScanLanes, s.value, lane), __shfl_sync(kScanLanes, s.index, lane)};
    }
    RTK_DEVICE static V value(const State& s, bool flip) { return flip ? flipped(s.value) : s.value; }
    RTK_DEVICE static i64 index(const State& s) { return s.index; }
};

// Stores of N neighbours: floats in one access, 64-bit integers by pairs, other integers one at a time.
template <typename Out, int N>
RTK_DEVICE void store_values(Out* y, const float (&v)[N]) {
    store<Out, N>(y, v);
}
template <typename Out, int N>
RTK_DEVICE void store_values(Out* y, const i64 (&v)[N]) {
    if constexpr (sizeof(Out) == 8 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            Raw<16> pair;
            pair.w[0] = static_cast<u32>(v[i]), pair.w[1] = static_cast<u32>(static_cast<u64>(v[i]) >> 32);
            pair.w[2] = static_cast<u32>(v[i + 1]), pair.w[3] = static_cast<u32>(static_cast<u64>(v[i + 1]) >> 32);
            ptx::st<16>(y + i, pair);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = static_cast<Out>(v[i]);
    }
}

}  // namespace rtk
