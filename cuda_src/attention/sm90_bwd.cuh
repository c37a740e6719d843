// Shared by the backward kernels on sm_90a: rows of statistics and sums of dq, in padded order.
//
// Per head, the rows of sequences follow each other, and each sequence begins at a multiple of kRowPad, so that no
// query tile spans two sequences. `rows` below is the total number of padded rows per head.
#pragma once
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"
#include "ptx/forget.cuh"
#include "ptx/words.cuh"

namespace rtk {

inline constexpr int kRowPad = 128;
inline constexpr int kBackwardKeys = 128;  // in a tile

// Where the rows of a sequence begin.
RTK_DEVICE i64 padded_row(int batch, const Sequence& sequence, i64 lq, bool packed) {
    if (packed) return (static_cast<i64>(sequence.q_row) + static_cast<i64>(batch) * kRowPad) / kRowPad * kRowPad;
    return batch * ((lq + kRowPad - 1) / kRowPad * kRowPad);
}

// Queries per tile: registers allow 64 x 64 or 64 x 128 scores per warpgroup.
template <int D>
struct BackwardTile {
    static constexpr int kQueries = D == 64 ? 128 : 64;
    // Sums of dq of a tile are stored in the order in which the threads of two warpgroups hold them, 32 each; within a
    // warpgroup: four neighbours of a thread, then the next thread, then the next four. Warpgroup w owns columns from
    // kColumn w and rows from kRow w.
    static constexpr int kColumn = D == 64 ? 0 : 64, kRow = D == 64 ? 64 : 0;
    static constexpr u32 kSumBytes = kQueries * D * 4;
};

// To keep waits short, blocks that run at the same time are at different queries: `together` neighbouring key tiles of
// a head form a chunk. They start at queries as far from each other as possible, go up and wrap around; under a mask
// with a diagonal they start there. Why this cannot deadlock:
// 1. Key tiles are claimed in the order of their numbers (KeyTile), so those with smaller numbers have begun.
// 2. A tile waits for tiles of earlier chunks, which have smaller numbers, and for some of its own chunk.
// 3. Under a mask the latter are the tiles behind it. They have smaller numbers, too, unless the longest tiles of a chunk
//    come first (`ascending`); then, and without a mask, 4 holds.
// 4. Without a mask they are those that meet the same queries at an earlier step of their own (QueryOrder::before). All
//    tiles of a chunk run at the same time: there are no more of them than blocks, and all blocks are resident because
//    the launch is cooperative (unless a chunk is one tile). So the tile with the fewest steps, or the last one of a
//    chunk under a mask, waits for none of its chunk. Where blocks are `resident`, one claims its next tile only when
//    the last one waits for none any more, so no tile is queued behind one that waits for it.
// 5. Hence some tile of the first unfinished chunk always makes progress.

// Number `index` of the key tiles: `heads_together` heads share L2; of these, the first `together` key tiles of each
// head come first, the last one of a chunk before the others unless `ascending`: with a diagonal, a tile waits for those
// behind it in its chunk.
struct KeyTile {
    int n, head, batch;

    RTK_DEVICE KeyTile(u32 index, u32 tiles, u32 heads, u32 batches, u32 heads_together, u32 together, bool ascending) {
        u32 band = index / (heads_together * tiles);
        ptx::forget(band);  // one division after the other: interleaved they need more registers
        const u32 first = band * heads_together, here = min(heads_together, heads * batches - first);
        u32 left = index - first * tiles, chunk = left / (together * here);
        ptx::forget(chunk);
        left -= chunk * together * here;
        const u32 size = min(together, tiles - chunk * together);
        u32 step = left / size;
        ptx::forget(step);
        const u32 which = first + step;
        left -= step * size;
        n = static_cast<int>(chunk * together + (ascending ? left : size - 1 - left));
        batch = static_cast<int>(which / heads);
        head = static_cast<int>(which - batch * heads);
    }
};

// The order in which a key tile meets query tiles: from `start` up to `last`, then from `first`.
template <int BQ>
struct QueryOrder {
    int first, last, start;
    int chunk, size;  // the first tile of the chunk, and how many

    RTK_DEVICE QueryOrder(const Mask& mask, const Interval& any, int n, int together)
        : QueryOrder(mask, any.first / BQ, (any.end - 1) / BQ, n, together) {}

    RTK_DEVICE QueryOrder(const Mask& mask, int first_tile, int last_tile, int n, int together)
        : first(first_tile), last(last_tile), start(first_tile), chunk(n / together * together) {
        size = min(chunk + together, (mask.keys + kBackwardKeys - 1) / kBackwardKeys) - chunk;
        if (mask.left < 0 && mask.right < 0) start = (n - chunk) * (last + 1) / size;
    }

