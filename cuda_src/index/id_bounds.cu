// Where stretches of equal ids begin in a sorted list of n: bounds[j] is the position of the j-th start, n after the
// last one, j <= n. A block owns a slice of kBoundsSlice ids and the same slice of bounds; a warp owns kBoundsSteps *
// 32 neighbours and keeps a mask of starts per step. Several slices take two launches: id_bounds_count writes the
// number of starts of each slice, and each block of id_bounds_place sums those before its own. Grid: slices of n + 1;
// block: kBoundsThreads.
#include "common/scan.cuh"

namespace rtk {

inline constexpr int kBoundsThreads = 256;
inline constexpr int kBoundsSteps = 16;
inline constexpr int kBoundsWarps = kBoundsThreads / kWarp;
inline constexpr int kBoundsSlice = kBoundsThreads * kBoundsSteps;

// Masks of starts among the neighbours of a warp from `first` on; returns how many there are.
template <typename I>
RTK_DEVICE int mask_begins(const I* ids, i64 first, i64 n, u32 (&masks)[kBoundsSteps]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int count = 0;
#pragma unroll
    for (int k = 0; k < kBoundsSteps; ++k) {
        const i64 at = first + k * kWarp + lane;
        const bool begins = at < n && (at == 0 || ids[at] != ids[at - 1]);
        masks[k] = __ballot_sync(kAllLanes, begins);
        count += __popc(masks[k]);
    }
    return count;
}

template <typename I>
__global__ void __launch_bounds__(kBoundsThreads) id_bounds_count(const I* ids, i32* counts, i64 n) {
    __shared__ int parts[kBoundsWarps];
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    u32 masks[kBoundsSteps];
    const i64 first = (static_cast<i64>(blockIdx.x) * kBoundsWarps + warp) * (kBoundsSteps * kWarp);
    const int own = mask_begins(ids, first, n, masks);
    if (threadIdx.x % kWarp == 0) parts[warp] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int sum = 0;
    for (int part : parts) sum += part;
    counts[blockIdx.x] = sum;
}

// counts: of all slices; not read if there is one.
template <typename I>
__global__ void __launch_bounds__(kBoundsThreads) id_bounds_place(const I* ids, const i32* counts, i32* bounds, i64 n) {
    __shared__ int parts[3][kBoundsWarps];  // starts of a warp; of the slices before this one, and of all, that its threads summed
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int slices = static_cast<int>(gridDim.x), slice = static_cast<int>(blockIdx.x);
    u32 masks[kBoundsSteps];
    const i64 begin = static_cast<i64>(slice) * kBoundsSlice, first = begin + warp * (kBoundsSteps * kWarp);
    const int own = mask_begins(ids, first, n, masks);
    int before = 0, all = 0;
    for (int i = thread; slices > 1 && i < slices; i += kBoundsThreads) {
        const int count = counts[i];
        if (i < slice) before += count;
        all += count;
    }
    before = sum_up_to_lane(before), all = sum_up_to_lane(all);
    if (lane == kWarp - 1) parts[0][warp] = own, parts[1][warp] = before, parts[2][warp] = all;
    __syncthreads();
    int at = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kBoundsWarps; ++w) {
        if (w < warp) at += parts[0][w];
        at += parts[1][w];
        total += slices > 1 ? parts[2][w] : parts[0][w];
    }
#pragma unroll
    for (int k = 0; k < kBoundsSteps; ++k) {
        if (masks[k] >> lane & 1u) bounds[at + __popc(masks[k] & ((1u << lane) - 1u))] = static_cast<i32>(first + k * kWarp + lane);
        at += __popc(masks[k]);
    }
    for (i64 j = begin + thread; j < min(begin + kBoundsSlice, n + 1); j += kBoundsThreads)
        if (j >= total) bounds[j] = static_cast<i32>(n);
}

}  // namespace rtk
