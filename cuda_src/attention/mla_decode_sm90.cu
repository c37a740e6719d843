// Latent attention (MLA) decoding on sm_90a: the computation of mla_decode.cu with wgmma and TMA.
//
// A block owns 64 rows (row r: token r / heads, head r % heads) and one split of the keys. Shared memory holds q and
// two tiles of 64 latents, each key and value in one; one warp per tile loads it in boxes of `box_rows` rows, which
// divide a page evenly. Two warpgroups own all 64 rows and half of the result's columns each. Warpgroup g computes
// scores and softmax probabilities of tiles 2j + g and hands the probabilities, with the maximum that they are relative
// to, to the other one, warp by warp; each accumulates both tiles' values into its columns. So warpgroup 1 runs about
// half a round behind, and the products of one overlap with the softmax of the other.
//
// Two tiles take 144 KB, which leaves no room for a third one to prefetch. Instead, parts of a tile are released
// separately: the last box of columns after the scores, each half of the others after the one product that reads it as
// values. Each tile has its own producer warp, so no load waits for a part of the other tile.
//
// Scores, probabilities and sums are fp32; probabilities are rounded to T for the product. Splits are those of
// mla_decode.cu, with an even number of tiles each; a tile past the last key is zero-filled and masked.
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(384, 1)
    mla_decode_sm90(const __grid_constant__ ptx::TensorMap cache_map, const T* q, const i32* lengths, const i32* table, T* out,
                    float* lse, float* parts, float* part_lse, i64 heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 splits,
                    i64 page_size, i64 box_rows, i64 table_row, i64 q_batch, i64 q_row, i64 q_head, i64 right, double scale) {
    constexpr int kRows = 64, kKeys = 64, kWidth = 576, kColumns = 256, kConsumers = 8, kStages = 2, kHalfBoxes = kColumns / 64;
    using Tile = Boxed<kKeys, kWidth>;
    using Pipe = Pipeline<kStages>;
    constexpr u32 kHalf = kHalfBoxes * Tile::kBoxBytes;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress tiles = q_tile + Tile::kBytes;
    const ptx::SharedAddress packed_p = tiles + kStages * Tile::kBytes;  // [4][128] vectors, then [128] pairs of maxima or sums
    const ptx::SharedAddress barriers = packed_p + 128 * (4 * 16 + 8);
    auto half_pipe = [&](int half) { return Pipe{barriers + half * Pipe::kBytes}; };  // a warpgroup's columns, in both tiles
    const Pipe last_pipe{barriers + 2 * Pipe::kBytes};                                // the columns that are not values
    const ptx::SharedAddress patches = barriers + 3 * Pipe::kBytes;                   // one barrier per tile
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
        for (int i = 0; i < 2; ++i) half_pipe(i).init(1, kConsumers / 2);
        last_pipe.init(1, kConsumers / 2);
        for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(patches + 8 * i, 1);
        ptx::mbarrier_fence_init();
    }
    // Stores q in the layout that TMA would write; rows that do not exist are 0.
    if (rounds > 0)
        for (int i = threadIdx.x; i < kRows * (kWidth / 8); i += 384) {
            const int row = i / (kWidth / 8), vector = i % (kWidth / 8), token = (row0 + row) / heads_here;
            Raw<16> raw{{0, 0, 0, 0}};
            if (row0 + row < rows && vector * 8 < d_qk)
                raw = load_raw<T, 8, false>(q + batch * q_batch + token * q_row + (row0 + row - token * heads_here) * q_head + vector * 8);
            ptx::st_shared_16(q_tile + vector / 8 * Tile::kBoxBytes + row * kTileRow + ((vector % 8 ^ row % 8) << 4), raw);
        }
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
        if (rounds > 0) find(tile);
