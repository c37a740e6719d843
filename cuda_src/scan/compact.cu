// The elements of a dense tensor that are not 0 (or whose flag is set), in order: how many each slice of kCompactSlice elements
// has, and, when the counts are added up, their coordinates or the elements of another tensor. A block owns a slice; its
// threads go through it in order, 256 at a time, and ranks come from ballots.
#include "common/values.cuh"

namespace rtk {

inline constexpr int kCompactThreads = 256, kCompactSlice = 4096;

template <typename T>
RTK_DEVICE bool nonzero(const T* x, i64 at) {
    ValueOf<T> v[1];
    values<T, 1>(ptx::ld_keep<sizeof(T)>(x + at), v);
    return v[0] != static_cast<ValueOf<T>>(0);
}

template <typename T>
__global__ void __launch_bounds__(kCompactThreads) compact_count(const T* x, i64* counts, i64 n) {
    __shared__ int parts[kCompactThreads / kWarp];
    const i64 begin = static_cast<i64>(blockIdx.x) * kCompactSlice, end = min(begin + kCompactSlice, n);
    int own = 0;
    for (i64 at = begin + threadIdx.x; at < end; at += kCompactThreads) own += nonzero(x, at);
    own = __reduce_add_sync(0xffffffffu, own);
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int all = 0;
    for (int part : parts) all += part;
    counts[blockIdx.x] = all;
}

// `ends`: the counts of all slices up to each. With `source`, out[i] is its i-th chosen element, of item_bytes; else row i of
// out has the coordinates of element i, up to four, at strides out_row and out_col.
template <typename T>
__global__ void __launch_bounds__(kCompactThreads)
    compact_place(const T* x, const i64* ends, const u8* source, void* out, i64 n, i64 item_bytes, i64 rank, i64 size0,
                  i64 size1, i64 size2, i64 size3, i64 out_row, i64 out_col) {
    __shared__ u32 ballots[kCompactThreads / kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 begin = static_cast<i64>(blockIdx.x) * kCompactSlice, end = min(begin + kCompactSlice, n);
    i64 place = blockIdx.x == 0 ? 0 : ends[blockIdx.x - 1];
    for (i64 tile = begin; tile < end; tile += kCompactThreads) {
        const i64 at = tile + threadIdx.x;
        const bool chosen = at < end && nonzero(x, at);
        const u32 votes = __ballot_sync(0xffffffffu, chosen);
        if (lane == 0) ballots[warp] = votes;
        __syncthreads();
        i64 to = place + __popc(votes & ((1u << lane) - 1u));
        for (int w = 0; w < kCompactThreads / kWarp; ++w) {
            const int count = __popc(ballots[w]);
            if (w < warp) to += count;
            place += count;
        }
        __syncthreads();
        if (!chosen) continue;
        if (source != nullptr) {
            if (item_bytes == 1) static_cast<u8*>(out)[to] = source[at];
            if (item_bytes == 2) static_cast<u16*>(out)[to] = reinterpret_cast<const u16*>(source)[at];
            if (item_bytes == 4) static_cast<u32*>(out)[to] = reinterpret_cast<const u32*>(source)[at];
            if (item_bytes == 8) static_cast<u64*>(out)[to] = reinterpret_cast<const u64*>(source)[at];
            continue;
        }
        const i64 sizes[4] = {size0, size1, size2, size3};
        i64 rest = at;
#pragma unroll
        for (int d = 3; d >= 0; --d) {
            if (d >= rank) continue;
            const i64 up = rest / sizes[d];
            static_cast<i64*>(out)[to * out_row + d * out_col] = rest - up * sizes[d];
            rest = up;
        }
    }
}

// out[i] is the index of the repeat that position i falls into: the first one whose `ends` exceeds i.
template <typename I>
__global__ void __launch_bounds__(kCompactThreads) repeat_place(const i64* ends, I* out, i64 count, i64 total) {
    const i64 at = static_cast<i64>(blockIdx.x) * kCompactThreads + threadIdx.x;
    if (at >= total) return;
    i64 low = 0, high = count;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (ends[middle] > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    out[at] = static_cast<I>(low);
}

}  // namespace rtk
