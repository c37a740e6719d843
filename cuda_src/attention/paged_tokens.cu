// Lengths and pages for each row of packed queries with at most one query per sequence, for attention_decode.
//
// One block per row: row_lengths[row] is the number of keys of the sequence with this row, 0 if there is none, and
// row_table[row] has the pages of these keys. Entries after the last page are neither read nor written.
#include "attention/paged_rows.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(128)
    attention_paged_tokens(const i32* cu_q, const i32* lengths, const i32* table, i32* row_lengths, i32* row_table, i64 sequences,
                           i64 lkv, i64 page_size, i64 table_row) {
    const i64 row = blockIdx.x;
    const int batch = last_started(static_cast<int>(sequences), row, [&](int b) { return static_cast<i64>(cu_q[b]); });
    const Sequence sequence = sequence_at(batch, 0, lkv, cu_q, nullptr, lengths);
    const int keys = row >= sequence.q_row && row < sequence.q_row + static_cast<i64>(sequence.lq) ? sequence.keys : 0;
    if (threadIdx.x == 0) row_lengths[row] = keys;
    const int pages = static_cast<int>(ceil_div(keys, page_size));
    for (int i = static_cast<int>(threadIdx.x); i < pages; i += static_cast<int>(blockDim.x))
        row_table[row * table_row + i] = table[batch * table_row + i];
}

}  // namespace rtk
