// Prefix sums over lanes and threads; those of 32-bit counts saturate at a limit (below 2^31) instead of wrapping
// around.
#pragma once
#include "common/abi.cuh"

namespace rtk {

inline constexpr u32 kAllLanes = 0xffffffffu;

// Sum over the lanes of a warp up to this one.
template <typename T>
RTK_DEVICE T sum_up_to_lane(T v) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const T lower = __shfl_up_sync(kAllLanes, v, offset);
        if (lane >= offset) v += lower;
    }
    return v;
}
RTK_DEVICE u32 scan_up_to(u32 v, u32 limit) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const u32 lower = __shfl_up_sync(kAllLanes, v, offset);
        if (lane >= offset) v = min(v + lower, limit);
    }
    return v;
}

// The items of this thread in a scan over n.
struct ScanItems {
    int from, to;
    RTK_DEVICE explicit ScanItems(int n) {
        const int threads = static_cast<int>(blockDim.x), each = (n + threads - 1) / threads;
        from = min(static_cast<int>(threadIdx.x) * each, n);
        to = min(from + each, n);
    }
};

// Calls write(i, sum of read(0) ... read(i - 1), the same with read(i)) for i < n. read(i), at most `limit`, is called
// twice, by the thread that calls write(i), which may change what it reads. A thread owns consecutive items. The whole
// block calls this; one barrier inside, none at the end.
template <typename Read, typename Write>
RTK_DEVICE void exclusive_scan_up_to(int n, u32 limit, const Read& read, const Write& write) {
    __shared__ u32 sums[kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int threads = static_cast<int>(blockDim.x);
    const auto [from, to] = ScanItems(n);
    u32 own = 0;
    for (int i = from; i < to; ++i) own = min(own + read(i), limit);
    const u32 sum = scan_up_to(own, limit);
    const u32 left = __shfl_up_sync(kAllLanes, sum, 1);
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();
    const u32 warps = scan_up_to(lane < threads / kWarp ? sums[lane] : 0u, limit);
    const u32 earlier = __shfl_sync(kAllLanes, warps, max(warp - 1, 0));
    u32 at = min((warp == 0 ? 0u : earlier) + (lane == 0 ? 0u : left), limit);
    for (int i = from; i < to; ++i) {
        const u32 next = min(at + read(i), limit);
        write(i, at, next);
        at = next;
    }
}

}  // namespace rtk
