// The shared memory of norm/norm_quant_ring.cu, and which part of a tile of 128 x 128 its threads have.
//
// A tile of x is two boxes of 128 rows x 128 bytes as the copy engine writes them: the 16 bytes of piece p of row r are
// at piece p ^ (r % 8). Codes leave as 16 groups of 8 columns x 128 bytes with the same pattern, which goes by address:
// groups are nine columns apart, the ninth being outside of the tensor, so that threads with neighbouring groups, which
// write the same bytes of the same column of each, meet different banks.
#pragma once
#include "common/abi.cuh"

namespace rtk {

inline constexpr int kSide = 128;  // of a tile
inline constexpr int kSlots = 4;   // tiles of x in shared memory
inline constexpr int kGroups = 2;  // of threads that quantise, a tile each at a time
inline constexpr int kGroupThreads = 256, kGroupWarps = kGroupThreads / kWarp;
inline constexpr int kRingThreads = kGroups * kGroupThreads + 4 * kWarp;  // a warpgroup for everything else
inline constexpr int kGroupRegisters = 104, kOtherRegisters = 64;         // of 5 x 96 for the five warpgroups
inline constexpr int kBoxBytes = kSide * 128;
inline constexpr int kCodesPitch = 9 * kSide;
inline constexpr int kMaximaPitch = kSide + 16;

struct RingShared {
    u8 x[kSlots][2][kBoxBytes];
    u8 codes[kGroups][16 * kCodesPitch];
    float maxima[kGroups][kGroupWarps][kMaximaPitch];  // of columns; then reciprocals of scales in the first row
    float rstd[kSlots][kSide];
    float gain[kSlots][kSide];
    int down[kSlots], across[kSlots];  // which tile it is; down is negative when there are no more
    u64 full[kSlots];                  // x is there
    u64 ready[kSlots];                 // and everything else about the tile
    u64 empty[kSlots];                 // nothing of it is needed any more
    float scales[2][kSide];            // of the rows of the first group's tile, for every other round
    u64 scales_there[2], scales_gone[2];

    // Numbers per column are kept by fours, first those of columns 0..3 of every eight, then 4..7; the 16 between the
    // halves put them on different banks.
    RTK_DEVICE static int place(int column) { return column / 4 % 2 * (64 + 16) + column / 8 * 4 + column % 4; }
};

// Goes round the slots; `phase` is that of the slot's barriers.
struct RingTurn {
    int slot = 0;
    u32 phase = 0;
    RTK_DEVICE void next(int by = 1) {
        slot += by;
        if (slot >= kSlots) slot -= kSlots, phase ^= 1;
    }
};

// A thread of a group has 8 columns (16 bytes of x) of 8 rows. Half a warp has two teams of rows with different
// columns, so that what they write of codes, 8 bytes a column, meets all banks: lane bit 3 is the team, bits 4 and 3
// say which half of the columns.
struct RingThread {
    int lane;
    int team, row;     // rows 8 * team ...
    int part, column;  // columns 8 * part ...

    RTK_DEVICE RingThread(u32 thread, int warp) {
        lane = static_cast<int>(thread % kWarp);
        team = warp * 2 + (lane >> 3 & 1);
        part = ((lane >> 4 ^ lane >> 3) & 1) * 8 + lane % 8;
        row = team * 8;
        column = part * 8;
    }

    // Maxima over the 16 threads of a team, scattered: the lane gets that of row owned_row().
    RTK_DEVICE float team_max(float (&v)[8]) const {
#pragma unroll
        for (int half = 4, mask = 16; half > 0; half /= 2, mask = half * 2) {
            const bool upper = (lane & mask) != 0;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
                v[i] = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, mask));
            }
        }
        return fmaxf(v[0], __shfl_xor_sync(0xffffffffu, v[0], 1));
    }
    RTK_DEVICE int owned_row() const { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
    RTK_DEVICE int lane_of_row(int r) const { return (lane & 8) + (r >> 2) * 16 + (r & 3) * 2; }
};

}  // namespace rtk
