// Rows of packed queries whose heads share keys, and the sequences that they belong to.
#pragma once
#include "attention/masks.cuh"
#include "common/types.cuh"

namespace rtk {

inline constexpr int kPageUnit = 16;  // keys: sizes of pages are multiples of it

// The last of `sequences` for which start(b) <= at, 0 if there is none. start() increases; all lanes of a warp call this.
template <typename Start>
RTK_DEVICE int last_started(int sequences, i64 at, Start start) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int first = 0, count = sequences;
    while (count > 1) {
        const int step = (count + kWarp - 1) / kWarp;
        const bool started = lane * step < count && start(first + lane * step) <= at;
        const u32 votes = __ballot_sync(0xffffffffu, started);
        const int last = votes == 0u ? 0 : 31 - __clz(static_cast<int>(votes));
        first += last * step;
        count = min(step, count - last * step);
    }
    return first;
}

// Row r of a sequence: query r / group, head r % group of those that share keys.
struct PagedRow {
    int query, head;

    RTK_DEVICE PagedRow(int row, i64 group, i64 group_divisor) {
        query = static_cast<int>(divided(static_cast<u32>(row), group_divisor));
        head = row - query * static_cast<int>(group);
    }
};

// Keys that a row sees; rows are counted from row0 of the sequence.
struct PagedKeys {
    Mask mask;
    int row0;
    i64 group_divisor;

    RTK_DEVICE int query(int row) const { return static_cast<int>(divided(static_cast<u32>(row0 + row), group_divisor)); }
    RTK_DEVICE int lo(int row) const { return mask.lo(query(row)); }
    RTK_DEVICE int hi(int row) const { return mask.hi(query(row)); }
};

// A block's rows: `rows` of them from row0 on, none or less if the block has no rows.
struct PagedBlock {
    Sequence sequence;
    Interval any, all;  // keys that any row sees, and keys that all rows see
    int batch, head, row0, rows;

    RTK_DEVICE bool sees_whole(int j0, int keys) const { return all.first <= j0 && j0 + keys <= all.end; }
};

template <int BM>
RTK_DEVICE PagedBlock paged_block(int number, const i32* cu_q, const i32* lengths, int sequences, i64 group, i64 group_divisor,
                                  i64 lkv, i64 left, i64 right) {
    auto start = [&](int b) { return cu_q[b] * group / BM + b; };
    PagedBlock block;
    block.batch = last_started(sequences, number, start), block.head = 0;
    block.sequence = sequence_at(block.batch, 0, lkv, cu_q, nullptr, lengths);
    const i64 tile = number - start(block.batch);
    const i64 rest = tile < 0 ? 0 : block.sequence.lq * group - tile * BM;
    block.rows = static_cast<int>(min(rest, static_cast<i64>(BM)));
    block.row0 = static_cast<int>(tile) * BM;
    if (block.rows > 0) {
        const Mask mask(block.sequence, left, right);
        const int first = PagedRow(block.row0, group, group_divisor).query;
        const int last = PagedRow(block.row0 + block.rows - 1, group, group_divisor).query;
        block.any = mask.keys_any(first, last + 1), block.all = mask.keys_all(first, last + 1);
    }
    return block;
}

}  // namespace rtk