#pragma unroll 1
        for (int i = tile; i < 2 * rounds; i += kStages) {
            const Pipe::State state{tile, static_cast<u32>(i) / 2 % 2};
            const ptx::SharedAddress to = tiles + state.stage * Tile::kBytes;
            auto fetch = [&](int box, int boxes, ptx::SharedAddress arrives, int parts, int row, int page) {
                if (lane == 0) ptx::mbarrier_arrive_expect(arrives, parts * part_bytes * boxes);
                __syncwarp();
                if (lane < parts)
                    for (int b = box; b < box + boxes; ++b)
                        ptx::tma_load_3d(to + b * Tile::kBoxBytes + lane * part_bytes, cache_map, arrives, 64 * b, row, page);
            };
            // In the order in which consumers release the previous contents.
            const Pipe first = half_pipe(tile), second = half_pipe(1 - tile);
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
    const int group = warp / 4, own_row = warp % 4 * 16 + lane / 4, t = lane % 4;
    const Pipe own_half = half_pipe(group), other_half = half_pipe(1 - group);
    const u32 half_at = group * kHalf, other_at = kHalf - half_at;
    const float factor = static_cast<float>(scale) * kLog2e;
    const int all_end = mask.keys_all(first_token, last_token + 1).end;
    const ptx::SharedAddress vectors = packed_p + threadIdx.x % 128 * 16, pair = packed_p + 128 * 64 + threadIdx.x % 128 * 8;
    SoftmaxState softmax;
    float o[kColumns / 2], s[kKeys / 2], correction[2] = {1.0f, 1.0f};
#pragma unroll
    for (float& x : o) x = 0.0f;

    auto make_scores = [&](const Pipe::State& state) {
        u32 keys_at = group * Tile::kBytes, queries_at = 0;
        ptx::forget(keys_at), ptx::forget(queries_at);  // the compiler would keep 72 loop-invariant descriptors in registers
        const ptx::SharedAddress keys = tiles + keys_at, queries = q_tile + queries_at;
        last_pipe.wait(state);
        ptx::wgmma_fence();
        multiply_rows<T, kRows, kKeys, 64>(s, queries + 2 * kHalf, keys + 2 * kHalf);
        own_half.wait(state);
        ptx::wgmma_fence();
        multiply_rows<T, kRows, kKeys, kColumns>(s, queries + half_at, keys + half_at, true);
        other_half.wait(state);
        ptx::wgmma_fence();
        multiply_rows<T, kRows, kKeys, kColumns>(s, queries + other_at, keys + other_at, true);
        ptx::wgmma_commit();
    };
    auto scale_sums = [&] {
        if (!__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) o[j] *= correction[j / 2 % 2];
    };
    // Probabilities of the tile from s, packed, for both warpgroups.
    auto to_probabilities = [&](u32(&p)[kKeys / 16][4], int round) {
        const int key0 = (begin + 2 * round + group) * kKeys;
        if (key0 + kKeys > all_end) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = min(row0 + own_row + 8 * r, rows - 1) / heads_here;
                mask_row(s, r, 0, mask.hi(token) - key0 - 2 * t);
            }
        }
        softmax.add<8>(s, factor, correction);
        pack_rows<T>(p, s);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
            ptx::st_shared_16(vectors + k * (128 * 16), Raw<16>{{p[k][0], p[k][1], p[k][2], p[k][3]}});
        ptx::st_shared_8(pair, Raw<8>{{__float_as_uint(softmax.top[0]), __float_as_uint(softmax.top[1])}});
    };
    // Takes the probabilities of the other warpgroup and adopts its maxima.
    auto take_probabilities = [&](u32(&p)[kKeys / 16][4]) {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            const Raw<16> raw = ptx::ld_shared_16(vectors + k * (128 * 16));
#pragma unroll
            for (int i = 0; i < 4; ++i) p[k][i] = raw.w[i];
        }
        const Raw<8> tops = ptx::ld_shared_8(pair);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = __uint_as_float(tops.w[r]);
            correction[r] = ptx::ex2(softmax.top[r] * factor - (top == negative_infinity() ? 0.0f : top * factor));
            softmax.top[r] = top;
            softmax.sum[r] *= correction[r];
        }
    };
    auto add_values = [&](const u32(&p)[kKeys / 16][4], int tile) {
        u32 values_at = tile * Tile::kBytes + half_at;
        ptx::forget(values_at);
        ptx::wgmma_fence();
        multiply_packed<T, kKeys>(o, p, tiles + values_at, true);
        ptx::wgmma_commit();
    };
    // Warp w of one warpgroup owns the same rows as warp w of the other.
    const int from_0 = 1 + warp % 4, from_1 = 5 + warp % 4, both = 9 + warp % 4;
    if (group == 0) {
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            const Pipe::State first{0, static_cast<u32>(round) % 2}, second{1, static_cast<u32>(round) % 2};
            u32 p[kKeys / 16][4];
            make_scores(first);
            ptx::wgmma_wait<0>();
            if (lane == 0) last_pipe.release(first);
            to_probabilities(p, round);
            ptx::named_barrier_arrive(from_0, 64);
            scale_sums();
            add_values(p, 0);
            ptx::wgmma_wait<0>();
            if (lane == 0) own_half.release(first);
            ptx::named_barrier_sync(from_1, 64);
            take_probabilities(p);
            scale_sums();
            own_half.wait(second);
            add_values(p, 1);
            ptx::wgmma_wait<0>();
            if (lane == 0) own_half.release(second);
        }
    } else {
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            const Pipe::State first{0, static_cast<u32>(round) % 2}, second{1, static_cast<u32>(round) % 2};
            u32 p[kKeys / 16][4], own_p[kKeys / 16][4];
            make_scores(second);
            ptx::named_barrier_sync(from_0, 64);
            take_probabilities(p);
            scale_sums();
            own_half.wait(first);
            add_values(p, 0);
            ptx::wgmma_wait<1>();
            if (lane == 0) last_pipe.release(second);
            to_probabilities(own_p, round);
            ptx::named_barrier_arrive(from_1, 64);
            ptx::wgmma_wait<0>();
            if (lane == 0) own_half.release(first);
            scale_sums();
            add_values(own_p, 1);
            ptx::wgmma_wait<0>();
            if (lane == 0) own_half.release(second);
        }
    }
    ptx::launch_dependents();
    // Each warpgroup holds the softmax sums of its own tiles.
    ptx::named_barrier_sync(both, 64);  // the last probabilities have been read
    const Raw<8> own_sums{{__float_as_uint(softmax.sum[0]), __float_as_uint(softmax.sum[1])}};
    ptx::st_shared_8(vectors + group * (128 * 16), own_sums);
    ptx::named_barrier_sync(both, 64);
    const Raw<8> other_sums = ptx::ld_shared_8(vectors + (1 - group) * (128 * 16));
    float times[2], logs[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.sum[r] += __uint_as_float(other_sums.w[r]);
    softmax.finish(factor, negative_infinity(), times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + own_row + 8 * r;
        if (row >= rows) continue;
        const i64 flat = static_cast<i64>(batch) * rows + row, of_split = split * (static_cast<i64>(gridDim.z) * rows) + flat;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const int column = group * kColumns + 8 * j + 2 * t;
            const float values[2] = {o[4 * j + 2 * r] * times[r], o[4 * j + 2 * r + 1] * times[r]};
            if (column >= d_v) continue;
            if (splits > 1) {
                store<float, 2>(parts + of_split * d_v + column, values);
            } else {
                store<T, 2>(out + flat * d_v + column, values);
            }
        }
        if (group == 0 && t == 0) {
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
