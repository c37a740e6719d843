// The rows that a block of a backward norm works on, loaded by TMA bulk copies (sm_90 and up).
#pragma once
#include "common/bulk_ring.cuh"
#include "common/pressure.cuh"
#include "norm/common.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"

namespace rtk {

// dy, h and, if DSUM, dsum: a group owns rows first, first + step, ... below `count`; fewer than 2^30 rows, strides of
// less than 2^32 bytes. Rows are dealt to blocks, and within a block to its groups, so that block loads differ by at
// most one row. A bulk copy has a long latency, so in the constructor every thread loads its vectors of the first row
// itself (kLoadsFirst), and start(), which fills the ring, issues each row from a different lane. All further rows are fetched by
// helper warps, if the groups have them (HELPED: they may), or else by their first thread.
//
// PREDICATED: the first loads have no branches. This helps layer_norm, but not rms_norm.
template <typename T, int CHUNKS, bool DSUM, bool HELPED, bool PREDICATED = false>
struct BulkRows {
    static constexpr int kInputs = DSUM ? 3 : 2, VEC = 16 / sizeof(T);
    static constexpr bool kLoadsFirst = CHUNKS <= 2;  // with more, registers do not suffice, and the start matters less
    const T *dy, *h, *dsum;
    u32 dy_pitch, h_pitch, dsum_pitch;  // bytes from row to row
    int step, first, count;
    int fetch_distance;   // distance to the row that is fetched next
    int server;  // index of the fetching thread
    BulkRing<kInputs, CHUNKS> ring;
    Raw<16> first_row[kLoadsFirst ? kInputs : 1][kLoadsFirst ? CHUNKS : 1];

    RTK_DEVICE BulkRows(u8* memory, const RowGroup& group, const T* dy_, const T* h_, const T* dsum_, i64 rows, i64 cols,
                        u32 dy_pitch_, u32 h_pitch_, u32 dsum_pitch_, i64 stages)
        : dy(dy_),
          h(h_),
          dsum(dsum_),
          dy_pitch(dy_pitch_),
          h_pitch(h_pitch_),
          dsum_pitch(dsum_pitch_),
          step(static_cast<int>(gridDim.x) * group.count),
          first(group.index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)),
          count(static_cast<int>(rows)),
          fetch_distance(static_cast<int>(stages) * step),
          server(HELPED && group.meeting > group.threads ? ring.kPast : 0),
          ring(memory, group, static_cast<int>(cols) * sizeof(T), stages) {
        if constexpr (!kLoadsFirst) return;
        if constexpr (PREDICATED) {
            if (!HELPED) ring.place = group.thread * 16;  // as it is, but sooner
            const u64 policy = ptx::l2_last();
#pragma unroll
            for (int input = 0; input < kInputs; ++input) {
                const u8* const from = static_cast<const u8*>(row_of(input, first)) + static_cast<u32>(ring.place);
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    clear(first_row[input][c]);
                    const bool exists = ring.has(c) && first < count;
                    ptx::ld_stream_16_if(exists, first_row[input][c], from + static_cast<u32>(c * ring.apart), policy);
                }
            }
            return;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int input = 0; input < kInputs; ++input) clear(first_row[input][c]);
            if (!ring.has(c) || first >= count) continue;
            const int column = (c * group.threads + group.thread) * VEC;
#pragma unroll
            for (int input = 0; input < kInputs; ++input)
                first_row[input][c] = load_raw<T, VEC>(static_cast<const T*>(row_of(input, first)) + column);
        }
    }

    // Loads the gains (of a weight of T, or fp32 if `weight_fp32`; null: none), then the other rows, runs `meanwhile`,
    // and has everything ready for the first row. Contains a block-wide barrier, after `meanwhile`.
    template <typename Work>
    RTK_DEVICE void start(const RowGroup& group, const void* weight, bool weight_fp32, AskedGain<T, VEC> (&asked)[CHUNKS],
                          const Work& meanwhile) {
        const int pitch = group.threads * VEC, column = group.thread * VEC;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            clear(asked[c].raw);
            if (weight != nullptr && ring.has(c)) asked[c].ask(weight, weight_fp32, column + c * pitch);
        }
        open(group);
        meanwhile();
        __syncthreads();
        begin(group);
    }

    // Loads what comes `stages` rows after `row` into its slot; all threads of the group have read it.
    RTK_DEVICE void ask(int row) const {
        __syncwarp();
        if (ring.place == server) fetch(ring.stage, row + fetch_distance);
    }
    // The same of the row before `row`, which threads read twice, so that they are done with it only at the barrier of
    // `row`.
    RTK_DEVICE void ask_behind(int row) const {
        __syncwarp();
        if (ring.place == server && row != first)
            fetch(ring.stage == 0 ? ring.stages - 1 : ring.stage - 1, row - step + fetch_distance);
    }
    RTK_DEVICE void next(int row) {
        ask(row);
        ring.next_row();
    }

    // Runs on helper warps while their group works on its rows, with one barrier per row.
    RTK_DEVICE void serve(const RowGroup& group) {
#pragma unroll 1
        for (; first < count; first += step) {
            group_barrier<true>(group);
            next(first);
        }
    }

  private:
    // Issues the copies of the other rows.
    RTK_DEVICE void open(const RowGroup& group) const {
        if (group.thread < ring.stages) {
            ring.open(group.thread);
            if (!kLoadsFirst || group.thread != 0) fetch(group.thread, first + group.thread * step);
        }
        if (!HELPED || !group.helps()) ring.clear_rest();
    }

    // Stores the first row to its slot, where each thread reads back what it has written and TMA writes next. Comes
    // after a block-wide barrier.
    RTK_DEVICE void begin(const RowGroup& group) const {
        if (!kLoadsFirst || (HELPED && group.helps()) || first >= count) return;
        // No thread waits for data of another one. Not in open(): racecheck reports lanes that initialise neighbouring
        // barriers as writers of all of them.
        if (group.thread == 0) ptx::mbarrier_arrive(ring.full);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int input = 0; input < kInputs; ++input) ptx::st_shared_16(ring.vector_at(0, input, c), first_row[input][c]);
        }
        ptx::fence_async_shared();
    }

    RTK_DEVICE const void* row_of(int input, int row) const {
        const T* const base = input == 0 ? dy : input == 1 ? h : dsum;
        const u32 pitch = input == 0 ? dy_pitch : input == 1 ? h_pitch : dsum_pitch;
        return reinterpret_cast<const u8*>(base) + product(row, pitch);
    }
    RTK_DEVICE void fetch(int stage, int row) const {
        if (row >= count) {
            ptx::launch_dependents();  // let the sum over blocks start: its launch takes as long as the rows in flight
            return;
        }
        if constexpr (DSUM) {
            ring.fetch(stage, {row_of(0, row), row_of(1, row), row_of(2, row)});
        } else {
            ring.fetch(stage, {row_of(0, row), row_of(1, row)});
        }
    }
};

}  // namespace rtk
