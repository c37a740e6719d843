// The ring of tiles of x in shared memory that norm/norm_fp8_ring.cu and norm/norm_fp8_single_read.cu quantise from:
// its contents, which tiles a block takes, how they are loaded, and which part of a tile of 128 x 128 a thread owns.
//
// A tile of x is two boxes of 128 rows x 128 bytes as TMA writes them: row 8 * i + j is at place 16 * j + i, so that
// all eight rows of a thread are addressed the same way; the 16 bytes of vector p of place r are at vector p ^ (r % 8).
// Codes are staged as 16 groups of 8 columns x 128 bytes with the same address-based swizzle: groups are nine columns
// apart, the ninth being outside of the tensor, so that threads with neighbouring groups, which write the same bytes of
// the same column of each, hit different banks.
#pragma once
#include "common/vec.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace rtk {

inline constexpr int kSide = 128;  // of a tile
inline constexpr int kGroups = 2;  // groups of threads that quantise, one tile each at a time
inline constexpr int kGroupThreads = 256;
inline constexpr int kGroupWarps = kGroupThreads / kWarp;
inline constexpr int kRingThreads = kGroups * kGroupThreads + 4 * kWarp;  // a warpgroup for everything else
// Of 5 x 96 for the five warpgroups.
inline constexpr int kGroupRegisters = 104;
inline constexpr int kOtherRegisters = 64;
inline constexpr int kBoxBytes = kSide * 128;
inline constexpr int kCodesPitch = 9 * kSide;
inline constexpr int kMaximaPitch = kSide + 16;

// SLOTS tiles of x, and room for the transposed codes of STAGED tiles: one for each group, or one that both use
// alternately.
template <int SLOTS, int STAGED>
struct RingShared {
    static constexpr int kSlots = SLOTS, kStaged = STAGED;
    u8 x[SLOTS][2][kBoxBytes];
    u8 codes[STAGED][16 * kCodesPitch];
    float maxima[kGroups][kGroupWarps][kMaximaPitch];  // of columns; then reciprocals of scales in the first row
    float rstd[SLOTS][kSide];
    float gain[SLOTS][kSide];
    int down[SLOTS], across[SLOTS];  // position of the tile; down is negative when there are no more
    u64 full[SLOTS];                 // x has arrived
    u64 ready[SLOTS];                // so have 1/rms and gains
    u64 empty[SLOTS];                // x is no longer needed
    u64 taken[SLOTS];                // nor are 1/rms and gains
    float scales[2][kSide];          // row maxima of the first group's tile, for alternate rounds
    u64 scales_there[2], scales_gone[2];
    u64 codes_gone;  // one tile of staged codes has been stored

    // `readers`: warps besides a group's that read a tile.
    RTK_DEVICE void init(int readers) {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&ready[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&empty[i]), kGroupWarps + readers);
            ptx::mbarrier_init(ptx::shared_address(&taken[i]), 1);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&scales_there[i]), kGroupWarps);
            ptx::mbarrier_init(ptx::shared_address(&scales_gone[i]), kGroupWarps);
        }
        if (STAGED == 1) ptx::mbarrier_init(ptx::shared_address(&codes_gone), 1);
    }

    // Column operands are stored by fours, first those of columns 0..3 of every eight, then 4..7; the padding of 16
    // between the halves puts them on different banks.
    RTK_DEVICE static int place(int column) { return column / 4 % 2 * (64 + 16) + column / 8 * 4 + column % 4; }
};

// Cycles through the slots; `phase` is that of the slot's barriers.
template <int SLOTS>
struct RingStage {
    int slot = 0;
    u32 phase = 0;
    RTK_DEVICE void next(int by = 1) {
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
    }
};

// The block's tiles in their order, NEIGHBOURS neighbours at a time, one for each group. `backwards`: from the last
// strip of 128 rows to the first.
template <int NEIGHBOURS>
struct RingWalk {
    u32 strips, tiles_across;  // and sets of neighbours in a strip
    bool backwards;

