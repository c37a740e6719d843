// Stable ranks of a tile's elements by one 8-bit digit; shared by block_sort.cu and radix.cu.
// A tile is up to 8 warps of up to 512 elements: a warp owns consecutive ones, up to 16 rounds of 32. Places past the
// last element have a key of all ones: they come last in every pass, after elements with the same key.
#pragma once
#include "common/scan.cuh"
#include "ptx/forget.cuh"
#include "sort/keys.cuh"

namespace rtk {

inline constexpr int kRadixDigits = 256;
inline constexpr int kRadixRounds = 16;
inline constexpr int kRadixThreads = 256;
template <typename T>
inline constexpr int kRadixBlocks = sizeof(T) == 8 || sizeof(T) == 1 ? 2 : 3;  // blocks per SM, by their registers

template <typename Key>
RTK_DEVICE u32 digit_of(Key key, int shift) {
    return static_cast<u32>(key >> shift) & (kRadixDigits - 1);
}

// Position of this thread's element of a round in the tile.
RTK_DEVICE int radix_place(int round, int rounds) {
    const int thread = static_cast<int>(threadIdx.x);
    return thread / kWarp * rounds * kWarp + round * kWarp + thread % kWarp;
}

// Calls put(r, rank), where rank is the number of earlier elements of the warp with the same digit. counts: the warp's
// own of all digits.
template <typename Key, typename F>
RTK_DEVICE void rank_in_warp(const Key (&keys)[kRadixRounds], int rounds, int shift, u32* counts, F&& put) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const u32 lower = (1u << lane) - 1u;
    for (int d = lane; d < kRadixDigits; d += kWarp) counts[d] = 0;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        if (r >= rounds) break;
        const u32 digit = digit_of(keys[r], shift);
        u32 same = 0xffffffffu;
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            const u32 ones = __ballot_sync(0xffffffffu, digit >> b & 1u);
            same &= digit >> b & 1u ? ones : ~ones;
        }
        const u32 before = counts[digit];
        put(r, before + __popc(same & lower));
        __syncwarp();
        if ((same & lower) == 0) counts[digit] = before + __popc(same);
        __syncwarp();
    }
}

// Turns the warps' counts into the positions in the tile where each warp's elements of a digit begin, and `begins` into
// those of the digits. total(d, n) is called by the thread that owns digit d: the tile has n elements with it.
template <typename F>
RTK_DEVICE void begin_of_digits(u32* counts, u32* begins, F&& total) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), warps = threads / kWarp;
    __syncthreads();
    for (int d = thread; d < kRadixDigits; d += threads) {
        u32 sum = 0;
        for (int w = 0; w < warps; ++w) sum += counts[w * kRadixDigits + d];
        begins[d] = sum;
        total(d, sum);
    }
    __syncthreads();
    if (thread < kWarp) {
        constexpr int kEach = kRadixDigits / kWarp;
        u32 sums[kEach], sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sums[i] = sum, sum += begins[thread * kEach + i];
        const u32 before = sum_up_to_lane(sum);
#pragma unroll
        for (int i = 0; i < kEach; ++i) begins[thread * kEach + i] = before - sum + sums[i];
    }
    __syncthreads();
    for (int d = thread; d < kRadixDigits; d += threads) {
        u32 place = begins[d];
        for (int w = 0; w < warps; ++w) {
            const u32 count = counts[w * kRadixDigits + d];
            counts[w * kRadixDigits + d] = place;
            place += count;
        }
    }
    __syncthreads();
}

template <int kBytes>
struct bits_of {
    using type = u32;
};
template <>
struct bits_of<1> {
    using type = u8;
};
template <>
struct bits_of<2> {
    using type = u16;
};
template <>
struct bits_of<8> {
    using type = u64;
};
template <typename T>
using BitsOf = typename bits_of<sizeof(T)>::type;  // elements that are copied, and keys in memory

// The element of a key, or, where several elements have this key (zeros, NaNs), the one at `from`; any of them if that
// is nullptr.
template <typename T>
RTK_DEVICE BitsOf<T> element_of_key(KeyOf<T> key, bool descending, const T* from) {
    if (descending) key = ~key;
    if constexpr (sizeof(T) == 8) {
        return key ^ 0x8000000000000000ull;
    } else if constexpr (is_same<T, i32>::value) {
        return key ^ 0x80000000u;
    } else if constexpr (is_same<T, u8>::value) {
        return static_cast<u8>(key);
    } else {
        constexpr u32 kSign = 1u << (sizeof(T) * 8 - 1), kAll = kSign | (kSign - 1u);
        key &= kAll;
        if (from != nullptr && (key == kAll || key == kSign))
            return static_cast<BitsOf<T>>(ptx::ld_keep<sizeof(T)>(from).w[0]);
        return static_cast<BitsOf<T>>(key & kSign ? key ^ kSign : ~key);
    }
}

}  // namespace rtk
