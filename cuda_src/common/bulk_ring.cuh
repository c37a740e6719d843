// A ring of rows of one or more inputs, loaded several deep by TMA bulk copies (sm_90 and up): a persistent block loops
// over its rows, and while a group of whole warps works on one, the next ones are loaded into shared memory. One thread
// loads whole rows, with an L2 policy that the cp.async of a RowRing cannot have. Thread i of the group owns the
// 16-byte vectors i, i + threads, ... of each row, CHUNKS of them; those past the end are zero and never copied, so
// that readers need no mask.
//
// First every stage is opened, and the thread that opened it calls fetch(...); then comes a block-wide barrier. Each
// round is wait(), read(...), fetch(...) of the row that comes `stages` rows later, into the stage just read, and
// next_row(). All threads of the group must have read their vectors before that fetch: a barrier of the group separates
// the two, unless it is one warp.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"

namespace rtk {

template <int INPUTS, int CHUNKS>
struct BulkRing {
    static constexpr int kMaxStages = 16;
    static constexpr int kPast = 1 << 24;  // past the end of any row
    int stages;
    ptx::SharedAddress full;  // barriers of this group's stages (rows have arrived), kMaxStages of them; then the stages
    int place, apart, bytes;  // offset of this thread's first vector in a row (from kPast on: helpers); stride to the next; row size
    int stage = 0;            // of the current row
    u32 phase = 0;            // of its barrier

    // `memory`: group_bytes() for each group, 16-byte aligned.
    RTK_DEVICE BulkRing(u8* memory, const RowGroup& group, int row_bytes, i64 stage_count)
        : stages(static_cast<int>(stage_count)),
          place(group.helps() ? kPast + group.thread - group.threads : group.thread * 16),
          apart(group.threads * 16),
          bytes(row_bytes) {
        full = ptx::shared_address(memory) + group.index * group_bytes();
    }

    // From the barriers of one group to those of the next.
    RTK_DEVICE int group_bytes() const { return 8 * kMaxStages + stages * INPUTS * CHUNKS * apart; }

    // True if this thread's vector c is not past the end of the row.
    RTK_DEVICE bool has(int c) const { return place + c * apart < bytes; }

    // Vectors past the end become zero. Not for helpers.
    RTK_DEVICE void clear_rest() const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (has(c)) continue;
            Raw<16> zero;
            clear(zero);
#pragma unroll 1
            for (int i = 0; i < stages * INPUTS; ++i) ptx::st_shared_16(vector_at(0, i, c), zero);
        }
    }

    // Called by one thread per stage.
    RTK_DEVICE void open(int s) const {
        ptx::mbarrier_init(full + 8 * s, 1);
        ptx::mbarrier_fence_init();
    }

    // Starts the copies of a row, given by its address in each input. Called by one thread.
    RTK_DEVICE void fetch(int s, const void* const (&rows)[INPUTS]) const {
        const ptx::SharedAddress barrier = full + 8 * s;
        ptx::mbarrier_arrive_expect(barrier, INPUTS * bytes);
#pragma unroll
        for (int input = 0; input < INPUTS; ++input)
            ptx::bulk_load(full + (8 * kMaxStages + (s * INPUTS + input) * CHUNKS * apart), rows[input], bytes, barrier,
                           ptx::l2_last());
    }

    RTK_DEVICE void wait() const { ptx::mbarrier_wait(full + 8 * stage, phase); }
    RTK_DEVICE Raw<16> read(int input, int chunk) const { return ptx::ld_shared_16(vector_at(stage, input, chunk)); }
    RTK_DEVICE void next_row() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }

    // Address of a vector of this thread.
    RTK_DEVICE ptx::SharedAddress vector_at(int s, int input, int chunk) const {
        return full + (8 * kMaxStages + ((s * INPUTS + input) * CHUNKS + chunk) * apart + place);
    }
};

}  // namespace rtk
