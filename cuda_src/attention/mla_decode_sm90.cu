// Latent attention (MLA) decoding on sm_90a: the computation of mla_decode.cu with wgmma (sm90_latent.cuh) and TMA.
//
// A block owns 64 rows (row r: token r / heads, head r % heads) and one split of the keys. One warp per tile loads it in
// boxes of `box_rows` rows, which divide a page evenly. Splits are those of mla_decode.cu, with an even number of tiles
// each; a tile past the last key is zero-filled and masked.
#include "attention/sm90_latent.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// Of rows of queries, whose keys end where the mask says.
struct LatentKeys {
    const Mask& mask;
    int key0, all_end, row, rows, heads;  // key0: of the split; row: of this thread

    RTK_DEVICE void read(int) const {}
    RTK_DEVICE void apply(float (&s)[LatentBlock::kKeys / 2], int tile) const {
        const int first = key0 + tile * LatentBlock::kKeys;
        if (first + LatentBlock::kKeys <= all_end) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = min(row + 8 * r, rows - 1) / heads;
            mask_row(s, r, 0, mask.hi(token) - first - 2 * (static_cast<int>(threadIdx.x) % 4));
        }
    }
};

template <typename T>
__global__ void __launch_bounds__(LatentBlock::kThreads, 1)
    mla_decode_sm90(const __grid_constant__ ptx::TensorMap cache_map, const T* q, const i32* lengths, const i32* table, T* out,
                    float* lse, float* parts, float* part_lse, i64 heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 splits,
                    i64 page_size, i64 box_rows, i64 table_row, i64 q_batch, i64 q_row, i64 q_head, i64 right, double scale) {
    using Tile = LatentBlock::Tile;
    using Pipe = LatentBlock::Pipe;
    constexpr int kRows = LatentBlock::kRows, kKeys = LatentBlock::kKeys, kStages = LatentBlock::kStages;
    constexpr int kConsumers = LatentBlock::kConsumers, kHalfBoxes = LatentBlock::kHalfBoxes;
    extern __shared__ u8 memory[];
    const LatentBlock block(memory);
    const ptx::SharedAddress patches = block.after;  // one barrier per tile
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int rows = static_cast<int>(lq * heads), heads_here = static_cast<int>(heads), row0 = static_cast<int>(blockIdx.x) * kRows;
    const int split = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
    const Sequence sequence = sequence_at(batch, lq, lkv, nullptr, nullptr, lengths);
    const Mask mask(sequence, -1, right);
    const int first_token = row0 / heads_here, last_token = min(row0 + kRows - 1, rows - 1) / heads_here;
    const Interval any = mask.keys_any(first_token, last_token + 1);
    const int all_tiles = any.empty() ? 0 : (any.end + kKeys - 1) / kKeys;
    const int rounds_per_split = (all_tiles + 2 * static_cast<int>(splits) - 1) / (2 * static_cast<int>(splits));
    const int begin = split * 2 * rounds_per_split, rounds = (min(begin + 2 * rounds_per_split, all_tiles) - begin + 1) / 2;

    if (threadIdx.x == 0) {
        block.init(1);
        for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(patches + 8 * i, 1);
        ptx::mbarrier_fence_init();
    }
    if (rounds > 0)
        block.store_queries<T>(d_qk, [&](int row) -> const T* {
            if (row0 + row >= rows) return nullptr;
            const int token = (row0 + row) / heads_here;
            return q + batch * q_batch + token * q_row + (row0 + row - token * heads_here) * q_head;
        });
    ptx::fence_async_shared();
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<40>();
        const int tile = warp - kConsumers;
        if (tile >= kStages) return;
        u32 patched = 0;
        // One lane per box of rows of a tile: how many keys and boxes there are, and where this lane's box is.
        int exist = 0, parts_here = 0, slot = 0, number = 0;
        const u32 part_bytes = static_cast<u32>(box_rows) * kTileRow;
        auto find = [&](int i) {
            const int key0 = (begin + i) * kKeys, key = key0 + lane * static_cast<int>(box_rows);
            exist = max(min(sequence.keys - key0, kKeys), 0);
            parts_here = (exist + static_cast<int>(box_rows) - 1) / static_cast<int>(box_rows);
            if (lane >= parts_here) return;
            const int page = key / static_cast<int>(page_size);
            slot = key - page * static_cast<int>(page_size);
            number = table == nullptr ? batch : table[batch * table_row + page];
        };
        const ptx::SharedAddress patch = patches + 8 * tile;
        const Pipe last_pipe = block.last_pipe(), first = block.half_pipe(tile), second = block.half_pipe(1 - tile);
        if (rounds > 0) find(tile);
#pragma unroll 1
        for (int i = tile; i < 2 * rounds; i += kStages) {
            const Pipe::State state{tile, static_cast<u32>(i) / 2 % 2};
            const ptx::SharedAddress to = block.tiles + state.stage * Tile::kBytes;
            auto fetch = [&](int box, int boxes, ptx::SharedAddress arrives, int parts, int row, int page) {
                if (lane == 0) ptx::mbarrier_arrive_expect(arrives, parts * part_bytes * boxes);
                __syncwarp();
                if (lane < parts)
                    for (int b = box; b < box + boxes; ++b)
                        ptx::tma_load_3d(to + b * Tile::kBoxBytes + lane * part_bytes, cache_map, arrives, 64 * b, row, page);
            };
            // In the order in which consumers release the previous contents.
            const int first_box = tile * kHalfBoxes, second_box = kHalfBoxes - first_box;
            last_pipe.acquire(state);
            if (exist == kKeys) {
                fetch(2 * kHalfBoxes, 1, last_pipe.full(state), parts_here, slot, number);
                first.acquire(state);
                fetch(first_box, kHalfBoxes, first.full(state), parts_here, slot, number);
                const int parts_of_tile = parts_here, slot_of_tile = slot, number_of_tile = number;
                find(i + kStages);  // computed while this warp would wait; past the last tile it is unused
                second.acquire(state);
                fetch(second_box, kHalfBoxes, second.full(state), parts_of_tile, slot_of_tile, number_of_tile);
                continue;
            }
            // Rows past the last key belong to nobody and may be NaN; this warp overwrites them before consumers see
            // the tile.
            first.acquire(state), second.acquire(state);
            fetch(0, Tile::kBoxes, patch, parts_here, slot, number);
            ptx::mbarrier_wait(patch, patched);
            patched ^= 1u;
            for (u32 at = exist * kTileRow + lane * 16; at < Tile::kBoxBytes; at += kWarp * 16)
                for (int b = 0; b < Tile::kBoxes; ++b) ptx::st_shared_16(to + b * Tile::kBoxBytes + at, Raw<16>{{0, 0, 0, 0}});
            ptx::fence_async_shared();
            last_pipe.commit_warp(state), first.commit_warp(state), second.commit_warp(state);
            find(i + kStages);
        }
        return;
    }

    ptx::registers_take<232>();
    const int own_row = row0 + warp % 4 * 16 + lane / 4;
    const int all_end = mask.keys_all(first_token, last_token + 1).end;
    float o[LatentBlock::kColumns / 2], times[2], logs[2];
    block.attend<T>(rounds, static_cast<float>(scale) * kLog2e, LatentKeys{mask, begin * kKeys, all_end, own_row, rows, heads_here}, o,
                    times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = own_row + 8 * r;
        if (row >= rows) continue;
        const i64 flat = static_cast<i64>(batch) * rows + row, of_split = split * (static_cast<i64>(gridDim.z) * rows) + flat;
        LatentBlock::store_row(out + flat * d_v, splits > 1 ? parts + of_split * d_v : nullptr, d_v, o, r, times[r]);
        if (warp < 4 && lane % 4 == 0) {
            const int token = row / heads_here;
            if (splits > 1) {
                part_lse[of_split] = logs[r];
            } else {
                lse[(static_cast<i64>(batch) * heads + row - token * heads_here) * lq + token] = logs[r];
            }
        }
    }
}

}  // namespace rtk
