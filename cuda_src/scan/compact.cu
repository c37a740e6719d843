// Compacts the elements of a dense tensor that are not 0 (or whose flag is set; or, with `distinct`, that differ from
// the previous one), in order: counts them up to each slice of kCompactSlice elements, with a prefix sum by the last
// block; and, once the host knows the total, writes their coordinates or the elements of another tensor. A block owns a
// slice: it reads 16 bytes per thread, stores a byte for each element to shared memory, ranks 16 neighbours per thread
// by a block-wide scan, lists the chosen ones there, and writes its results contiguously. Grid: slices; block: 256
// threads.
#include "common/scan.cuh"
#include "common/values.cuh"

namespace rtk {

inline constexpr int kCompactThreads = 256;
inline constexpr int kCompactSlice = 4096;  // elements of a block
inline constexpr int kCompactWarps = kCompactThreads / kWarp;

template <typename T>
RTK_DEVICE bool nonzero(const T* x, i64 at) {
    ValueOf<T> v[1];
    values<T, 1>(ptx::ld_keep<sizeof(T)>(x + at), v);
    return v[0] != static_cast<ValueOf<T>>(0);
}

template <typename T>
RTK_DEVICE bool differs(const T* x, i64 at) {
    ValueOf<T> v[1], before[1];
    if (at == 0) return true;
    values<T, 1>(ptx::ld_keep<sizeof(T)>(x + at), v);
    values<T, 1>(ptx::ld_keep<sizeof(T)>(x + at - 1), before);
    return v[0] != before[0];
}

// A byte of 0 or 1 for each element of a slice, 0 past its end.
template <typename T>
RTK_DEVICE void flag_slice(const T* x, i64 begin, i64 end, bool aligned, bool distinct, u8* flags) {
    constexpr int kWidth = 16 / sizeof(T);
    const int thread = static_cast<int>(threadIdx.x);
    if (distinct) {
#pragma unroll 1
        for (int i = thread; i < kCompactSlice; i += kCompactThreads)
            flags[i] = begin + i < end && differs(x, begin + i) ? 1 : 0;
        return;
    }
    if (!aligned || end - begin < kCompactSlice) {
        for (int i = thread; i < kCompactSlice; i += kCompactThreads)
            flags[i] = begin + i < end && nonzero(x, begin + i) ? 1 : 0;
        return;
    }
    constexpr int kLoads = kCompactSlice / (kCompactThreads * kWidth);
    Raw<16> raw[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
        raw[k] = ptx::ld_keep<16>(x + begin + (k * kCompactThreads + thread) * kWidth);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
        ValueOf<T> v[kWidth];
        values<T, kWidth>(raw[k], v);
        u8* to = flags + (k * kCompactThreads + thread) * kWidth;
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            word |= (v[i] != static_cast<ValueOf<T>>(0) ? 1u : 0u) << (i % 4 * 8);
            if (i % 4 == 3) *reinterpret_cast<u32*>(to + i - 3) = word, word = 0;
        }
        if constexpr (kWidth == 2) *reinterpret_cast<u16*>(to) = static_cast<u16>(word);
    }
}

// The number of set flags among 16 neighbours from 16 * thread on.
RTK_DEVICE int flags_of_thread(const u8* flags) {
    const u32* words = reinterpret_cast<const u32*>(flags) + threadIdx.x * 4;
    int count = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) count += __popc(words[w]);
    return count;
}

