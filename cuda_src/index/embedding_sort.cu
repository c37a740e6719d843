// Orders tokens by row: list[i] = (row, token), equal rows adjacent with their tokens ascending, tokens without a row
// as (-1, 0) at the end. For up to 1024 * ROUNDS tokens.
//
// Rows are ordered by a key, row * odd number modulo a power of two: the top bits of keys spread over `bins` blocks
// however the ids cluster. Each block reads all ids, keeps those of its bin in order, and counts those of lower bins,
// so it knows where its part of the list begins without communicating with other blocks. It then sorts its ids by the
// remaining key bits in shared memory: a stable radix sort, whose time is bounded even if all tokens are the same.
// Blocks past the bins write zeros to `fill` meanwhile.
#include "common/scan.cuh"
#include "index/embedding_tokens.cuh"

namespace rtk {

inline constexpr int kSortThreads = 1024;
inline constexpr int kSortWarps = kSortThreads / kWarp;
inline constexpr int kTokenBits = 14;
inline constexpr int kDigitBits = 6;
inline constexpr int kDigits = 1 << kDigitBits;
// Inverse of each other modulo 2^32.
inline constexpr u32 kSpread = 0x9E3779B1u;
inline constexpr u32 kCollect = 0x0e8b2f51u;
inline constexpr u32 kNobody = 0xffffffffu;

struct SortScratch {
    u32 count[kSortWarps][kDigits + 1];  // one column of padding: a scan reads down the columns
    u32 total[3][kSortWarps];
};

// Sum of a number over the block, and over the warps before this one. Each slot is used once per kernel.
struct BlockSum {
    u32 all, before;
    RTK_DEVICE BlockSum(const u32 (&slot)[kSortWarps]) {
        const u32 v = slot[threadIdx.x % kWarp];
        all = __reduce_add_sync(kAllLanes, v);
        before = __reduce_add_sync(kAllLanes, threadIdx.x % kWarp < threadIdx.x / kWarp ? v : 0u);
    }
};

// One stable pass over `count` keys by the digit at `shift`.
template <int ROUNDS>
RTK_DEVICE void sort_pass(u32* keys, int count, int shift, SortScratch& scratch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int rounds = (count + kSortThreads - 1) / kSortThreads;
    const int first = warp * rounds * kWarp + lane;
    const u32 lower = (1u << lane) - 1u;
    u32(&mine)[kDigits + 1] = scratch.count[warp];
    for (int d = lane; d < kDigits; d += kWarp) mine[d] = 0;
    __syncwarp();
    u32 key[ROUNDS], rank[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        key[r] = kNobody;
        if (r < rounds) {
            const int at = first + r * kWarp;
            const bool active = at < count;
            if (active) key[r] = keys[at];
            const u32 digit = key[r] >> shift & (kDigits - 1);
            u32 same = __ballot_sync(kAllLanes, active);
#pragma unroll
            for (int b = 0; b < kDigitBits; ++b) {
                const u32 ones = __ballot_sync(kAllLanes, digit >> b & 1u);
                same &= digit >> b & 1u ? ones : ~ones;
            }
            const u32 before = active ? mine[digit] : 0u;
            rank[r] = before + __popc(same & lower);
            __syncwarp();
            if (active && (same & lower) == 0) mine[digit] = before + __popc(same);
            __syncwarp();
        }
    }
    __syncthreads();
    // Where each (digit, warp) begins: thread t sums two warps of digit t / 16.
    const int digit = threadIdx.x / (kSortWarps / 2), pair = threadIdx.x % (kSortWarps / 2) * 2;
    const u32 first_count = scratch.count[pair][digit], second_count = scratch.count[pair + 1][digit];
    u32 sum = first_count + second_count;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const u32 left = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += left;
    }
    if (lane == kWarp - 1) scratch.total[0][warp] = sum;
    __syncthreads();
    const u32 start = BlockSum(scratch.total[0]).before + sum - first_count - second_count;
    scratch.count[pair][digit] = start;
    scratch.count[pair + 1][digit] = start + first_count;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (r < rounds && first + r * kWarp < count) keys[mine[key[r] >> shift & (kDigits - 1)] + rank[r]] = key[r];
    __syncthreads();
}

