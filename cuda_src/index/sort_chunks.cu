// Reorders chunks of rows, as a list of rows: source[r] is the row of x that row r of the result comes from, -1 if
// there is none (`inverse`: the row of the result that row r of x goes to).
//
// The lengths of the chunks are known on the device only. Every block computes where all of them begin, before and
// after, and then finds the chunk of each of its rows by bisection. Negative lengths count as 0, and chunks end at row
// `rows` of x at the latest. An entry of `order` that is not a chunk, or that repeats an earlier entry, stands for no
// rows.
#include "common/scan.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

RTK_DEVICE i64 integer_at(const void* list, i64 is_int64, i64 i) {
    return is_int64 ? static_cast<const i64*>(list)[i] : static_cast<const i32*>(list)[i];
}

inline constexpr int kAskedLines = 4;

// The index of the last of `count` ascending numbers that is not above `value`; the first one never is.
RTK_DEVICE int last_up_to(const u32* numbers, int count, u32 value) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (numbers[middle] <= value) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    chunk_rows(const void* counts, const void* order, i32* source, i64 chunk_count, i64 rows, i64 counts_int64,
               i64 order_int64, i64 inverse, const u8* x, i64 blocks, i64 prefetch_bytes) {
    extern __shared__ __align__(16) u32 memory[];
    ptx::launch_dependents();
    if (blockIdx.x >= blocks) {
        constexpr int kLine = 128;
        const i64 first = ((blockIdx.x - blocks) * kAskedLines * THREADS + threadIdx.x) * kLine;
#pragma unroll
        for (int k = 0; k < kAskedLines; ++k)
            if (first + k * THREADS * kLine < prefetch_bytes) ptx::prefetch_l2(x + first + k * THREADS * kLine);
        return;
    }
    const int chunks = static_cast<int>(chunk_count);
    const u32 limit = static_cast<u32>(rows);
    u32* begin = memory;              // [chunks + 1] of each chunk in x
    u32* target = begin + chunks + 1; // [chunks + 1] of each entry of `order` in the result
    u32* entry = target + chunks + 1; // [chunks] the first one that names a chunk, `chunks` if there is none
    const int own = static_cast<int>(threadIdx.x);
    i64 own_name = -1;  // loaded together with the first count
    if (own < chunks) own_name = integer_at(order, order_int64, own);
    const auto name = [&](int i) { return i == own ? own_name : integer_at(order, order_int64, i); };
    for (int c = own; c < chunks; c += THREADS) {
        begin[c] = static_cast<u32>(min(max(integer_at(counts, counts_int64, c), 0ll), rows));
        entry[c] = static_cast<u32>(chunks);
    }
    __syncthreads();
    for (int i = own; i < chunks; i += THREADS) {
        const i64 c = name(i);
        if (c >= 0 && c < chunk_count) atomicMin(&entry[c], static_cast<u32>(i));
    }
    exclusive_scan_up_to(
        chunks, limit, [&](int c) { return begin[c]; },
        [&](int c, u32 before, u32 sum) {
            begin[c] = before;
            if (c == chunks - 1) begin[chunks] = sum;
        });
    __syncthreads();
    for (int i = own; i < chunks; i += THREADS) {
        const i64 c = name(i);
        const bool named = c >= 0 && c < chunk_count && entry[c] == static_cast<u32>(i);
        target[i] = named ? begin[c + 1] - begin[c] : 0u;
    }
    __syncthreads();
    exclusive_scan_up_to(
        chunks, limit, [&](int i) { return target[i]; },
        [&](int i, u32 before, u32 sum) {
            target[i] = before;
            if (i == chunks - 1) target[chunks] = sum;
        });
    __syncthreads();
    const u32* starts = inverse ? begin : target;
    const i64 step = blocks * THREADS;
    for (i64 r = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; r < rows; r += step) {
        const u32 row = static_cast<u32>(r);
        i64 from = -1;
        if (row < starts[chunks]) {
            const int at = last_up_to(starts, chunks, row);
            const u32 inside = row - starts[at];
            if (!inverse) {
                from = begin[integer_at(order, order_int64, at)] + inside;
            } else if (entry[at] < static_cast<u32>(chunks)) {
                from = target[entry[at]] + inside;
            }
        }
        source[r] = static_cast<i32>(from);
    }
}

}  // namespace rtk
