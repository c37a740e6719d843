// A pipeline of stages in shared memory between producers that fill them and consumers that read them (sm_90 and up).
// Each stage has two mbarriers: `full` (the data has arrived) and `empty` (all consumers are done with it). Use i of
// the pipeline is stage i % STAGES; producers and consumers go through the uses in the same order, each with a
// PipelineState.
//
//   one thread    pipeline.init(producers, consumers);   then a barrier of the block, or of the cluster
//   producer      acquire(state); expect(state, bytes); copies that arrive at full(state); state.advance()
//             or  acquire(state); plain stores; commit(state); state.advance()
//   consumer      wait(state); reads; release(state); state.advance()
//
// Why this cannot deadlock:
// 1. The producer of use i waits only for the release of use i - STAGES; for the first STAGES uses it does not wait,
//    because on a new barrier the phase of parity 1 counts as complete.
// 2. The consumers of use i wait only for the producer of use i.
// 3. So the smallest unfinished use has a producer that need not wait, hence its bytes arrive, hence its consumers
//    release it. This ends with the last use if both sides go through equally many, if the announced bytes are those
//    copied, and if nobody waits for a later use (of this or another pipeline) before it has released an earlier one.
// 4. A wait names one bit of the phase, and two uses of a stage with the same bit are never confused: the phase of
//    `full` advances by two only after all consumers have released the first of them, that of `empty` only after the
//    producer has filled the stage in between. Therefore only threads that release (or whose warp does) may wait.
//
// Why every thread sees the right data:
// 1. init() fences the barriers for TMA and for other blocks; the block-wide barrier after it makes them visible to
//    threads.
// 2. Copies complete their bytes at `full` after they have written them; whoever waited for that phase sees them, wgmma
//    too.
// 3. Plain stores precede their thread's commit(), a release; commit_warp() orders the warp's stores before it by
//    __syncwarp. If wgmma or TMA is to read them, every thread that stored fences first (fence_async_shared).
// 4. Reads of a stage precede the reader's release(), or the __syncwarp of release_warp(), and the next producer's
//    acquire() follows all of these. Products read asynchronously: wait for them (wgmma_wait), then release. Consumers
//    that write to a stage call fence_async_shared before they release it, if copies fill it next.
//
// All `full` barriers are stored first, then the `empty` ones. Blocks of a cluster have them at the same offsets, so a
// multicast copy arrives at the same stage of all blocks; `consumers` then counts those of all of them.
#pragma once
#include "ptx/mbarrier.cuh"

namespace rtk {

// Position of a producer or consumer.
template <int STAGES>
struct PipelineState {
    int stage = 0;
    u32 phase = 0;

    RTK_DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1u;
    }

    // Skips `uses` that others produce and consume, such as those of the other warpgroup in a ping-pong kernel.
    RTK_DEVICE void advance(int uses) {
        const int to = stage + uses;
        stage = to % STAGES;
        phase ^= static_cast<u32>(to / STAGES) & 1u;
    }
};

template <int STAGES>
struct Pipeline {
    static_assert(RTK_HAS_TMA || STAGES < 0, "mbarriers need sm_90; older targets have common/row_ring.cuh");
    static_assert(STAGES > 0, "a pipeline has at least one stage");
    using State = PipelineState<STAGES>;
    static constexpr u32 kBytes = 2 * STAGES * 8;  // of shared memory, at `barriers`, 8-byte aligned

    ptx::SharedAddress barriers;

    RTK_DEVICE ptx::SharedAddress full(const State& state) const { return barriers + 8 * state.stage; }
    RTK_DEVICE ptx::SharedAddress empty(const State& state) const { return barriers + 8 * (STAGES + state.stage); }

    // Called by one thread. `producers`: arrivals by expect() and commit() that fill a stage, 1 for a thread that
    // issues copies. `consumers`: arrivals by release() that empty it; a call of release_warp() is one.
    RTK_DEVICE void init(u32 producers, u32 consumers) const {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(barriers + 8 * stage, producers);
            ptx::mbarrier_init(barriers + 8 * (STAGES + stage), consumers);
        }
        ptx::mbarrier_fence_init();
    }

    // ---- producers ----

    // Waits until the stage is free.
    RTK_DEVICE void acquire(const State& state) const { ptx::mbarrier_wait(empty(state), state.phase ^ 1u); }

    // Announces the bytes of the copies that this thread issues next; returns the barrier at which they arrive.
    RTK_DEVICE ptx::SharedAddress expect(const State& state, u32 bytes) const {
        ptx::mbarrier_arrive_expect(full(state), bytes);
        return full(state);
    }

    // This thread has stored its part.
    RTK_DEVICE void commit(const State& state) const { ptx::mbarrier_arrive(full(state)); }

    // The same for all lanes of a warp, as one arrival.
    RTK_DEVICE void commit_warp(const State& state) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) commit(state);
    }

    // Waits until the consumers have released all uses before `state`. A block of a cluster must not return before
    // that, because others still arrive at its barriers; nor may a stage be reused, for example by an epilogue.
    RTK_DEVICE void drain(State state) const {
        for (int i = 0; i < STAGES; ++i) {
            acquire(state);
            state.advance();
        }
    }

    // ---- consumers ----

    // Waits until the stage is filled.
    RTK_DEVICE void wait(const State& state) const { ptx::mbarrier_wait(full(state), state.phase); }

    // True if it is, without waiting.
    RTK_DEVICE bool test(const State& state) const { return ptx::mbarrier_test(full(state), state.phase); }

    // This thread is done with the stage. In a warp that waits for its products with wgmma_wait, one lane may arrive
    // for all.
    RTK_DEVICE void release(const State& state) const { ptx::mbarrier_arrive(empty(state)); }

    // All lanes of a warp are done with it, as one arrival.
    RTK_DEVICE void release_warp(const State& state) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) release(state);
    }
};

}  // namespace rtk
