// Producers of attention_sm90_paged.cu for caches of 8-bit codes: four warps, each with a quarter of the rows of all tiles.
//
// A warp loads codes by TMA to a ring of its own, two stages of keys and two of values, and converts them to operands of
// wgmma: keys to the type of q, values to fp16, which all codes have exactly. The next tile but one is loaded to a stage
// as soon as it has been converted. Rows of codes are 128 bytes (TMA adds zeros), with the 128-byte swizzle; eight lanes convert half of
// row r and of row r ^ 5 at a time, so that neither loads nor stores have bank conflicts. Rows of values past the last key
// are cleared before they are converted, because codes may be NaN.
#pragma once
#include "attention/codes.cuh"
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"

namespace rtk {

// |scale| in units of log2 as a factor of scores. It is never 0: a score of -inf, which is masked, must stay what it is.
RTK_DEVICE float positive_factor(float scale) {
    constexpr float kSmallest = 1.17549435e-38f;
    const float factor = fabsf(scale) * kLog2e;
    return factor < kSmallest ? kSmallest : factor;
}

// A box of `unit` keys of this lane, which never crosses a page. Boxes of keys that do not exist are loaded from where the
// first key of the tile is.
struct PageBox {
    int page, slot, row;  // row: of the tile

    // Boxes of `rows` rows from row `first` of the tile that starts with key `start`; there are `keys` in all.
    RTK_DEVICE PageBox(const i32* pages, int start, int first, int rows, int keys, int unit, int page_size, i64 page_divisor) {
        row = first + static_cast<int>(threadIdx.x) % kWarp * unit;
        const int key = start + (row < first + rows && start + row < keys ? row : 0);
        const int index = static_cast<int>(divided(static_cast<u32>(key), page_divisor));
        page = pages[index];
        slot = key - index * page_size;
    }
};

// The type of values in products.
template <typename T, int CODES>
struct PageValue {
    using Type = fp16;
};
template <typename T>
struct PageValue<T, kSameType> {
    using Type = T;
};

// The quarter of a tile of BN keys that a warp loads and converts.
template <int CODES, int BN, int D>
struct PageCodes {
    static constexpr int kWarps = 4, kRows = BN / kWarps, kStages = 2;
    static_assert(kRows % 8 == 0 && D % 64 == 0 && D <= 128, "whole groups of 8 rows, which have 128 bytes");
    static constexpr u32 kBytes = kRows * kTileRow;  // of a stage
    static constexpr int kRings = 2 * kWarps;
    static constexpr u32 kAllBytes = kRings * kStages * kBytes, kBarrierBytes = kRings * kStages * 8;
    using State = PipelineState<kStages>;

    ptx::SharedAddress codes, barriers;  // of a ring of this warp; barriers are one per stage
    int first;                           // row

    // `ring`: 0 for keys, 1 for values.
    RTK_DEVICE PageCodes(ptx::SharedAddress all_codes, ptx::SharedAddress all_barriers, int warp, int ring)
        : codes(all_codes + (ring * kWarps + warp) * kStages * kBytes),
          barriers(all_barriers + (ring * kWarps + warp) * kStages * 8),
          first(warp * kRows) {}

    // Called by one thread for all rings.
    RTK_DEVICE static void init(ptx::SharedAddress all_barriers) {
        for (u32 at = 0; at < kBarrierBytes; at += 8) ptx::mbarrier_init(all_barriers + at, 1);
    }

    // Called by the warp, after it has converted what was there.
    RTK_DEVICE void fetch(const PageBox& box, const ptx::TensorMap& map, int head, int stage) const {
        const ptx::SharedAddress full = barriers + 8 * stage;
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive_expect(full, kBytes);
        __syncwarp();
        if (box.row < first + kRows)
            ptx::tma_load_4d(codes + stage * kBytes + (box.row - first) * kTileRow, map, full, 0, box.slot, head, box.page);
        __syncwarp();
    }

    RTK_DEVICE void wait(const State& state) const { ptx::mbarrier_wait(barriers + 8 * state.stage, state.phase); }

    // Clears codes from row `end` of the tile on.
    RTK_DEVICE void clear(int end, int stage) const {
        const u32 lane = threadIdx.x % kWarp;
        for (u32 at = max(end - first, 0) * kTileRow + lane * 16; at < kBytes; at += kWarp * 16)
            ptx::st_shared_16(codes + stage * kBytes + at, Raw<16>{{0, 0, 0, 0}});
        __syncwarp();
    }

    // Converts this quarter of a tile of T.
    template <typename T>
    RTK_DEVICE void convert(ptx::SharedAddress tile, int stage) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp, near = lane / 8 ^ lane / 4 % 2 * 5, quad = lane % 4;
        const ptx::SharedAddress from = codes + stage * kBytes + near * kTileRow, to = tile + (first + near) * kTileRow;
        constexpr int kBoxes = D / 64, kVectors = kRows / 8 * kBoxes, kEach = 4;  // vectors of a thread, and in flight
#pragma unroll
        for (int i = 0; i < kVectors; i += kEach) {
            Raw<16> raw[kEach];
#pragma unroll
            for (int j = 0; j < kEach; ++j)
                raw[j] = ptx::ld_shared_16(from + (i + j) / kBoxes * (8 * kTileRow) + ((((i + j) % kBoxes * 4 + quad) ^ near) << 4));
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                Raw<16> pairs[2];
                codes_to_vectors<T, CODES>(pairs, raw[j]);
                const ptx::SharedAddress row = to + (i + j) % kBoxes * (BN * kTileRow) + (i + j) / kBoxes * (8 * kTileRow);
#pragma unroll
                for (int half = 0; half < 2; ++half) ptx::st_shared_16(row + (((2 * quad + half) ^ near) << 4), pairs[half]);
            }
        }
    }
};

}  // namespace rtk
