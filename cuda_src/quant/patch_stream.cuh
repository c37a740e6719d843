// How blocks that work as quant/patch.cuh says get their tiles: which ones, their inputs, and what helpers do with them.
#pragma once
#include "ptx/tma.cuh"
#include "quant/expert_tiles.cuh"
#include "quant/patch.cuh"

namespace rtk {

// Tiles of INPUTS matrices of 16-bit numbers on their way to shared memory by the copy engine, SLOTS of each in turn, in
// boxes of the rows of two worker warps (a team), which wait for no others.
template <int SLOTS, int INPUTS>
struct PatchStream {
    static constexpr int kTeams = 8, kTeam = kPatchWarps / kTeams;
    static constexpr u32 kRowBytes = kTileSide * 2, kBoxRows = kTeam * kPatchWarpRows, kBoxBytes = kBoxRows * kRowBytes;
    static constexpr u32 kTeamBytes = SLOTS * INPUTS * kBoxBytes, kTeamBarriers = 2 * SLOTS;
    static constexpr u32 kBytes = kTeams * kTeamBytes;  // of shared memory, aligned to 128
    static constexpr int kBarriers = kTeams * kTeamBarriers;

    ptx::SharedAddress boxes, full;          // of all teams; behind `full` barriers of a team, `empty` ones
    ptx::SharedAddress own_boxes, own_full;  // of the worker's team

    // The thread that fetches may ask for the first tile at once. It does so soon, as all addresses of barriers are
    // constants, and those that only later tiles need come afterwards (init_rest).
    RTK_DEVICE PatchStream(u8* memory, u64* barriers)
        : boxes(ptx::shared_address(memory)), full(ptx::shared_address(barriers)) {
        const u32 team = threadIdx.x / (kTeam * kWarp);
        own_boxes = boxes + team * kTeamBytes, own_full = full + team * (8 * kTeamBarriers);
        init([](u32 b) { return b % kTeamBarriers == 0; });
    }

    // All call; a barrier of the block later, workers may wait.
    RTK_DEVICE void init_rest() const {
        init([](u32 b) { return b % kTeamBarriers != 0; });
    }

    template <typename Which>
    RTK_DEVICE void init(const Which& which) const {
        if (patch_role() != PatchRole::kFetch) return;
#pragma unroll
        for (u32 b = 0; b < kBarriers; ++b)
            if (which(b)) ptx::mbarrier_init(full + 8 * b, b % kTeamBarriers < SLOTS ? 1 : kTeam);
        ptx::mbarrier_fence_init();
    }

    // Asks for a tile, the turn'th, as soon as there is room for it. One thread calls.
    template <typename... Maps>
    RTK_DEVICE void fetch(const PatchOutput& place, u32 turn, const Maps&... maps) const {
        const u32 slot = turn % SLOTS, rows = place.rows;
        const i32 column = static_cast<i32>(place.column), row = static_cast<i32>(place.row);
        const u64 policy = ptx::l2_last();
#pragma unroll 1
        for (u32 team = 0; team < kTeams; ++team) {
            const ptx::SharedAddress ready = full + 8 * (team * kTeamBarriers + slot);
            ptx::SharedAddress to = boxes + team * kTeamBytes + slot * (INPUTS * kBoxBytes);
            const u32 first = team * kBoxRows;
            if (turn >= SLOTS) ptx::mbarrier_wait(ready + 8 * SLOTS, (turn / SLOTS & 1) ^ 1);
            if (first < rows) {
                ptx::mbarrier_arrive_expect(ready, INPUTS * kBoxBytes);
                ((ptx::tma_load_2d(to, maps, ready, column, row + static_cast<i32>(first), policy), to += kBoxBytes), ...);
            } else {
                ptx::leave_undefined(to, INPUTS * kBoxBytes);
                ptx::mbarrier_arrive(ready);
            }
        }
    }

    // Waits for them, and returns where the thread's first row of the first input begins; the next is kBoxBytes further.
    RTK_DEVICE ptx::SharedAddress wait(u32 turn) const {
        const u32 slot = turn % SLOTS, thread = this_thread();
        ptx::mbarrier_wait(own_full + 8 * slot, turn / SLOTS & 1);
        return own_boxes + slot * (INPUTS * kBoxBytes) + thread / 16 % (2 * kTeam) * (kPatchRows * kRowBytes) +
               thread % 16 * 16;
    }
    // Row r from there.
    RTK_DEVICE static Raw<16> read(ptx::SharedAddress spot, int r) { return ptx::ld_shared_16(spot + r * kRowBytes); }

