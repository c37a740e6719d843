// Rows of one or more inputs on their way from global memory, several deep: a persistent block walks its rows, and while a
// group of threads works on one, the next `stages` are on their way to shared memory. Thread i of the group has the 16-byte
// pieces i, i + threads, ... of each row, CHUNKS of them; pieces past the end are zero and never copied, so that readers need
// no mask.
//
// First every stage gets a fetch(...) and next_row(). Then each round is wait(), read(...), fetch(...) of the row that comes
// `stages` rows later, into the stage just read, and next_row().
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace rtk {

// Every thread copies its own pieces (cp.async). Slots are private to the thread: waiting for its own copies is enough, and a
// slot may be filled again as soon as the thread has read it.
template <int INPUTS, int CHUNKS, int STAGES>
struct ThreadRing {
    static constexpr int stages = STAGES;
    ptx::SharedAddress base;   // this thread's slot of chunk 0, input 0, stage 0
    int pitch;                 // bytes between slots
    int place, apart, bytes;   // of this thread's first piece in a row; from it to the next; of the row
    int offset = 0;            // of the current row's stage

    // `memory`: STAGES * INPUTS * CHUNKS * blockDim.x * 16 bytes, 16-byte aligned. `few`: not all stages will be fetched,
    // but read perhaps.
    RTK_DEVICE ThreadRing(u8* memory, const RowGroup& group, int row_bytes, i64, bool few)
        : base(ptx::shared_address(memory + threadIdx.x * 16)),
          pitch(static_cast<int>(blockDim.x) * 16),
          place(group.thread * 16),
          apart(group.threads * 16),
          bytes(row_bytes) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (!few && place + c * apart < bytes) continue;
#pragma unroll
            for (int i = 0; i < STAGES * INPUTS; ++i)
                clear(*reinterpret_cast<Raw<16>*>(memory + (i * CHUNKS + c) * pitch + threadIdx.x * 16));
        }
    }

    // Starts the copies of a row, given by its address in each input; or of none, which counts all the same.
    RTK_DEVICE void fetch(bool exists, const void* const (&rows)[INPUTS]) {
        if (exists) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (place + c * apart >= bytes) break;
#pragma unroll
                for (int input = 0; input < INPUTS; ++input)
                    ptx::cp_async_16(base + (offset + (input * CHUNKS + c) * pitch),
                                     static_cast<const u8*>(rows[input]) + (place + c * apart));
            }
        }
        ptx::cp_async_commit();
    }

    RTK_DEVICE static void wait() { ptx::cp_async_wait<STAGES - 1>(); }
    RTK_DEVICE static void wait_all() { ptx::cp_async_wait<0>(); }
    RTK_DEVICE Raw<16> read(int input, int chunk) const {
        return ptx::ld_shared_16(base + (offset + (input * CHUNKS + chunk) * pitch));
    }
    RTK_DEVICE void next_row() {
        offset += INPUTS * CHUNKS * pitch;
        if (offset == STAGES * INPUTS * CHUNKS * pitch) offset = 0;
    }
};

// One thread of the group has the copy engine bring whole rows (sm_90 and up), with the policy for L2 that cp.async cannot
// have. For groups of whole warps. All threads of the group must have read their pieces of a row before the first one fetches
// another one into its stage: between the two is a barrier of the group, or of the warp if that is all of it.
template <int INPUTS, int CHUNKS>
struct BulkRing {
    int stages;
    ptx::SharedAddress base;  // this group's stages, each with a row of every input
    ptx::SharedAddress full;  // a barrier for each of them: the rows have come
    int place, apart, bytes;  // as in ThreadRing
    int stage = 0;            // of the current row
    u32 phase = 1;            // of its barrier; what is fetched at first arrives in phase 0

    // `memory`: for every stage INPUTS * CHUNKS * blockDim.x * 16 bytes, then 8 for each group, 16-byte aligned.
    RTK_DEVICE BulkRing(u8* memory, const RowGroup& group, int row_bytes, i64 stage_count, bool)
        : stages(static_cast<int>(stage_count)),
          place(group.thread * 16),
          apart(group.threads * 16),
          bytes(row_bytes) {
        const int group_bytes = stages * INPUTS * CHUNKS * apart;
        base = ptx::shared_address(memory + group.index * group_bytes);
        full = ptx::shared_address(memory + group.count * group_bytes + group.index * stages * 8);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (place + c * apart < bytes) continue;
            Raw<16> zero;
            clear(zero);
            for (int i = 0; i < stages * INPUTS; ++i)
                ptx::st_shared_16(base + ((i * CHUNKS + c) * apart + place), zero);
        }
        if (group.thread == 0) {
            for (int s = 0; s < stages; ++s) ptx::mbarrier_init(full + 8 * s, 1);
            ptx::mbarrier_fence_init();
        }
    }

    RTK_DEVICE void fetch(bool exists, const void* const (&rows)[INPUTS]) {
        if (place == 0 && exists) {
            const ptx::SharedAddress barrier = full + 8 * stage;
            ptx::mbarrier_arrive_expect(barrier, INPUTS * bytes);
#pragma unroll
            for (int input = 0; input < INPUTS; ++input)
                ptx::bulk_load(base + (stage * INPUTS + input) * CHUNKS * apart, rows[input], bytes, barrier,
                               ptx::l2_last());
        }
    }

    // Before the first one, all threads of the group must know its barriers: a barrier after construction.
    RTK_DEVICE void wait() const { ptx::mbarrier_wait(full + 8 * stage, phase); }
    RTK_DEVICE static void wait_all() {}
    RTK_DEVICE Raw<16> read(int input, int chunk) const {
        return ptx::ld_shared_16(base + (((stage * INPUTS + input) * CHUNKS + chunk) * apart + place));
    }
    RTK_DEVICE void next_row() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};

// STAGES of a ThreadRing; 0 for a BulkRing, which gets their number at run time.
template <int INPUTS, int CHUNKS, int STAGES>
struct RingOf {
    using Type = ThreadRing<INPUTS, CHUNKS, STAGES>;
};
template <int INPUTS, int CHUNKS>
struct RingOf<INPUTS, CHUNKS, 0> {
    using Type = BulkRing<INPUTS, CHUNKS>;
};
template <int INPUTS, int CHUNKS, int STAGES>
using RowRing = typename RingOf<INPUTS, CHUNKS, STAGES>::Type;

}  // namespace rtk
