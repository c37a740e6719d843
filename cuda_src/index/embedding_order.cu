// Orders tokens by row, for any number of them: list[i] = (row, token), rows ascending, tokens of a row ascending,
// tokens without a row as (-1, 0) at the end. A stable radix sort in passes over a digit of the row, two launches each,
// with one block per chunk of tokens (common/chunks.cuh: digits take the place of experts). The first pass reads ids,
// later ones the list of the previous pass. Blocks past the chunks write zeros to their share of `fill`.
#include "index/embedding_tokens.cuh"
#include "common/rank.cuh"

namespace rtk {

struct Keys {
    const void* list;
    bool ids;  // else (row, token) pairs
    Tokens table;
    int shift;
    i64 mask;

    RTK_DEVICE i64 entry(i64 i) const {
        if (!ids) return static_cast<const i64*>(list)[i];
        const i64 row = table.row_of(table.id(i));
        return row < 0 ? list_entry(-1, 0) : list_entry(static_cast<i32>(row), static_cast<u32>(i));
    }
    RTK_DEVICE int digit(i64 entry) const {
        const i32 row = entry_row(entry);
        return row < 0 ? -1 : static_cast<int>(row >> shift & mask);
    }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    order_count(const void* list, u8* table, i32* counters, u8* fill, i64 tokens, i64 per_chunk, i64 chunk_count,
                i64 digits, i64 width, i64 from_ids, i64 ids_int64, i64 rows, i64 start, i64 padding, i64 shift,
                i64 counter_count, i64 fill_from, i64 fill_bytes) {
    constexpr int kInFlight = 4;
    extern __shared__ __align__(16) u32 count[];  // [stride]
    ptx::launch_dependents();
    if (blockIdx.x >= chunk_count) return fill_zeros<THREADS>(fill + fill_from, fill_bytes, blockIdx.x - chunk_count);
    const ChunkTable chunks(table, width, chunk_count, digits);
    const Keys keys{list, from_ids != 0, Tokens{list, ids_int64 != 0, start, rows, padding}, static_cast<int>(shift),
                    digits - 1};
    const Chunk mine(tokens, per_chunk);
    for (int d = threadIdx.x; d < chunks.stride; d += THREADS) count[d] = 0;
    __syncthreads();
    ptx::wait_for_previous();
    for (i64 begin = mine.from; begin < mine.to; begin += kInFlight * THREADS) {
        int digit[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 i = begin + k * THREADS + threadIdx.x;
            digit[k] = -1;
            if (i < mine.to) digit[k] = keys.digit(keys.entry(i));
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) count_expert(count, digit[k]);
    }
    __syncthreads();
    chunks.write(blockIdx.x, count);
    if (blockIdx.x != 0) return;
    for (i64 i = threadIdx.x; i < counter_count; i += THREADS) counters[i] = 0;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    order_place(const void* list, const u8* table, i64* sorted, u8* fill, i64 tokens, i64 per_chunk, i64 chunk_count,
                i64 digits, i64 width, i64 from_ids, i64 ids_int64, i64 rows, i64 start, i64 padding, i64 shift, i64 warps,
                i64 fill_from, i64 fill_bytes) {
    extern __shared__ __align__(16) u32 memory[];
    ptx::launch_dependents();
    if (blockIdx.x >= chunk_count) return fill_zeros<THREADS>(fill + fill_from, fill_bytes, blockIdx.x - chunk_count);
    const ChunkTable chunks(table, width, chunk_count, digits);
    const RowLayout layout(memory, chunks, digits, tokens, 1);
    const Keys keys{list, from_ids != 0, Tokens{list, ids_int64 != 0, start, rows, padding}, static_cast<int>(shift),
                    digits - 1};
    if (!from_ids) ptx::wait_for_previous();
    place_chunk<THREADS>(
        layout, chunks, Chunk(tokens, per_chunk), static_cast<int>(warps),
        [&](i64 i) { return keys.digit(keys.entry(i)); },
        [&](i64 i, int digit, u32 place) {
            if (digit >= 0) sorted[place] = keys.entry(i);
        });
    for (i64 i = layout.first[digits] + static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < tokens;
         i += chunk_count * THREADS)
        sorted[i] = list_entry(-1, 0);
}

}  // namespace rtk