    // The warp has read what it needs.
    RTK_DEVICE void release(u32 turn) const {
        __syncwarp();
        if (patch_lane() == 0) ptx::mbarrier_arrive(own_full + 8 * (SLOTS + turn % SLOTS));
    }
};

// The tiles of one block, numbered along the columns first, with everything that warps need to know of each. The first
// ones are blockIdx.x, blockIdx.x + gridDim.x, ...; so are the others without a counter. With one (0 at the beginning),
// a block draws numbers from it: then blocks stay within a short stretch of tiles, and what they read and write lies
// close together in memory, however unequal their speed.
struct StreamWalk {
    static constexpr u32 kAhead = 5, kKept = 8;

    const TilePlaces& all;
    const Quantized& out;
    u32 cols;  // of one side
    PatchOutput* kept;
    u32* counter;

    // The whole block calls; one barrier.
    RTK_DEVICE StreamWalk(const TilePlaces& places, const Quantized& output, u32 width, PatchOutput* memory, u32* numbers)
        : all(places), out(output), cols(width), kept(memory), counter(numbers) {
        if (threadIdx.x < kAhead) find(threadIdx.x, blockIdx.x + threadIdx.x * gridDim.x);
        __syncthreads();
    }

    RTK_DEVICE const PatchOutput& operator[](u32 turn) const { return kept[turn % kKept]; }
    RTK_DEVICE bool has(u32 turn) const { return kept[turn % kKept].rows != 0; }
    RTK_DEVICE u32 scale_step() const { return out.by_group ? 1 : (out.cols + (kTileSide - 1)) / kTileSide; }

    // The number of the tile of a later turn.
    RTK_DEVICE u32 draw(u32 turn) const {
        if (counter == nullptr || kAhead * gridDim.x >= all.count()) return blockIdx.x + turn * gridDim.x;
        return kAhead * gridDim.x + atomicAdd(counter, 1u);
    }

    // Works out what belongs to a number.
    RTK_DEVICE void find(u32 turn, u32 number) const {
        PatchOutput& to = kept[turn % kKept];
        if (number >= all.count()) {
            to.rows = 0;
            return;
        }
        const TilePlace place = all.find(number);
        const u32 groups = (out.cols + (kTileSide - 1)) / kTileSide, group = place.column / kTileSide, step = cols / kTileSide;
        const u64 by_group = product(place.start, groups - 1) + product(group, place.count) + place.row;
        to.q = out.q + product(place.row, out.cols) + place.column;
        to.scale = out.scale + (out.by_group ? by_group : product(place.row, groups) + group);
        to.q_t = out.q_t + product(place.start, out.cols) + product(place.column, place.count) +
                 (place.row - place.start);
        to.scale_t = out.scale_t + product(place.down, out.cols) + place.column;
        to.q_right = cols;
        to.scale_right = out.by_group ? product(step, place.count) : step;
        to.q_t_right = product(cols, place.count);
        to.scale_t_right = cols;
        to.rows = place.rows;
        to.columns = min(cols - place.column, static_cast<u32>(kTileSide));
        to.pitch = place.count;
        to.row = place.row;
        to.column = place.column;
        to.whole = ((reinterpret_cast<u64>(to.q_t) | place.count | place.rows) & 15) == 0;
    }
};

// Where the block's first tile is, if there are no experts: all that is needed to ask for its inputs.
RTK_DEVICE PatchOutput first_place(i64 rows, i64 cols) {
    const u32 across = static_cast<u32>((cols + (kTileSide - 1)) / kTileSide), down = blockIdx.x / across;
    PatchOutput place;
    place.row = down * kTileSide;
    place.rows = static_cast<u32>(rows) - place.row;
    place.column = (blockIdx.x - down * across) * kTileSide;
    return place;
}

// What the helpers do with all tiles of the block. `fetch(turn)` asks for the inputs that follow those of a turn, and
// returns false when there are none: then it must not look further, for nothing has told it that those places are known.
template <int SIDES, typename Fetch>
RTK_DEVICE void help(PatchShared<SIDES>& shared, const StreamWalk& walk, bool pow2, const Fetch& fetch) {
    const PatchRole role = patch_role();
    if (role == PatchRole::kFetch) {
#pragma unroll 1
        for (u32 turn = 0; fetch(turn); ++turn) {
        }
    } else if (role == PatchRole::kStore) {
#pragma unroll 1
        for (u32 turn = 0; walk.has(turn); ++turn) shared.store_columns(walk[turn], turn);
    } else if (role == PatchRole::kScale) {
        const bool draws = threadIdx.x % kWarp == 0;
        u32 number = draws ? walk.draw(StreamWalk::kAhead) : 0;
#pragma unroll 1
        for (u32 turn = 0; walk.has(turn); ++turn) {
            shared.make_scales(walk[turn], turn, pow2);
            if (draws) {
                // Others see it with the scales of the next turn, and need it a turn later.
                walk.find(turn + StreamWalk::kAhead, number);
                number = walk.draw(turn + StreamWalk::kAhead + 1);
            }
        }
    }
}

}  // namespace rtk