// Prefix sums of `count` numbers, in place, by one block; returns the total. Each thread has eight neighbours at a
// time.
RTK_DEVICE i64 add_up(i64* numbers, i64 count) {
    constexpr int kEach = 8;
    __shared__ i64 sums[kCompactWarps];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    i64 before = 0;
    for (i64 begin = 0; begin < count; begin += kCompactThreads * kEach) {
        i64 own[kEach], sum = 0;
        const i64 first = begin + thread * kEach;
#pragma unroll
        for (int i = 0; i < kEach; ++i) own[i] = first + i < count ? numbers[first + i] : 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += own[i], own[i] = sum;
        i64 up_to = sum_up_to_lane(sum);
        if (lane == kWarp - 1) sums[warp] = up_to;
        __syncthreads();
        i64 all = 0;
#pragma unroll
        for (int w = 0; w < kCompactWarps; ++w) {
            if (w == warp) up_to += all;
            all += sums[w];
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (first + i < count) numbers[first + i] = before + up_to - sum + own[i];
        before += all;
        __syncthreads();
    }
    return before;
}

// ends: number of chosen elements up to the end of each slice; total: of all. ticket is 0 before, and after.
template <typename T>
__global__ void __launch_bounds__(kCompactThreads)
    compact_count(const T* x, i64* ends, i64* total, u32* ticket, i64 n, i64 aligned, i64 distinct) {
    __shared__ __align__(16) u8 flags[kCompactSlice];
    __shared__ int parts[kCompactWarps];
    __shared__ bool last;
    const i64 begin = static_cast<i64>(blockIdx.x) * kCompactSlice, end = min(begin + kCompactSlice, n);
    flag_slice(x, begin, end, aligned != 0, distinct != 0, flags);
    __syncthreads();
    const int own = __reduce_add_sync(0xffffffffu, flags_of_thread(flags));
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        int all = 0;
        for (int part : parts) all += part;
        ends[blockIdx.x] = all;
        __threadfence();
        last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const i64 sum = add_up(ends, gridDim.x);
    if (threadIdx.x == 0) *total = sum, *ticket = 0;
}

// `ends`: the counts of all slices up to each. With `source`, out[i] is its i-th chosen element, of item_bytes; else
// row i of out has the coordinates of element i, up to four, column by column. One thread finds those of the slice's
// first element with 64-bit divisions; the rest uses 32 bits. Sizes 1 to 3 are below 2^30, and dividers are those of
// ``divided``.
template <typename T>
__global__ void __launch_bounds__(kCompactThreads)
    compact_place(const T* x, const i64* ends, const u8* source, void* out, i64 n, i64 aligned, i64 item_bytes, i64 rank,
                  i64 size1, i64 size2, i64 size3, i64 divider1, i64 divider2, i64 divider3, i64 distinct, i64 out_col) {
    __shared__ __align__(16) u8 flags[kCompactSlice];
    __shared__ u16 chosen[kCompactSlice];
    __shared__ int parts[kCompactWarps];
    __shared__ i64 first[4];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const i64 begin = static_cast<i64>(blockIdx.x) * kCompactSlice, end = min(begin + kCompactSlice, n);
    const i64 sizes[4] = {0, size1, size2, size3}, dividers[4] = {0, divider1, divider2, divider3};
    if (thread == 0) {
        i64 rest = begin;
#pragma unroll
        for (int d = 3; d > 0; --d) {
            const i64 up = rest / sizes[d];
            first[d] = rest - up * sizes[d];
            rest = up;
        }
        first[0] = rest;
    }
    flag_slice(x, begin, end, aligned != 0, distinct != 0, flags);
    __syncthreads();
    const int own = flags_of_thread(flags);
    int up_to = sum_up_to_lane(own);
    if (lane == kWarp - 1) parts[warp] = up_to;
    __syncthreads();
    int rank_of = up_to - own, all = 0;
#pragma unroll
    for (int w = 0; w < kCompactWarps; ++w) {
        if (w < warp) rank_of += parts[w];
        all += parts[w];
    }
    for (int i = thread * 16; i < thread * 16 + 16; ++i)
        if (flags[i]) chosen[rank_of++] = static_cast<u16>(i);
    __syncthreads();
    const i64 place = blockIdx.x == 0 ? 0 : ends[blockIdx.x - 1];
    for (int i = thread; i < all; i += kCompactThreads) {
        const i64 at = begin + chosen[i], to = place + i;
        if (source != nullptr) {
            if (item_bytes == 1) static_cast<u8*>(out)[to] = source[at];
            if (item_bytes == 2) static_cast<u16*>(out)[to] = reinterpret_cast<const u16*>(source)[at];
            if (item_bytes == 4) static_cast<u32*>(out)[to] = reinterpret_cast<const u32*>(source)[at];
            if (item_bytes == 8) static_cast<u64*>(out)[to] = reinterpret_cast<const u64*>(source)[at];
            continue;
        }
        i64* row = static_cast<i64*>(out) + to;
        u32 carry = chosen[i];
#pragma unroll
        for (int d = 3; d > 0; --d) {
            if (d >= rank) continue;
            const u32 sum = static_cast<u32>(first[d]) + carry;
            carry = divided(sum, dividers[d]);
            row[d * out_col] = sum - carry * static_cast<u32>(sizes[d]);
        }
        row[0] = first[0] + carry;
    }
}

// Prefix sums never decrease if no repeat is negative.
RTK_DEVICE bool falls(const i64* ends, i64 at) { return ends[at] < (at == 0 ? 0 : ends[at - 1]); }

// found: the sum of `count` repeats, and whether one of them is negative; the latter is 0 before.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) repeat_total(const i64* ends, i64* found, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= count) return;
    if (falls(ends, at)) found[1] = 1;
    if (at == count - 1) found[0] = ends[at];
}

// out[i] is the index of the repeat that position i falls into: the first one whose `ends` exceeds i. Traps if a repeat
// is negative, or if their sum is not `total`, because the host may not have checked.
template <typename I>
__global__ void __launch_bounds__(kCompactThreads) repeat_place(const i64* ends, I* out, i64 count, i64 total) {
    const i64 at = static_cast<i64>(blockIdx.x) * kCompactThreads + threadIdx.x;
    for (i64 i = at; i < count; i += static_cast<i64>(gridDim.x) * kCompactThreads)
        if (falls(ends, i) || (i == count - 1 && ends[i] != total)) __trap();
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
