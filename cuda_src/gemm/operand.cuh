// Tiles in shared memory as TMA writes them and wgmma reads them, and the ring of stages between the two.
//
// Rows are 128 bytes; the 16-byte vector c of row r is at r * 128 + ((c ^ (r & 7)) << 4), the 128-byte swizzle. Tiles
// start at multiples of 1024 bytes.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

inline constexpr u32 kTileRow = 128;
inline constexpr int kBlockDepth = 64;  // of the summed dimension per stage: a row of 16-bit elements

// Rows of k (16-bit elements): groups of 8 rows are 1024 bytes apart. The next 16 of k are +2.
RTK_DEVICE u64 k_major_descriptor(ptx::SharedAddress address) { return ptx::matrix_descriptor(address, 16); }
inline constexpr u64 kNextKMajor = 32 >> 4;

// kBlockDepth rows of 64 columns each, followed by the next 64 columns. The next 16 of k are +128.
RTK_DEVICE u64 column_major_descriptor(ptx::SharedAddress address) {
    return ptx::matrix_descriptor(address, kBlockDepth * kTileRow);
}
inline constexpr u64 kNextColumnMajor = 16 * kTileRow >> 4;

// Position in a ring of `stages`, for the thread that fills it (its phase starts at 1) and for those that empty it.
struct RingPlace {
    int stages;
    int stage = 0;
    u32 phase = 0;

    RTK_DEVICE void next() {
        if (++stage == stages) stage = 0, phase ^= 1u;
    }
};

// Barriers of a ring, 16 bytes per stage: full (the copies have arrived), empty (all consumer warps are done).
struct RingBarriers {
    ptx::SharedAddress base;
    int stages;

    RTK_DEVICE ptx::SharedAddress full(int stage) const { return base + 8 * stage; }
    RTK_DEVICE ptx::SharedAddress empty(int stage) const { return base + 8 * (stages + stage); }
    RTK_DEVICE void init(u32 consumer_warps) const {
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            ptx::mbarrier_init(full(s), 1);
            ptx::mbarrier_init(empty(s), consumer_warps);
        }
    }
    // Called when a consumer warp is done with a stage.
    RTK_DEVICE void release(int stage, int lane) const {
        if (lane == 0) ptx::mbarrier_arrive(empty(stage));
    }
};

}  // namespace rtk