    RTK_DEVICE int count() const { return last - first + 1; }

    // How many tiles of keys meet queries m before tile n does.
    RTK_DEVICE u32 before(const Mask& mask, int n, int m) const {
        if (mask.left < 0 && mask.right < 0) {
            const int starts_last = ((m + 1) * size + last) / (last + 1) - 1;  // of those that start up to m
            const int later = starts_last - (n - chunk);
            return static_cast<u32>(chunk + (later < 0 ? later + size : later));
        }
        const int lowest = mask.lo(m * BQ) / kBackwardKeys;
        const int highest = (mask.hi(min(m * BQ + BQ, mask.lq) - 1) - 1) / kBackwardKeys;
        return static_cast<u32>(max(chunk, lowest) - lowest + min(chunk + size - 1, highest) - n);
    }
};

// What the loading and sending warps know about a key tile, 16 bytes at a time in shared memory.
struct KeyRecord {
    static constexpr u32 kBytes = 48;
    ptx::SharedAddress at;

    RTK_DEVICE void put(u32 part, int a, int b, int c, int d) const {
        const u32 words[4] = {static_cast<u32>(a), static_cast<u32>(b), static_cast<u32>(c), static_cast<u32>(d)};
        ptx::st_shared_16(at + 16 * part, Raw<16>{{words[0], words[1], words[2], words[3]}});
    }
    RTK_DEVICE Raw<16> keys() const { return ptx::ld_shared_16(at); }          // n, head, batch of the map, row of the map
    RTK_DEVICE Raw<16> rows() const { return ptx::ld_shared_16(at + 16); }     // row of q, padded row, queries, keys
    RTK_DEVICE Raw<16> queries() const { return ptx::ld_shared_16(at + 32); }  // steps, first, last, start

    // From a query tile to the next one; after the last one, to the next head.
    RTK_DEVICE void advance(int& m, int& h) const {
        const Raw<16> met = queries();
        m = m == static_cast<int>(met.w[2]) ? static_cast<int>(met.w[1]) : m + 1;
        if (m == static_cast<int>(met.w[3])) ++h;
    }
};

// Where one thread adds dq of query tile m, for the h-th head that shares a key tile, to the sums in global memory.
template <int D>
struct DqPlace {
    static constexpr int BQ = BackwardTile<D>::kQueries;
    static constexpr u32 kSumBytes = BackwardTile<D>::kSumBytes, kHalfBytes = kSumBytes / 2;
    u32 place, before;
    u32* count;

    RTK_DEVICE DqPlace(const KeyRecord& tile, int m, int h, u32* order, u32 query_tiles, i64 heads_per_kv, i64 left, i64 right,
                       i64 together) {
        const Raw<16> keys = tile.keys(), rows = tile.rows(), queries = tile.queries();
        const Sequence sequence{0, 0, static_cast<int>(rows.w[2]), static_cast<int>(rows.w[3])};
        const Mask mask(sequence, left, right);
        const int n = static_cast<int>(keys.w[0]);
        const QueryOrder<BQ> met(mask, static_cast<int>(queries.w[1]), static_cast<int>(queries.w[2]), n,
                                 static_cast<int>(together));
        before = met.before(mask, n, m);
        const u32 head = keys.w[1] * static_cast<u32>(heads_per_kv) + h;
        place = head * query_tiles + rows.w[1] / BQ + m;
        count = order + place;
    }

    // Waits until the key tiles before this one have been added.
    RTK_DEVICE void wait() const {
        if (before == 0) return;
        while (ptx::ld_word_acquire(count) != before) {
        }
        ptx::fence_async_global();
    }

    // dq is in two halves, one per warpgroup, in buffer `buffer` of two.
    RTK_DEVICE void send(u32 buffer, const PipelineState<1>& state, ptx::SharedAddress dq_pipes, ptx::SharedAddress dq_tile,
                         float* dq_sums) const {
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) {
            const Pipeline<1> pipe{dq_pipes + (2 * buffer + half) * Pipeline<1>::kBytes};
            const ptx::SharedAddress from = dq_tile + (2 * buffer + half) * kHalfBytes;
            u8* const to = reinterpret_cast<u8*>(dq_sums) + static_cast<i64>(place) * kSumBytes + half * kHalfBytes;
            pipe.wait(state);
            if (before == 0) {
                ptx::bulk_store(to, from, kHalfBytes);
            } else {
                ptx::bulk_add(to, from, kHalfBytes);
            }
            ptx::bulk_store_commit();
            ptx::bulk_store_wait_read();
            pipe.release(state);
        }
        ptx::bulk_store_wait();
        ptx::fence_async_global();
        __threadfence();
        atomicAdd(count, 1u);
    }
};

}  // namespace rtk
