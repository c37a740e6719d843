// Sorts long rows by radix, least significant digit first, 8 bits at a time; stable. Digits of all passes are counted
// in one read (radix_histogram), their starts computed (radix_begins), and each pass is one launch that reads and
// writes every element once (radix_sweep): a block ranks a tile in shared memory, and reads from the preceding tiles of
// the row how many of each digit they have (decoupled look-back), so that it knows where its own belong. A pass in
// which all elements of a row have the same digit is skipped, unless all are.
//
// Why this cannot deadlock:
// 1. A block claims its tile from a ticket, so the tiles before it have begun.
// 2. A block stores the counts of its tile before it waits for those of others.
// 3. So every count that is waited for comes from a running block that waits for nobody until then.
//
// counts: [rows][passes][256], then starts of digits; skips: [rows], a bit for each skipped pass. Words of look-back,
// [rows][tiles][256]: 0, or in the highest two bits whether the other 30 hold this tile's count (1) or that of all
// tiles up to it (2). A pass clears those of the next one. Memory between passes: keys as wide as x, and u32 indices,
// two of each. zeros: [rows], for floats without indices, or nullptr: 0, or ~(2 * index + sign) of a row's first zero.
// Keys of both zeros are equal, and all zeros of such a row get the sign of its first one.
#include "ptx/words.cuh"
#include "sort/radix_tile.cuh"

