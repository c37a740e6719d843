// Long rows sorted by radix, least significant digit first, 8 bits at a time; stable. Each pass is two launches with a scan
// between them: radix_count writes how often each slice of a row has each digit, counts[row][digit][slice]; radix_place, given
// their running sums, puts keys and indices where they belong. The first pass makes keys of x, the last one writes values and
// indices. A block owns a slice of kRadixSlice elements, a warp consecutive ones of it; ranks among equal digits come from ballots.
// Grid: rows * slices; block: 256 threads.
#include "sort/keys.cuh"

namespace rtk {

inline constexpr int kRadixThreads = 256, kRadixWarps = kRadixThreads / kWarp, kRadixRounds = 8, kRadixDigits = 256;
inline constexpr int kRadixSlice = kRadixThreads * kRadixRounds;

template <typename T>
struct RadixInput {
    const T* x;
    const KeyOf<T>* keys;  // nullptr in the first pass
    bool descending;

    RTK_DEVICE KeyOf<T> at(i64 i) const { return keys == nullptr ? key(x + i, descending) : keys[i]; }
};

template <typename T>
__global__ void __launch_bounds__(kRadixThreads)
    radix_count(const T* x, const void* keys, i64* counts, i64 n, i64 slices, i64 shift, i64 descending) {
    __shared__ u32 count[kRadixDigits];
    const i64 row = blockIdx.x / slices, slice = blockIdx.x - row * slices;
    const RadixInput<T> input{x, static_cast<const KeyOf<T>*>(keys), descending != 0};
    const i64 begin = slice * kRadixSlice, end = min(begin + kRadixSlice, n);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (i64 at = begin + threadIdx.x; at < end; at += kRadixThreads)
        atomicAdd(&count[static_cast<u32>(input.at(row * n + at) >> shift) & (kRadixDigits - 1)], 1u);
    __syncthreads();
    counts[(row * kRadixDigits + threadIdx.x) * slices + slice] = count[threadIdx.x];
}

template <typename T>
__global__ void __launch_bounds__(kRadixThreads)
    radix_place(const T* x, const void* keys, const u32* list, const i64* ends, void* keys_out, u32* list_out, T* values_out,
                i64* indices, i64 n, i64 slices, i64 shift, i64 descending) {
    using Key = KeyOf<T>;
    __shared__ u32 count[kRadixWarps][kRadixDigits];
    __shared__ i64 begins[kRadixDigits];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 row = blockIdx.x / slices, slice = blockIdx.x - row * slices;
    const RadixInput<T> input{x, static_cast<const Key*>(keys), descending != 0};
    const i64 end = min((slice + 1) * kRadixSlice, n);
    const i64 first = slice * kRadixSlice + warp * kRadixRounds * kWarp + lane;
    const u32 lower = (1u << lane) - 1u;
    for (int d = lane; d < kRadixDigits; d += kWarp) count[warp][d] = 0;
    __syncwarp();
    Key k[kRadixRounds];
    u32 rank[kRadixRounds];
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        const i64 at = first + r * kWarp;
        const bool active = at < end;
        k[r] = active ? input.at(row * n + at) : static_cast<Key>(0);
        const u32 digit = static_cast<u32>(k[r] >> shift) & (kRadixDigits - 1);
        u32 same = __ballot_sync(0xffffffffu, active);
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            const u32 ones = __ballot_sync(0xffffffffu, digit >> b & 1u);
            same &= digit >> b & 1u ? ones : ~ones;
        }
        const u32 before = active ? count[warp][digit] : 0u;
        rank[r] = before + __popc(same & lower);
        __syncwarp();
        if (active && (same & lower) == 0) count[warp][digit] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    // Where each digit of this slice begins in the row, and how many of it earlier warps have: thread d has digit d.
    const i64 place = (row * kRadixDigits + threadIdx.x) * slices + slice;
    u32 earlier = 0;
#pragma unroll
    for (int w = 0; w < kRadixWarps; ++w) {
        const u32 here = count[w][threadIdx.x];
        count[w][threadIdx.x] = earlier;
        earlier += here;
    }
    begins[threadIdx.x] = ends[place] - earlier;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        const i64 at = first + r * kWarp;
        if (at >= end) break;
        const u32 digit = static_cast<u32>(k[r] >> shift) & (kRadixDigits - 1);
        const i64 to = row * n + begins[digit] + count[warp][digit] + rank[r];
        const u32 index = list == nullptr ? static_cast<u32>(at) : list[row * n + at];
        if (indices != nullptr) {
            indices[to] = index;
            values_out[to] = x[row * n + index];
        } else {
            static_cast<Key*>(keys_out)[to] = k[r];
            list_out[to] = index;
        }
    }
}

}  // namespace rtk
