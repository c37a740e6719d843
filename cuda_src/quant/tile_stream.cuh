// How blocks that work as described in quant/tile_patch.cuh get their tiles: which ones, their inputs, and what helpers
// do.
#pragma once
#include "ptx/tma.cuh"
#include "quant/expert_tiles.cuh"
#include "quant/tile_patch.cuh"

namespace rtk {

// TMA loads of tiles of INPUTS 16-bit matrices into shared memory, SLOTS per matrix, as boxes of the rows of two worker
// warps (a pair), which wait for no other warps.
template <int SLOTS, int INPUTS>
struct PatchStream {
    static constexpr int kWarpPairs = 8, kPairWarps = kPatchWarps / kWarpPairs;
    static constexpr u32 kRowBytes = kTileSide * 2, kBoxRows = kPairWarps * kPatchWarpRows, kBoxBytes = kBoxRows * kRowBytes;
    static constexpr u32 kPairBytes = SLOTS * INPUTS * kBoxBytes, kPairBarriers = 2 * SLOTS;
    static constexpr u32 kBytes = kWarpPairs * kPairBytes;  // of shared memory, aligned to 128
    static constexpr int kBarriers = kWarpPairs * kPairBarriers;

    ptx::SharedAddress boxes, full;          // of all pairs; the `full` barriers of a pair are followed by its `empty` ones
    ptx::SharedAddress own_boxes, own_full;  // of the worker's pair

    RTK_DEVICE PatchStream(u8* memory, u64* barriers)
        : boxes(ptx::shared_address(memory)), full(ptx::shared_address(barriers)) {
        const u32 pair = threadIdx.x / (kPairWarps * kWarp);
        own_boxes = boxes + pair * kPairBytes, own_full = full + pair * (8 * kPairBarriers);
    }

    // One thread initialises the barriers; after a block-wide barrier, workers may wait. Those of the first tile come
    // first, so that thread may load it before it calls init_rest.
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

    // Loads the nth tile as soon as there is room for it. Called by one thread.
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

    // Waits for them, and returns the address of the thread's first row of the first input; the next input is kBoxBytes
    // further.
    RTK_DEVICE ptx::SharedAddress wait(u32 nth) const {
        const u32 slot = nth % SLOTS, thread = this_thread();
        ptx::mbarrier_wait(own_full + 8 * slot, nth / SLOTS & 1);
        return own_boxes + slot * (INPUTS * kBoxBytes) + thread / 16 % (2 * kPairWarps) * (kPatchRows * kRowBytes) +
               thread % 16 * 16;
    }
    // Row r from there.
    RTK_DEVICE static Raw<16> read(ptx::SharedAddress spot, int r) { return ptx::ld_shared_16(spot + r * kRowBytes); }

    // The warp has finished reading.
    RTK_DEVICE void release(u32 nth) const {
        __syncwarp();
        if (patch_lane() == 0) ptx::mbarrier_arrive(own_full + 8 * (SLOTS + nth % SLOTS));
    }
};

// The tiles of experts, or of one matrix. The whole block calls this, and synchronises afterwards.
template <bool EXPERTS>
RTK_DEVICE TilePlaces stream_places(u8* memory, const void* counts, i64 width, i64 experts, i64 rows, i64 cols) {
    if constexpr (EXPERTS) {
        return TilePlaces(memory, counts, width, experts, rows, cols);
    } else {
        __syncthreads();
        return TilePlaces(rows, cols);
    }
}

// The tiles of one block, numbered along the columns first, with everything that warps need to know about each. The
// loading thread computes that and publishes it; an entry without rows ends the loop of all roles. The first tiles are
// blockIdx.x and blockIdx.x + gridDim.x, and so on without a counter. With one (initially 0), a block claims numbers
// from it: then blocks stay within a short stretch of tiles, and their accesses stay close together in memory, however
// unequal their speed.
struct StreamWalk {
    static constexpr u32 kFixed = 2;  // tiles of a block that are not claimed from the counter
    static constexpr u32 kKept = 8;   // the loading thread is up to three tiles ahead of the storing warps

    const TilePlaces& all;
    const Quantized& out;
    u32 cols;  // of one side
    PatchOutput* kept;
    ptx::SharedAddress known;  // barriers, one for each place
    u32* counter;

    RTK_DEVICE StreamWalk(const TilePlaces& places, const Quantized& output, u32 width, PatchOutput* memory, u64* barriers,
                          u32* numbers)
        : all(places), out(output), cols(width), kept(memory), known(ptx::shared_address(barriers)), counter(numbers) {}

    // The block synchronises afterwards.
    RTK_DEVICE static void init(u64* barriers) {
        if (threadIdx.x != kWarp) return;
#pragma unroll
        for (u32 i = 0; i < kKept; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), 1);
    }

    // The entry of the nth tile, as soon as it is known. If it has no rows, neither this tile nor any later one exists.
    RTK_DEVICE const PatchOutput& operator[](u32 nth) const {
        ptx::mbarrier_wait(known + 8 * (nth % kKept), nth / kKept & 1);
        return kept[nth % kKept];
    }
    // The same for one that has been read before.
    RTK_DEVICE const PatchOutput& at(u32 nth) const { return kept[nth % kKept]; }
    RTK_DEVICE u32 scale_step() const { return out.by_group ? 1 : (out.cols + (kTileSide - 1)) / kTileSide; }

    // Called by the loading thread, tile by tile: computes the position of a tile and publishes it. As late as
    // possible, that is after it has loaded the inputs of the previous tile: a tile that is claimed earlier would be
    // processed when other blocks have gone further.
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

// Position of the block's first tile without experts: all that is needed to load its inputs.
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

// Runs on the helpers, over all tiles of the block. `fetch(place, nth)` loads inputs, as soon as there is room for
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