namespace rtk {

inline constexpr int kHistogramThreads = 256;
inline constexpr int kHistogramLoads = 8;
inline constexpr u32 kTileCount = 1u << 30;
inline constexpr u32 kRowCount = 2u << 30;
inline constexpr u32 kCountBits = kTileCount - 1;

// True if an element is a zero, and its sign.
template <typename T>
RTK_DEVICE bool is_zero(const Raw<sizeof(T)>& raw, u32& sign) {
    constexpr int kSignBit = sizeof(T) * 8 - 1;
    sign = raw.w[0] >> kSignBit & 1u;
    return (raw.w[0] & ((1u << kSignBit) - 1u)) == 0;
}

// Grid: rows * slices of `length` elements. counts and zeros are 0 before.
template <typename T>
__global__ void __launch_bounds__(kHistogramThreads)
    radix_histogram(const T* x, u32* counts, u32* zeros, i64 n, i64 slices, i64 length, i64 descending) {
    constexpr int kPasses = key_of<T>::kBits / 8;
    __shared__ u32 count[kPasses][kRadixDigits], first_zero;
    const int thread = static_cast<int>(threadIdx.x);
    const i64 row = blockIdx.x / slices, slice = blockIdx.x - row * slices;
    const i64 end = min((slice + 1) * length, n);
#pragma unroll
    for (int p = 0; p < kPasses; ++p) count[p][thread] = 0;
    if (thread == 0) first_zero = 0;
    u32 own_zero = 0;  // the first zero of this thread, which processes its elements in order
    __syncthreads();
    for (i64 at = slice * length + thread; at < end; at += kHistogramThreads * kHistogramLoads) {
        Raw<sizeof(T)> raw[kHistogramLoads];
#pragma unroll
        for (int i = 0; i < kHistogramLoads; ++i)
            if (at + i * kHistogramThreads < end) raw[i] = ptx::ld_keep<sizeof(T)>(x + row * n + at + i * kHistogramThreads);
#pragma unroll
        for (int i = 0; i < kHistogramLoads; ++i) {
            if (at + i * kHistogramThreads >= end) break;
            const KeyOf<T> k = key_of_raw<T>(raw[i], descending != 0);
            if constexpr (kIsFloat<T>) {
                u32 sign;
                if (own_zero == 0 && is_zero<T>(raw[i], sign))
                    own_zero = ~(2u * static_cast<u32>(at + i * kHistogramThreads) + sign);
            }
#pragma unroll
            for (int p = 0; p < kPasses; ++p) atomicAdd(&count[p][digit_of(k, 8 * p)], 1u);
        }
    }
    if (zeros != nullptr && own_zero != 0) atomicMax(&first_zero, own_zero);
    __syncthreads();
    if (thread == 0 && first_zero != 0) atomicMax(zeros + row, first_zero);
#pragma unroll
    for (int p = 0; p < kPasses; ++p)
        if (count[p][thread] != 0) atomicAdd(counts + (row * kPasses + p) * kRadixDigits + thread, count[p][thread]);
}

// Grid: rows; block: 256 threads, one per digit.
template <int kPasses>
__global__ void __launch_bounds__(kRadixDigits) radix_begins(u32* counts, u32* skips, i64 n) {
    __shared__ u32 sums[kRadixDigits / kWarp];
    const int digit = static_cast<int>(threadIdx.x), lane = digit % kWarp, warp = digit / kWarp;
    u32* mine = counts + static_cast<i64>(blockIdx.x) * kPasses * kRadixDigits + digit;
    u32 skipped = 0;
    for (int p = 0; p < kPasses; ++p, mine += kRadixDigits) {
        const u32 count = *mine;
        u32 up_to = sum_up_to_lane(count);
        if (lane == kWarp - 1) sums[warp] = up_to;
        if (__syncthreads_or(count == n)) skipped |= 1u << p;
        for (int w = 0; w < warp; ++w) up_to += sums[w];
        *mine = up_to - count;
        __syncthreads();
    }
    constexpr u32 kAll = (1u << kPasses) - 1u;
    if (digit == 0) skips[blockIdx.x] = skipped == kAll ? kAll >> 1 : skipped;
}

template <typename T>
struct RadixMemory {
    BitsOf<T>* keys;
    u32* list;
};

// Grid: rows * tiles; block: 256 threads. Dynamic shared memory: a key and, if there are indices, 4 bytes for each of a
// tile's 16 * threads places, and counts of digits [warps][256].
template <typename T>
__global__ void __launch_bounds__(kRadixThreads, kRadixBlocks<T>)
    radix_sweep(const T* x, BitsOf<T>* keys_a, u32* list_a, BitsOf<T>* keys_b, u32* list_b, BitsOf<T>* values, i64* indices,
                const u32* begins, const u32* skips, u32* words, u32* next_words, u32* ticket, const u32* zeros, i64 n,
                i64 tiles, i64 pass, i64 descending) {
    using Key = KeyOf<T>;
    constexpr int kPasses = key_of<T>::kBits / 8;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int places = threads * kRadixRounds, shift = static_cast<int>(pass) * 8;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 local[kRadixDigits], offsets[kRadixDigits], taken;
    Key* sorted = reinterpret_cast<Key*>(memory);
    u32* counts = reinterpret_cast<u32*>(sorted + places);
    u32* from = counts + threads / kWarp * kRadixDigits;
    if (thread == 0) taken = atomicAdd(ticket, 1u);
    __syncthreads();
    const i64 row = taken / tiles, tile = taken - row * tiles;
    const i64 word = static_cast<i64>(taken) * kRadixDigits + thread;
    if (thread < kRadixDigits) next_words[word] = 0;
    const u32 skipped = skips[row];
    if (skipped >> pass & 1u) return;
    const int done = __popc(~skipped & ((1u << pass) - 1u));
    const bool first = done == 0, last = ((1u << kPasses) - 1u & ~skipped) >> (pass + 1) == 0, listed = indices != nullptr;
    const RadixMemory<T> a{keys_a, list_a}, b{keys_b, list_b}, source = done % 2 ? a : b, target = done % 2 ? b : a;
    const i64 begin = row * n + tile * places;
    const int count = static_cast<int>(min(n - tile * places, static_cast<i64>(places)));
    Key keys[kRadixRounds];
    u32 ranks[kRadixRounds / 2], index[kRadixRounds];
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        const int place = radix_place(r, kRadixRounds);
        keys[r] = static_cast<Key>(~static_cast<Key>(0));
        index[r] = static_cast<u32>(tile * places + place);
        if (place < count) {
            keys[r] = first ? key(x + begin + place, descending != 0) : static_cast<Key>(source.keys[begin + place]);
            if (!first && listed) index[r] = source.list[begin + place];
        }
    }
    u32* own = counts + thread / kWarp * kRadixDigits;
    rank_in_warp(keys, kRadixRounds, shift, own, [&](int r, u32 rank) { ranks[r / 2] = r % 2 ? ranks[r / 2] | rank << 16 : rank; });
    u32 here = 0;  // of the digit that this thread owns
    begin_of_digits(counts, local, [&](int, u32 total) {
        here = total;
        ptx::st_word(words + word, (tile == 0 ? kRowCount : kTileCount) | total);
    });
    u32 unshared = static_cast<u32>(shift);  // recomputing digits takes fewer registers than keeping 16
    ptx::forget(unshared);
#pragma unroll
    for (int r = 0; r < kRadixRounds; ++r) {
        const u32 place = own[digit_of(keys[r], static_cast<int>(unshared))] + (ranks[r / 2] >> r % 2 * 16 & 0xffffu);
        sorted[place] = keys[r];
        if (listed) from[place] = index[r];
    }
    if (thread < kRadixDigits) {
        u32 before = 0;
        for (i64 earlier = word - kRadixDigits, left = tile; left > 0; --left, earlier -= kRadixDigits) {
            u32 found = ptx::ld_word(words + earlier);
            while (found == 0) found = ptx::ld_word(words + earlier);
            before += found & kCountBits;
            if (found & kRowCount) break;
        }
        if (tile > 0) ptx::st_word(words + word, kRowCount | (before + here));
        offsets[thread] = begins[(row * kPasses + pass) * kRadixDigits + thread] + before - local[thread];
    }
    __syncthreads();
    constexpr int kSignBit = sizeof(T) * 8 - 1;
    const BitsOf<T> zero = kIsFloat<T> && !listed && last ? static_cast<BitsOf<T>>(~zeros[row] & 1u) << kSignBit : 0;
    for (int place = thread; place < count; place += threads) {
        const Key k = sorted[place];
        const i64 to = row * n + (offsets[digit_of(k, shift)] + static_cast<u32>(place));
        if (last) {
            const u32 at = listed ? from[place] : 0;
            BitsOf<T> value = element_of_key<T>(k, descending != 0, listed ? x + row * n + at : nullptr);
            if (kIsFloat<T> && !listed && value == 0) value = zero;
            values[to] = value;
            if (listed) indices[to] = at;
        } else {
            target.keys[to] = static_cast<BitsOf<T>>(k);
            if (listed) target.list[to] = from[place];
        }
    }
}

}  // namespace rtk
