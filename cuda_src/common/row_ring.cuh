// A ring of rows of one or more inputs, loaded several deep from global memory. A persistent block loops over its rows;
// each thread copies its own 16-byte vectors of the next STAGES - 1 rows into shared memory while it works on the
// current one. Slots are private to the thread, so waiting for its own copies is enough and no barrier is needed.
//
// Vectors past the end of the row are zeroed once and never copied: readers need no mask.
#pragma once
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

template <int INPUTS, int CHUNKS, int STAGES>
struct RowRing {
    ptx::SharedAddress base;   // this thread's slot of chunk 0, input 0, stage 0
    int pitch;                 // bytes between slots
    int read_offset = 0;       // of the current row's stage
    int write_offset = 0;      // of the stage the next fetched row goes to

    // `memory`: INPUTS * CHUNKS * STAGES * blockDim.x * 16 bytes of shared memory, 16-byte aligned.
    RTK_DEVICE explicit RowRing(u8* memory)
        : base(ptx::shared_address(memory + threadIdx.x * 16)), pitch(static_cast<int>(blockDim.x) * 16) {}

    RTK_DEVICE int advanced(int offset) const {
        offset += INPUTS * CHUNKS * pitch;
        return offset == STAGES * INPUTS * CHUNKS * pitch ? 0 : offset;
    }

    RTK_DEVICE void zero(u8* memory, int chunk) {
#pragma unroll
        for (int i = 0; i < STAGES * INPUTS; ++i)
            clear(*reinterpret_cast<Raw<16>*>(memory + (i * CHUNKS + chunk) * pitch + threadIdx.x * 16));
    }

    // Starts the copy of one vector of the row being fetched.
    RTK_DEVICE void copy(int input, int chunk, const void* source) {
        ptx::cp_async_16(base + (write_offset + (input * CHUNKS + chunk) * pitch), source);
    }

    // Ends the fetch of one row; every thread calls it once per row, whether it copied anything or not.
    RTK_DEVICE void commit() {
        ptx::cp_async_commit();
        write_offset = advanced(write_offset);
    }

    // After STAGES commits ahead of the current row: its vectors have arrived.
    RTK_DEVICE static void wait() { ptx::cp_async_wait<STAGES - 1>(); }

    // One vector of the current row.
    template <typename T>
    RTK_DEVICE void read(int input, int chunk, float (&f)[16 / sizeof(T)]) const {
        unpack<T, 16 / sizeof(T)>(ptx::ld_shared_16(base + (read_offset + (input * CHUNKS + chunk) * pitch)), f);
    }

    RTK_DEVICE void next_row() { read_offset = advanced(read_offset); }
};

}  // namespace rtk
