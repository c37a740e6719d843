// Latent attention (MLA) of new tokens over a cache of latents, paged or contiguous: decoding in the absorbed form.
//
// A block owns 32 rows (row r: token r / heads, head r % heads; more rows take more blocks) and one split of the keys;
// latent_mma.cuh has its products. A tile is loaded into shared memory once and serves both. Two stages of tiles, two
// barriers per tile. The row addresses (pages) of the next tile are resolved one tile in advance.
//
// The number of splits follows from shapes, where they begin from lengths on the device; with more than one, fp32 partial
// results go to memory and attention_combine merges them (decode.cu).
#include "attention/grads.cuh"
#include "attention/latent_mma.cuh"
#include "attention/masks.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(kLatentThreads, 1)
    mla_decode(const T* q, const T* cache, const i32* lengths, const i32* table, T* out, float* lse, float* parts,
               float* part_lse, i64 heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 splits, i64 page_size, i64 page_divisor,
               i64 table_row, i64 q_batch, i64 q_row, i64 q_head, i64 cache_page, i64 cache_row, i64 right, double scale) {
    using Warp = LatentWarp<T>;
    constexpr int kVectors = Warp::kVectors;
    constexpr u32 kTileBytes = Warp::kTileBytes;
    extern __shared__ __align__(128) u8 shared[];
    float4* const score_parts = reinterpret_cast<float4*>(shared + 2 * kTileBytes);
    __shared__ i64 row_at[2][kLatentKeys];  // row offsets of a tile, -1 past the last key

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int rows = static_cast<int>(lq * heads), heads_here = static_cast<int>(heads);
    const int split = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
    const int row0 = static_cast<int>(blockIdx.x) * kLatentRows;
    const Sequence sequence{0, 0, static_cast<int>(lq), min(static_cast<int>(lkv), max(lengths[batch], 0))};
    const Mask mask(sequence, -1, right);
    const int last_token = min(row0 + kLatentRows - 1, rows - 1) / heads_here;
    const Interval any = mask.keys_any(row0 / heads_here, last_token + 1);
    const int all_tiles = any.empty() ? 0 : (any.end + kLatentKeys - 1) / kLatentKeys;
    const int per_split = (all_tiles + static_cast<int>(splits) - 1) / static_cast<int>(splits);
    const int begin = split * per_split, end = min(begin + per_split, all_tiles);

    // Called by the first warp, one key per lane.
    auto find_rows = [&](int tile) {
        const int key = tile * kLatentKeys + lane;
        i64 at = -1;
        if (key < sequence.keys) {
            const int page = static_cast<int>(divided(static_cast<u32>(key), page_divisor));
            const i64 number = table == nullptr ? batch : table[batch * table_row + page];
            at = number * cache_page + (key - page * static_cast<int>(page_size)) * cache_row;
        }
        row_at[tile & 1][lane] = at;
    };
    auto fetch = [&](int tile) {
        const ptx::SharedAddress to = ptx::shared_address(shared + (tile & 1) * kTileBytes);
        const int vectors = static_cast<int>(d_qk) / 8;
#pragma unroll
        for (int i = 0; i < kLatentKeys * kVectors; i += kLatentThreads) {
            const int place = i + static_cast<int>(threadIdx.x), row = place / kVectors, vector = place % kVectors;
            const i64 at = row_at[tile & 1][row];
            const bool exists = at >= 0 && vector < vectors;
            ptx::cp_async_16_or_zero(to + Warp::Tile::offset(row, vector), cache + (exists ? at + vector * 8 : 0), exists);
        }
        ptx::cp_async_commit();
    };
    if (warp == 0 && begin < end) {
        find_rows(begin);
        if (begin + 1 < end) find_rows(begin + 1);
    }
    __syncthreads();
    if (begin < end) fetch(begin);

    Warp own;
    int hi[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) hi[r] = mask.hi(min(row0 + own.row(r), rows - 1) / heads_here);
    own.load_queries(d_qk, [&](int row) -> const T* {
        if (row0 + row >= rows) return nullptr;
        const int token = (row0 + row) / heads_here;
        return q + batch * q_batch + token * q_row + (row0 + row - token * heads_here) * q_head;
    });
    const float factor = static_cast<float>(scale) * kLog2e;

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const keys = shared + (tile & 1) * kTileBytes;
        own.store_scores(keys, score_parts);
        __syncthreads();
        if (warp == 0 && tile + 2 < end) find_rows(tile + 2);  // every thread has issued the loads of this tile's rows
        own.add_values(keys, score_parts, factor, [&](int key, int r) { return tile * kLatentKeys + key < hi[r]; });
    }
    ptx::launch_dependents();
    float times[2], logs[2];
    own.softmax.finish(factor, negative_infinity(), times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + own.row(r);
        if (row >= rows) continue;
        const i64 flat = static_cast<i64>(batch) * rows + row, of_split = split * (static_cast<i64>(gridDim.z) * rows) + flat;
        own.store_row(out + flat * d_v, splits > 1 ? parts + of_split * d_v : nullptr, d_v, r, times[r]);
        if (own.quarter == 0 && lane % 4 == 0) {
            const int token = row / heads_here, head = row - token * heads_here;
            if (splits > 1) {
                part_lse[of_split] = logs[r];
            } else {
                lse[(static_cast<i64>(batch) * heads + head) * lq + token] = logs[r];
            }
        }
    }
}

}  // namespace rtk
