// Latent attention (MLA) of new tokens over a cache of latents, paged or contiguous: decoding in the absorbed form.
//
// A row of the cache, up to 576 elements, is the key of all heads; its first d_v (up to 512) elements are the value. So
// a tile of 32 keys is loaded into shared memory once and serves both products. A block owns 32 rows (row r: token r /
// heads, head r % heads; more rows take more blocks) and one split of the keys. Four of its 8 warps share 16 rows: each
// holds a quarter of the columns of q in registers and computes that part of the scores of all keys. The parts are
// exchanged through shared memory; all four warps add them in the same order, compute the same softmax probabilities,
// and multiply a quarter of the columns of the values each. Two stages of tiles, two barriers per tile. The row
// addresses (pages) of the next tile are resolved one tile in advance.
//
// Scores, probabilities and sums are fp32; probabilities are rounded to T for the product. The number of splits follows
// from shapes, where they begin from lengths on the device; with more than one, fp32 partial results go to memory and
// attention_combine merges them (decode.cu).
#include "attention/grads.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kLatentRows = 32;  // queries of a block
inline constexpr int kLatentKeys = 32;  // of a tile
inline constexpr int kLatentThreads = 256;
inline constexpr int kLatentWidth = 576;  // width of a latent with its rotated part
inline constexpr int kLatentValue = 512;  // of these, the columns that are values, too

template <typename T>
__global__ void __launch_bounds__(kLatentThreads, 1)
    mla_decode(const T* q, const T* cache, const i32* lengths, const i32* table, T* out, float* lse, float* parts,
               float* part_lse, i64 heads, i64 lq, i64 lkv, i64 d_qk, i64 d_v, i64 splits, i64 page_size, i64 page_divisor,
               i64 table_row, i64 q_batch, i64 q_row, i64 q_head, i64 cache_page, i64 cache_row, i64 right, double scale) {
    using Tile = MmaTile<kLatentWidth>;
    constexpr int kVectors = kLatentWidth / 8, kSteps = kLatentWidth / 64, kKeyTiles = kLatentKeys / 8;
    constexpr int kOutTiles = kLatentValue / 32;
    constexpr u32 kTileBytes = kLatentKeys * Tile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    float4* const score_parts = reinterpret_cast<float4*>(shared + 2 * kTileBytes);  // [row half][quarter][key tile][lane]
    __shared__ i64 row_at[2][kLatentKeys];  // row offsets of a tile, -1 past the last key

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int half = warp / 4, quarter = warp % 4;
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
            ptx::cp_async_16_or_zero(to + Tile::offset(row, vector), cache + (exists ? at + vector * 8 : 0), exists);
        }
        ptx::cp_async_commit();
    };
    if (warp == 0 && begin < end) {
        find_rows(begin);
        if (begin + 1 < end) find_rows(begin + 1);
    }
    __syncthreads();
    if (begin < end) fetch(begin);

    // A quarter of the columns of 16 rows of q; those that do not exist are 0.
    u32 a[kSteps][4];
    int hi[2];
    q += batch * q_batch;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * half + lane / 4 + 8 * r;
        const bool exists = row < rows;
        const int token = (exists ? row : rows - 1) / heads_here;
        const T* const from = q + token * q_row + ((exists ? row : rows - 1) - token * heads_here) * q_head;
        hi[r] = mask.hi(token);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int d = (quarter * kSteps + step) * 16 + 8 * h + lane % 4 * 2;
                a[step][2 * h + r] = exists && d < d_qk ? load_raw<T, 2, false>(from + d).w[0] : 0u;
            }
    }
    const float factor = static_cast<float>(scale) * kLog2e;
    float sums[kOutTiles][4];
    clear_sums(sums);
    LazySoftmax softmax;

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const keys = shared + (tile & 1) * kTileBytes;
        float s[kKeyTiles][4];
        clear_sums(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyTiles / 2; ++n) {
                u32 b[4];
                Tile::right(b, keys, 16 * n, quarter * kSteps + step, lane);
                mma_step<T>(s[2 * n], a[step], b[0], b[1]);
                mma_step<T>(s[2 * n + 1], a[step], b[2], b[3]);
            }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
            score_parts[((half * 4 + quarter) * kKeyTiles + n) * kWarp + lane] =
                make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        __syncthreads();
        if (warp == 0 && tile + 2 < end) find_rows(tile + 2);  // every thread has issued the loads of this tile's rows
        const int j0 = tile * kLatentKeys + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            const float4* const from = score_parts + (half * 4 * kKeyTiles + n) * kWarp + lane;
            float4 sum = from[0];
#pragma unroll
            for (int part = 1; part < 4; ++part) {
                const float4 x = from[part * kKeyTiles * kWarp];
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = j0 + 8 * n + e % 2 < hi[e / 2] ? values[e] : negative_infinity();
        }
        float correction[2];
        if (softmax.add_lazily(s, factor, correction)) scale_rows(sums, correction);
#pragma unroll
        for (int step = 0; step < kLatentKeys / 16; ++step) {
            u32 p[4];
            as_left<T>(p, s[2 * step], s[2 * step + 1]);
#pragma unroll
            for (int n = 0; n < kOutTiles / 2; ++n) {
                u32 b[4];
                Tile::right_transposed(b, keys, 16 * step, quarter * (kOutTiles / 2) + n, lane);
                mma_step<T>(sums[2 * n], p, b[0], b[1]);
                mma_step<T>(sums[2 * n + 1], p, b[2], b[3]);
            }
        }
    }
    ptx::launch_dependents();
    float times[2], logs[2];
    softmax.finish(factor, negative_infinity(), times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * half + lane / 4 + 8 * r;
        if (row >= rows) continue;
        const i64 flat = static_cast<i64>(batch) * rows + row;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
            const int column = quarter * (kLatentValue / 4) + 8 * n + lane % 4 * 2;
            const float values[2] = {sums[n][2 * r] * times[r], sums[n][2 * r + 1] * times[r]};
            if (column >= d_v) continue;
            if (splits > 1) {
                store<float, 2>(parts + (split * (static_cast<i64>(gridDim.z) * rows) + flat) * d_v + column, values);
            } else {
                store<T, 2>(out + flat * d_v + column, values);
            }
        }
        if (quarter == 0 && lane % 4 == 0) {
            const int token = row / heads_here, head = row - token * heads_here;
            if (splits > 1) {
                part_lse[split * (static_cast<i64>(gridDim.z) * rows) + flat] = logs[r];
            } else {
                lse[(static_cast<i64>(batch) * heads + head) * lq + token] = logs[r];
            }
        }
    }
}

}  // namespace rtk
