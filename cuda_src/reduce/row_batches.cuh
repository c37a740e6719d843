// The elements of a row that belong to one thread of a group, several vectors at a time: their loads are in flight
// together. Long rows are few, so an SM works on one of them and has nothing else to hide latency with.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

// Vectors that a thread reads together: in a pass that only reads, and in one with up to three operands.
#ifndef RTK_NORM_READS
#define RTK_NORM_READS 4
#endif
#ifndef RTK_NORM_WRITES
#define RTK_NORM_WRITES 2
#endif

// A compile-time number as a type, for lambdas.
template <int N>
struct Number {
    static constexpr int value = N;
};

// L vectors of N elements, `step` elements apart.
template <typename T, int N, int L>
RTK_DEVICE void load_all(const T* p, i64 step, Raw<sizeof(T) * N> (&raw)[L]) {
#pragma unroll
    for (int k = 0; k < L; ++k) raw[k] = ptx::ld_keep<sizeof(T) * N>(p + k * step);
}

// Calls f(place, step, Number<vectors>) for a thread's part of a row: L vectors at a time while there are so many.
template <int N, int L, typename F>
RTK_DEVICE void each_batch(i64 cols, const RowGroup& group, F&& f) {
    const i64 step = group.threads * N;
    i64 at = group.thread * N;
    for (; at + (L - 1) * step < cols; at += L * step) f(at, step, Number<L>{});
    for (; at < cols; at += step) f(at, step, Number<1>{});
}

}  // namespace rtk
