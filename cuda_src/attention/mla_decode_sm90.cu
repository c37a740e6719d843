// Latent attention of new tokens over a cache of latents on sm_90a: what mla_decode.cu computes, by wgmma and the copy engine.
//
// A block has 64 rows (row r: token r / heads, head r % heads) and one split of the keys. q lies in shared memory; one warp fetches tiles
// of 64 latents, key and value in one, through two stages: boxes of `box_rows` rows, which a page holds a whole number of. Two
// warpgroups have all 64 rows and half of the columns of the result each; both make the scores of all rows, half more products than
// one of them would need, and nothing is exchanged between them.
//
// Scores, powers, sums: fp32; powers are rounded to T for the product. Splits are those of mla_decode.cu.
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(384, 1)
    mla_decode_sm90(const __grid_constant__ ptx::TensorMap cache_map, const T* q, const i32* lengths, const i32* table, T* out,
                    float* lse, float* parts, float* part_lse, i64 heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 splits,
                    i64 page_size, i64 box_rows, i64 table_row, i64 q_batch, i64 q_row, i64 q_head, i64 right, double scale) {
    constexpr int kRows = 64, kKeys = 64, kWidth = 576, kColumns = 256, kConsumers = 8, kStages = 2;
    using Tile = Boxed<kKeys, kWidth>;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress tiles = q_tile + Tile::kBytes;
    const Pipeline<kStages> pipe{tiles + kStages * Tile::kBytes};
    const ptx::SharedAddress patch = pipe.barriers + Pipeline<kStages>::kBytes;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int rows = static_cast<int>(lq * heads), heads_here = static_cast<int>(heads), row0 = static_cast<int>(blockIdx.x) * kRows;
    const int split = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
    const Sequence sequence = sequence_at(batch, lq, lkv, nullptr, nullptr, lengths);
    const Mask mask(sequence, -1, right);
    const int first_token = row0 / heads_here, last_token = min(row0 + kRows - 1, rows - 1) / heads_here;
    const Interval any = mask.keys_any(first_token, last_token + 1);
    const int all_tiles = any.empty() ? 0 : (any.end + kKeys - 1) / kKeys;
    const int per_split = (all_tiles + static_cast<int>(splits) - 1) / static_cast<int>(splits);
    const int begin = split * per_split, end = min(begin + per_split, all_tiles);

    if (threadIdx.x == 0) {
        pipe.init(1, kConsumers);
        ptx::mbarrier_init(patch, 1);
        ptx::mbarrier_fence_init();
    }
    // q, as the copy engine would write it; what does not exist is 0.
    if (begin < end)
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
        if (warp != kConsumers) return;
        PipelineState<kStages> state;
        u32 patched = 0;
#pragma unroll 1
        for (int n = begin; n < end; ++n) {
            pipe.acquire(state);
            const ptx::SharedAddress to = tiles + state.stage * Tile::kBytes;
            const int exist = min(sequence.keys - n * kKeys, kKeys);  // keys of the tile
            const int parts_here = (exist + static_cast<int>(box_rows) - 1) / static_cast<int>(box_rows);
            // Behind the last key lie rows of nobody, which may be NaN; this warp overwrites them before consumers see the tile.
            const bool whole = exist == kKeys;
            const ptx::SharedAddress arrives = whole ? pipe.full(state) : patch;
            if (lane == 0) ptx::mbarrier_arrive_expect(arrives, parts_here * static_cast<u32>(box_rows) * kTileRow * Tile::kBoxes);
            __syncwarp();
            if (lane < parts_here) {  // a lane for each box of rows
                const int key = n * kKeys + lane * static_cast<int>(box_rows), page = key / static_cast<int>(page_size);
                const int number = table == nullptr ? batch : table[batch * table_row + page];
                for (int i = 0; i < Tile::kBoxes; ++i)
                    ptx::tma_load_3d(to + i * Tile::kBoxBytes + lane * static_cast<u32>(box_rows) * kTileRow, cache_map, arrives, 64 * i,
                                     key - page * static_cast<int>(page_size), number);
            }
            if (!whole) {
                ptx::mbarrier_wait(patch, patched);
                patched ^= 1u;
                for (u32 at = exist * kTileRow + lane * 16; at < Tile::kBoxBytes; at += kWarp * 16)
                    for (int i = 0; i < Tile::kBoxes; ++i) ptx::st_shared_16(to + i * Tile::kBoxBytes + at, Raw<16>{{0, 0, 0, 0}});
                ptx::fence_async_shared();
                pipe.commit_warp(state);
            }
            __syncwarp();
            state.advance();
        }
        return;
    }

    ptx::registers_take<232>();
    const int group = warp / 4, own_row = warp % 4 * 16 + lane / 4, t = lane % 4;
    const float factor = static_cast<float>(scale) * kLog2e;
    const int all_end = mask.keys_all(first_token, last_token + 1).end;
    SoftmaxState softmax;
    float o[kColumns / 2];
#pragma unroll
    for (float& x : o) x = 0.0f;
    PipelineState<kStages> state;
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
        const ptx::SharedAddress keys = tiles + state.stage * Tile::kBytes;
        float s[kKeys / 2], correction[2];
        pipe.wait(state);
        ptx::wgmma_fence();
        multiply_rows<T, kRows, kKeys, kWidth>(s, q_tile, keys);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        if (n * kKeys + kKeys > all_end) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = min(row0 + own_row + 8 * r, rows - 1) / heads_here;
                mask_row(s, r, 0, mask.hi(token) - n * kKeys - 2 * t);
            }
        }
        softmax.add(s, factor, correction);
        if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < kColumns / 2; ++j) o[j] *= correction[j / 2 % 2];
        }
        u32 p[kKeys / 16][4];
        pack_rows<T>(p, s);
        ptx::wgmma_fence();
        multiply_packed<T, kKeys>(o, p, keys + group * (kColumns / 64) * Tile::kBoxBytes, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        if (lane == 0) pipe.release(state);
        state.advance();
    }
    ptx::launch_dependents();
    float times[2], logs[2];
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
