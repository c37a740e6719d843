// A block's queries and its loop over key tiles, as the mma.sync kernels use it.
#pragma once
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"

namespace rtk {

// Blocks are ordered so that query tiles with the most key tiles come first (HeadTile orders the heads). A kernel keeps
// its copy in shared memory because registers are needed for accumulators.
struct QueryBlock {
    Sequence sequence;
    Interval all;  // keys that all queries of the block see
    int batch, head, i0;
    int begin, end;  // tiles of keys

    RTK_DEVICE bool exists() const { return i0 < sequence.lq; }
    // True if all queries of the block see all `keys` keys from j0 on.
    RTK_DEVICE bool sees_whole(int j0, int keys) const { return all.first <= j0 && j0 + keys <= all.end; }
    // Where the first query's row of a tensor begins, and the first row of the sequence; in elements.
    RTK_DEVICE i64 first_query(i64 batch_stride, i64 row_stride, i64 head_stride) const {
        return batch * batch_stride + (sequence.q_row + static_cast<i64>(i0)) * row_stride + head * head_stride;
    }
    RTK_DEVICE i64 first_key(i64 batch_stride, i64 row_stride, i64 head_stride, i64 group) const {
        return batch * batch_stride + static_cast<i64>(sequence.k_row) * row_stride + head / static_cast<int>(group) * head_stride;
    }
};

// `limited`: queries have limits of their own, so no tile is known to be fully visible.
template <int BM, int BN>
RTK_DEVICE QueryBlock query_block(i64 tiles, i64 section, i64 pairs, i64 heads, i64 lq, i64 lkv, const i32* cu_q, const i32* cu_k,
                                  const i32* lengths, i64 left, i64 right, bool limited) {
    const HeadTile own(tiles, section, pairs, heads);
    QueryBlock block;
    block.batch = own.batch, block.head = own.head, block.i0 = (static_cast<int>(tiles) - 1 - own.number) * BM;
    block.sequence = sequence_at(own.batch, lq, lkv, cu_q, cu_k, lengths);
    const Mask mask(block.sequence, left, right);
    const Interval any = mask.keys_any(block.i0, block.i0 + BM);
    block.all = limited ? Interval{0, 0} : mask.keys_all(block.i0, block.i0 + BM);
    block.begin = any.empty() ? 0 : any.first / BN;
    block.end = any.empty() ? 0 : (any.end + BN - 1) / BN;
    return block;
}

}  // namespace rtk
