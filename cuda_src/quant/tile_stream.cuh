// How blocks that work as quant/tile_patch.cuh says get their tiles: which ones, their inputs, and what helpers do with them.
#pragma once
#include "ptx/tma.cuh"
#include "quant/expert_tiles.cuh"
#include "quant/tile_patch.cuh"

namespace rtk {

// Tiles of INPUTS matrices of 16-bit numbers on their way to shared memory by the copy engine, in SLOTS places for
// each matrix, as boxes of the rows of two worker warps (a pair), which wait for no others.
template <int SLOTS, int INPUTS>
struct PatchStream {
    static constexpr int kWarpPairs = 8, kPairWarps = kPatchWarps / kWarpPairs;
    static constexpr u32 kRowBytes = kTileSide * 2, kBoxRows = kPairWarps * kPatchWarpRows, kBoxBytes = kBoxRows * kRowBytes;
    static constexpr u32 kPairBytes = SLOTS * INPUTS * kBoxBytes, kPairBarriers = 2 * SLOTS;
    static constexpr u32 kBytes = kWarpPairs * kPairBytes;  // of shared memory, aligned to 128
    static constexpr int kBarriers = kWarpPairs * kPairBarriers;

    ptx::SharedAddress boxes, full;          // of all pairs; behind the `full` barriers of a pair are its `empty` ones
    ptx::SharedAddress own_boxes, own_full;  // of the worker's pair

    RTK_DEVICE PatchStream(u8* memory, u64* barriers)
        : boxes(ptx::shared_address(memory)), full(ptx::shared_address(barriers)) {
        const u32 pair = threadIdx.x / (kPairWarps * kWarp);
        own_boxes = boxes + pair * kPairBytes, own_full = full + pair * (8 * kPairBarriers);
    }

    // One thread makes the barriers; a barrier of the block later, workers may wait. Those of the first tile come first:
    // that thread may ask for it before it calls init_rest.
    RTK_DEVICE void init_first() const {
        init([](u32 b) { return b % kPairBarriers == 0; });
    }
    RTK_DEVICE void init_rest() const {
        init([](u32 b) { return b % kPairBarriers != 0; });
    }

    template <typename Which>
    RTK_DEVICE void init(const Which& which) const {
#pragma unroll
        for (u32 b = 0; b < kBarriers; ++b)
            if (which(b)) ptx::mbarrier_init(full + 8 * b, b % kPairBarriers < SLOTS ? 1 : kPairWarps);
        ptx::mbarrier_fence_init();
    }

