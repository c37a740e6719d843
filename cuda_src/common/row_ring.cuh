// Rows of one or more inputs on their way from global memory, several deep. A persistent block walks its rows; each
// thread copies its own 16-byte pieces of the next STAGES - 1 rows into shared memory while it works on the current
// one. Slots are private to the thread, so waiting for its own copies is enough and no barrier is needed.
//
// Pieces past the end of the row are zeroed once and never copied: readers need no mask.
#pragma once
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

template <int INPUTS, int CHUNKS, int STAGES>
struct RowRing {
    u8* slots;   // of this thread, at stage 0, input 0, chunk 0
    int pitch;   // bytes between chunks
    int stage = 0;

    // `memory`: INPUTS * CHUNKS * STAGES * blockDim.x * 16 bytes of shared memory, 16-byte aligned.
    RTK_DEVICE explicit RowRing(u8* memory)
        : slots(memory + threadIdx.x * 16), pitch(static_cast<int>(blockDim.x) * 16) {}

    RTK_DEVICE u8* slot(int at, int input, int chunk) const {
        return slots + ((at * INPUTS + input) * CHUNKS + chunk) * pitch;
    }

    RTK_DEVICE void zero(int chunk) {
#pragma unroll
        for (int i = 0; i < STAGES * INPUTS; ++i)
            *reinterpret_cast<Raw<16>*>(slots + (i * CHUNKS + chunk) * pitch) = Raw<16>{};
    }

    RTK_DEVICE void copy(int at, int input, int chunk, const void* source) {
        ptx::cp_async_16(slot(at, input, chunk), source);
    }

    // The stage a row `ahead` (under STAGES) of the current one goes to.
    RTK_DEVICE int stage_of(int ahead) const {
        const int at = stage + ahead;
        return at >= STAGES ? at - STAGES : at;
    }

    // Closes the copies of one row; every thread calls it once per row, copies or not.
    RTK_DEVICE static void commit() { ptx::cp_async_commit(); }

    // The current row is here (STAGES - 1 newer ones may be under way).
    RTK_DEVICE static void wait() { ptx::cp_async_wait<STAGES - 1>(); }

    template <typename T>
    RTK_DEVICE void read(int input, int chunk, float (&f)[16 / sizeof(T)]) const {
        unpack<T, 16 / sizeof(T)>(*reinterpret_cast<const Raw<16>*>(slot(stage, input, chunk)), f);
    }

    RTK_DEVICE void advance() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
};

}  // namespace rtk
