// Sorts rows of up to 4096 elements, one block per row, stable: radix passes of 8 bits, least significant first, all in
// shared memory. Keys of up to 16 bits share a word with their index. x: [rows][n] dense; values and indices: the same;
// null indices are not written. Grid: rows; block: a warp per 32 * rounds elements, up to 16 rounds (radix_tile.cuh):
// short rows have fewer, so that more threads share them.
// Dynamic shared memory, for `places` = rounds * threads: counts of digits [warps][256], keys, and 2 bytes of index per
// place.
#include "sort/radix_tile.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(kRadixThreads, kRadixBlocks<T>)
    block_sort(const T* x, BitsOf<T>* values, i64* indices, i64 n, i64 rounds_, i64 descending) {
    using Key = KeyOf<T>;
    constexpr int kBits = key_of<T>::kBits;
    constexpr bool kPacked = kBits <= 16;  // the index is in the low half of a word, the key above it
    constexpr int kBegin = kPacked ? 16 : 0;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int count = static_cast<int>(n), rounds = static_cast<int>(rounds_), places = threads * rounds;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 begins[kRadixDigits];
    Key* sorted = reinterpret_cast<Key*>(memory);
    u32* counts = reinterpret_cast<u32*>(sorted + places);
    u16* from = reinterpret_cast<u16*>(counts + threads / kWarp * kRadixDigits);
    const i64 row = static_cast<i64>(blockIdx.x) * n;
    Key keys[kRadixRounds];
    u32 index[kRadixRounds];  // in the low half, above it the rank
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        if (r >= rounds) break;
        const int place = radix_place(r, rounds);
        index[r] = kPacked ? 0 : static_cast<u32>(place);
        keys[r] = static_cast<Key>(~static_cast<Key>(0));
        if (place < count) {
            keys[r] = key(x + row + place, descending != 0);
            if constexpr (kPacked) keys[r] = keys[r] << 16 | static_cast<u32>(place);
        }
    }
    for (int shift = kBegin; shift < kBegin + kBits; shift += 8) {
        u32* own = counts + thread / kWarp * kRadixDigits;
        rank_in_warp(keys, rounds, shift, own, [&](int r, u32 rank) { index[r] |= rank << 16; });
        begin_of_digits(counts, begins, [](int, u32) {});
        u32 unshared = static_cast<u32>(shift);  // recomputing digits takes fewer registers than keeping 16
        ptx::forget(unshared);
#pragma unroll
        for (int r = 0; r < kRadixRounds; ++r) {
            if (r >= rounds) break;
            const u32 place = own[digit_of(keys[r], static_cast<int>(unshared))] + (index[r] >> 16);
            sorted[place] = keys[r];
            if constexpr (!kPacked) from[place] = static_cast<u16>(index[r]);
        }
        __syncthreads();
        if (shift + 8 < kBegin + kBits) {
#pragma unroll
            for (int r = 0; r < kRadixRounds; ++r) {
                if (r >= rounds) break;
                keys[r] = sorted[radix_place(r, rounds)];
                index[r] = kPacked ? 0 : from[radix_place(r, rounds)];
            }
        }
    }
    for (int place = thread; place < count; place += threads) {
        const Key k = sorted[place];
        const u32 at = kPacked ? static_cast<u32>(k) & 0xffffu : from[place];
        values[row + place] = element_of_key<T>(kPacked ? k >> kBegin : k, descending != 0, x + row + at);
        if (indices != nullptr) indices[row + place] = at;
    }
}

}  // namespace rtk