    // Asks for the nth tile as soon as there is room for it. One thread calls.
    template <typename... Maps>
    RTK_DEVICE void fetch(const PatchOutput& place, u32 nth, const Maps&... maps) const {
        const u32 slot = nth % SLOTS, rows = place.rows;
        const i32 column = static_cast<i32>(place.column), row = static_cast<i32>(place.row);
        const u64 policy = ptx::l2_last();
#pragma unroll 1
        for (u32 pair = 0; pair < kWarpPairs; ++pair) {
            const ptx::SharedAddress ready = full + 8 * (pair * kPairBarriers + slot);
            ptx::SharedAddress to = boxes + pair * kPairBytes + slot * (INPUTS * kBoxBytes);
            const u32 first = pair * kBoxRows;
            if (nth >= SLOTS) ptx::mbarrier_wait(ready + 8 * SLOTS, (nth / SLOTS & 1) ^ 1);
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
    RTK_DEVICE ptx::SharedAddress wait(u32 nth) const {
        const u32 slot = nth % SLOTS, thread = this_thread();
        ptx::mbarrier_wait(own_full + 8 * slot, nth / SLOTS & 1);
        return own_boxes + slot * (INPUTS * kBoxBytes) + thread / 16 % (2 * kPairWarps) * (kPatchRows * kRowBytes) +
               thread % 16 * 16;
    }
    // Row r from there.
    RTK_DEVICE static Raw<16> read(ptx::SharedAddress spot, int r) { return ptx::ld_shared_16(spot + r * kRowBytes); }

    // The warp has read what it needs.
    RTK_DEVICE void release(u32 nth) const {
        __syncwarp();
        if (patch_lane() == 0) ptx::mbarrier_arrive(own_full + 8 * (SLOTS + nth % SLOTS));
    }
};

// The tiles of experts, or of one matrix. The whole block calls, and meets.
template <bool EXPERTS>
RTK_DEVICE TilePlaces stream_places(u8* memory, const void* counts, i64 width, i64 experts, i64 rows, i64 cols) {
    if constexpr (EXPERTS) {
        return TilePlaces(memory, counts, width, experts, rows, cols);
    } else {
        __syncthreads();
        return TilePlaces(rows, cols);
    }
}

// The tiles of one block, numbered along the columns first, with everything that warps need to know of each. The thread
// that fetches works that out, and tells the others; a place without rows ends the walk of all. The first ones are
// blockIdx.x and blockIdx.x + gridDim.x, and so on without a counter. With one (0 at the beginning), a block draws
// numbers from it: then blocks stay within a short stretch of tiles, and what they read and write lies close together in
// memory, however unequal their speed.
struct StreamWalk {
    static constexpr u32 kFixed = 2;  // tiles of a block that are not drawn
    static constexpr u32 kKept = 8;   // the thread that fetches is up to three tiles before the warps that store

    const TilePlaces& all;
    const Quantized& out;
    u32 cols;  // of one side
    PatchOutput* kept;
    ptx::SharedAddress known;  // barriers, one for each place
    u32* counter;

    RTK_DEVICE StreamWalk(const TilePlaces& places, const Quantized& output, u32 width, PatchOutput* memory, u64* barriers,
                          u32* numbers)
        : all(places), out(output), cols(width), kept(memory), known(ptx::shared_address(barriers)), counter(numbers) {}

    // The block meets afterwards.
    RTK_DEVICE static void init(u64* barriers) {
        if (threadIdx.x != kWarp) return;
#pragma unroll
        for (u32 i = 0; i < kKept; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), 1);
    }

    // The place of the nth tile, as soon as it is known. If it has no rows, there is no such tile, and no later one.
    RTK_DEVICE const PatchOutput& operator[](u32 nth) const {
        ptx::mbarrier_wait(known + 8 * (nth % kKept), nth / kKept & 1);
        return kept[nth % kKept];
    }
    // The same of one that has been looked at.
    RTK_DEVICE const PatchOutput& at(u32 nth) const { return kept[nth % kKept]; }
    RTK_DEVICE u32 scale_step() const { return out.by_group ? 1 : (out.cols + (kTileSide - 1)) / kTileSide; }

    // The thread that fetches calls, for one tile after the other: works out where it is, and tells the others. As late
    // as possible, that is when it has asked for the inputs of the tile before: a tile that is drawn earlier is worked
    // on when other blocks have gone further.
    RTK_DEVICE const PatchOutput& find(u32 nth) const {
        u32 number = blockIdx.x + nth * gridDim.x;
        if (counter != nullptr && nth >= kFixed) number = kFixed * gridDim.x + atomicAdd(counter, 1u);
        PatchOutput& to = kept[nth % kKept];
        to.rows = 0;
        if (number < all.count()) fill(to, all.find(number));
        ptx::mbarrier_arrive(known + 8 * (nth % kKept));
        return to;
    }

    RTK_DEVICE void fill(PatchOutput& to, const TilePlace& place) const {
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
    // A division would be most of the instructions before the first request. Blocks are few: half a tile from any whole
    // quotient, the error of the reciprocal (2^-23 relative) cannot reach the next one.
    const u32 across = static_cast<u32>(cols + (kTileSide - 1)) / kTileSide;
    const u32 down = static_cast<u32>((static_cast<float>(blockIdx.x) + 0.5f) * ptx::rcp(static_cast<float>(across)));
    PatchOutput place;
    place.row = down * kTileSide;
    place.rows = static_cast<u32>(rows) - place.row;
    place.column = (blockIdx.x - down * across) * kTileSide;
    return place;
}

// What the helpers do with all tiles of the block. `fetch(place, nth)` asks for inputs, as soon as there is room for
// them.
template <int SIDES, typename Fetch>
RTK_DEVICE void help(PatchShared<SIDES>& shared, const StreamWalk& walk, bool pow2, const Fetch& fetch) {
    const PatchRole role = patch_role();
    if (role == PatchRole::kFetch) {
#pragma unroll 1
        for (u32 nth = 0;; ++nth) {
            const PatchOutput& place = walk.find(nth);
            if (place.rows == 0) break;
            fetch(place, nth);
        }
    } else if (role == PatchRole::kStore) {
#pragma unroll 1
        for (u32 nth = 0; walk[nth].rows != 0; ++nth) shared.store_columns(walk.at(nth), nth);
    } else if (role == PatchRole::kScale) {
#pragma unroll 1
        for (u32 nth = 0; walk[nth].rows != 0; ++nth) shared.make_scales(walk.at(nth), nth, pow2);
    }
}

}  // namespace rtk
