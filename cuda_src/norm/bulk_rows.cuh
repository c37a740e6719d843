// The rows that a block of a backward norm works on, brought by the copy engine (sm_90 and up).
#pragma once
#include "common/bulk_ring.cuh"

namespace rtk {

// dy, h and, if DSUM, dsum: rows first, first + step, ... below `count` are those of a group; fewer than 2^30 rows, strides
// below 2^31. The constructor asks for as many as the ring holds: the copy engine takes its time to be asked and to
// answer, so every thread asks for its pieces of the first row itself, and each of the others has a lane of its own to ask
// for it. All further rows are fetched by helpers, if the groups have them, or else by their first thread.
template <typename T, int CHUNKS, bool DSUM>
struct BulkRows {
    static constexpr int kInputs = DSUM ? 3 : 2;
    const T *dy, *h, *dsum;
    u32 dy_stride, h_stride, dsum_stride;
    int step, first, count;
    int server;  // place of the thread that fetches
    BulkRing<kInputs, CHUNKS> ring;
    Raw<16> first_row[kInputs][CHUNKS];

    RTK_DEVICE BulkRows(u8* memory, const RowGroup& group, const T* dy_, const T* h_, const T* dsum_, i64 rows, i64 cols,
                        i64 dy_stride_, i64 h_stride_, i64 dsum_stride_, i64 stages)
        : dy(dy_),
          h(h_),
          dsum(dsum_),
          dy_stride(static_cast<u32>(dy_stride_)),
          h_stride(static_cast<u32>(h_stride_)),
          dsum_stride(static_cast<u32>(dsum_stride_)),
          step(static_cast<int>(gridDim.x) * group.count),
          first(static_cast<int>(blockIdx.x) * group.count + group.index),
          count(static_cast<int>(rows)),
          server(group.meeting > group.threads ? ring.kPast : 0),
          ring(memory, group, static_cast<int>(cols) * sizeof(T), stages) {
        constexpr int VEC = 16 / sizeof(T);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int input = 0; input < kInputs; ++input) clear(first_row[input][c]);
            if (!ring.has(c) || first >= count) continue;
            const int column = (c * group.threads + group.thread) * VEC;
#pragma unroll
            for (int input = 0; input < kInputs; ++input)
                first_row[input][c] = load_raw<T, VEC>(row_of(input, first) + column);
        }
        if (group.thread < ring.stages) {
            ring.open(group.thread);
            if (group.thread == 0) {
                ptx::mbarrier_arrive(ring.full);
            } else {
                fetch(group.thread, first + group.thread * step);
            }
        }
        if (!group.helps()) ring.clear_rest();
    }

    // The first row to its place, where each thread reads what it has written; the copy engine writes there only after that.
    // Comes after the constructor, whatever else is to be asked for, and a barrier of the block.
    RTK_DEVICE void begin(const RowGroup& group) const {
        if (group.helps() || first >= count) return;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int input = 0; input < kInputs; ++input) ptx::st_shared_16(ring.piece(0, input, c), first_row[input][c]);
        }
    }

    // What comes `stages` rows after `row`, into the place of it, of which all of the group have read.
    RTK_DEVICE void next(int row) {
        __syncwarp();
        if (ring.place == server) fetch(ring.stage, row + ring.stages * step);
        ring.next_row();
    }

    // What helpers do while their group works on its rows, with one barrier for each; then none are left for themselves.
    RTK_DEVICE void serve(const RowGroup& group) {
#pragma unroll 1
        for (; first < count; first += step) {
            group_barrier<true>(group);
            next(first);
        }
    }

  private:
    RTK_DEVICE const T* row_of(int input, int row) const {
        const u64 at = static_cast<u32>(row);  // times 32 bits: one instruction
        return input == 0 ? dy + at * dy_stride : input == 1 ? h + at * h_stride : dsum + at * dsum_stride;
    }
    RTK_DEVICE void fetch(int stage, int row) const {
        if (row >= count) return;
        if constexpr (DSUM) {
            ring.fetch(stage, {row_of(0, row), row_of(1, row), row_of(2, row)});
        } else {
            ring.fetch(stage, {row_of(0, row), row_of(1, row)});
        }
    }
};

}  // namespace rtk
