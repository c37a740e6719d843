// The state of a monoid over the threads that share a row: lanes of a warp, or all of a block of whole warps.
#pragma once
#include "common/reduce.cuh"
#include "reduce/monoids.cuh"

namespace rtk {

inline constexpr int kReduceThreads = 256;

// All threads of a group get the result. A group wider than a warp is the whole block, a power of two of at most
// kThreads threads; a second call needs a barrier before it.
template <typename M, int kThreads = kReduceThreads>
RTK_DEVICE typename M::State combined(typename M::State s, int threads) {
    __shared__ __align__(16) typename M::State parts[kThreads / kWarp];
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
        if (lanes < threads) s = M::combine(s, M::exchanged(s, lanes));
    if (threads <= kWarp) return s;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane == 0) parts[warp] = s;
    __syncthreads();
    s = parts[lane & (threads / kWarp - 1)];
#pragma unroll
    for (int lanes = kThreads / kWarp / 2; lanes > 0; lanes /= 2)
        if (lanes < threads / kWarp) s = M::combine(s, M::exchanged(s, lanes));
    return s;
}

// Two sums at a time.
struct PairSum {
    struct State {
        float a, b;
    };
    RTK_DEVICE static State identity() { return {0.0f, 0.0f}; }
    RTK_DEVICE static State combine(const State& x, const State& y) { return {x.a + y.a, x.b + y.b}; }
    RTK_DEVICE static State exchanged(const State& s, int lanes) {
        return {__shfl_xor_sync(0xffffffffu, s.a, lanes), __shfl_xor_sync(0xffffffffu, s.b, lanes)};
    }
};

}  // namespace rtk