    RTK_DEVICE RingWalk(i64 rows, i64 cols, bool from_the_end)
        : strips(static_cast<u32>(ceil_div(rows, kSide))),
          tiles_across(static_cast<u32>(ceil_div(cols, NEIGHBOURS * kSide))),
          backwards(from_the_end) {}

    // Finds the tile of a stage; false if there is none.
    RTK_DEVICE bool find(int ring_stage, int& down, int& across) const {
        const u32 place = blockIdx.x + static_cast<u32>(ring_stage / NEIGHBOURS) * gridDim.x, above = place / tiles_across;
        across = static_cast<int>((place - above * tiles_across) * NEIGHBOURS) + ring_stage % NEIGHBOURS;
        down = static_cast<int>(backwards ? strips - 1 - above : above);
        return above < strips;
    }
};

// Called by one thread: loads the tile of a stage into its free slot; a missing tile tells a group that it is done.
template <typename Shared, typename Walk>
RTK_DEVICE void fetch_tile(Shared& shared, const ptx::TensorMap& x, const Walk& walk, int ring_stage, int slot) {
    const ptx::SharedAddress full = ptx::shared_address(&shared.full[slot]);
    int down, across;
    const bool exists = walk.find(ring_stage, down, across);
    shared.down[slot] = exists ? down : -1, shared.across[slot] = across;
    if (exists) {
        const u64 policy = ptx::l2_last();
        ptx::mbarrier_arrive_expect(full, 2 * kBoxBytes);
#pragma unroll
        for (int box = 0; box < 2; ++box)
            ptx::tma_load_3d(ptx::shared_address(shared.x[slot][box]), x, full, across * kSide + box * 64, down * (kSide / 8),
                             0, policy);
    } else {
        ptx::mbarrier_arrive(full);
    }
}

// Gains of a tile's columns, four in a lane, offset + weight or 1 without one. The weight is of T, or of fp32 if
// `weight_fp32`.
template <typename T>
struct RingGains {
    const void* weight;
    bool weight_fp32;
    int cols;
    float offset;

    RTK_DEVICE Raw<16> load(int across) const {
        const int column = across * kSide + static_cast<int>(threadIdx.x) % kWarp * 4;
        Raw<16> raw;
        clear(raw);
        if (column >= cols || weight == nullptr) return raw;
        if (weight_fp32) return ptx::ld_keep<16>(static_cast<const float*>(weight) + column);
        const Raw<8> narrow = ptx::ld_keep<8>(static_cast<const T*>(weight) + column);
        raw.w[0] = narrow.w[0], raw.w[1] = narrow.w[1];
        return raw;
    }

    RTK_DEVICE void give(float (&to)[kSide], const Raw<16>& raw) const {
        float gain[4];
        unpack<T, 4>(Raw<8>{raw.w[0], raw.w[1]}, gain);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (weight_fp32) gain[i] = __uint_as_float(raw.w[i]);
            to[static_cast<int>(threadIdx.x) % kWarp * 4 + i] = weight == nullptr ? 1.0f : gain[i] + offset;
        }
    }
};

// A thread of a group owns 8 columns (16 bytes of x) of 8 rows. Half a warp has two lane teams with different rows and
// columns, so that their 8-byte stores of codes hit all banks: lane bit 3 is the lane team, bits 4 and 3 say which half
// of the columns.
struct RingThread {
    int lane;
    int lane_team, row;     // rows 8 * lane_team ...
    int part, column;  // columns 8 * part ...

    RTK_DEVICE RingThread(u32 thread, int warp) {
        lane = static_cast<int>(thread % kWarp);
        lane_team = warp * 2 + (lane >> 3 & 1);
        part = ((lane >> 4 ^ lane >> 3) & 1) * 8 + lane % 8;
        row = lane_team * 8;
        column = part * 8;
    }

    // Maxima over the 16 threads of a lane team, scattered: the lane gets that of row owned_row().
    RTK_DEVICE float lane_team_max(float (&v)[8]) const {
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