template <int ROUNDS>
__global__ void __launch_bounds__(kSortThreads)
    embedding_sort(const void* ids, i64* list, i32* counters, u8* fill, i64 tokens, i64 rows, i64 start, i64 padding,
                   i64 ids_int64, i64 key_bits, i64 bin_bits, i64 counter_count, i64 fill_bytes) {
    extern __shared__ __align__(16) u8 memory[];  // 4 bytes for each token
    __shared__ SortScratch scratch;
    ptx::launch_dependents();
    const int bins = 1 << bin_bits;
    if (blockIdx.x >= bins) {
        fill_zeros<kSortThreads>(fill, fill_bytes, blockIdx.x - bins);
        return;
    }
    u32* keys = reinterpret_cast<u32*>(memory);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int count = static_cast<int>(tokens);
    const int rounds = (count + kSortThreads - 1) / kSortThreads;
    const int first = warp * rounds * kWarp + lane;
    const int low_bits = static_cast<int>(key_bits - bin_bits);
    const u32 key_mask = static_cast<u32>((1ll << key_bits) - 1), low_mask = (1u << low_bits) - 1u;
    const u32 bin = blockIdx.x;
    const Tokens table{ids, ids_int64 != 0, start, rows, padding};

    u32 key[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int token = first + r * kWarp;
        i64 row = -1;
        if (r < rounds && token < count) row = table.row_of(table.id(token));
        key[r] = row < 0 ? kNobody : static_cast<u32>(row) * kSpread & key_mask;
    }
    u32 kept = 0, below = 0, valid = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const bool has_row = key[r] != kNobody;
        valid += has_row;
        below += has_row && key[r] >> low_bits < bin;
        if (has_row && key[r] >> low_bits == bin) {
            ++kept;
            key[r] = (key[r] & low_mask) << kTokenBits | static_cast<u32>(first + r * kWarp);
        } else {
            key[r] = kNobody;
        }
    }
    kept = __reduce_add_sync(kAllLanes, kept);
    below = __reduce_add_sync(kAllLanes, below);
    valid = __reduce_add_sync(kAllLanes, valid);
    if (lane == 0) scratch.total[0][warp] = kept, scratch.total[1][warp] = below, scratch.total[2][warp] = valid;
    __syncthreads();
    const BlockSum keep(scratch.total[0]);
    const u32 base = BlockSum(scratch.total[1]).all, all = BlockSum(scratch.total[2]).all;
    const int size = static_cast<int>(keep.all);
    u32 next = keep.before;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        if (r < rounds) {
            const u32 members = __ballot_sync(kAllLanes, key[r] != kNobody);
            if (key[r] != kNobody) keys[next + __popc(members & ((1u << lane) - 1u))] = key[r];
            next += __popc(members);
        }
    }
    __syncthreads();
    if (size > 1)
        for (int bit = 0; bit < low_bits; bit += kDigitBits)
            sort_pass<ROUNDS>(keys, size, kTokenBits + bit, scratch);
    for (int i = threadIdx.x; i < size; i += kSortThreads) {
        const u32 packed = keys[i];
        const u32 whole = static_cast<u32>(static_cast<u64>(bin) << low_bits) | packed >> kTokenBits;
        list[base + i] = list_entry(static_cast<i32>(whole * kCollect & key_mask), packed & ((1u << kTokenBits) - 1u));
    }
    if (bin != 0) return;
    for (int i = static_cast<int>(all) + threadIdx.x; i < count; i += kSortThreads) list[i] = list_entry(-1, 0);
    for (i64 i = threadIdx.x; i < counter_count; i += kSortThreads) counters[i] = 0;
}

}  // namespace rtk
