// Latent attention (MLA) of tokens over a choice of keys for each of them: DeepSeek's sparse attention. Latents as in
// mla_decode.cu; a block owns a token, 32 of its heads and one split of its `count` indices. Indices outside of the cache,
// and those after positions[token], do not count.
//
// With CODED, a latent has 656 bytes: 512 e4m3 codes, an fp32 scale for 128 of them each, and 64 columns as bf16. Two stages
// have the bytes, and a tile of 32 keys is decoded to T before its products. Warps share rows and columns, and splits are merged, as
// there. Grid: tokens by tiles of heads, splits.
#include "attention/latent_sink.cuh"
#include "attention/mma_tile.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kSparseRows = 32, kSparseKeys = 32, kSparseThreads = 256;
inline constexpr int kSparseWidth = 576, kSparseValue = 512;  // columns of a latent, and of these those of a value
inline constexpr int kCodedBytes = 656;

template <typename T, bool CODED>
__global__ void __launch_bounds__(kSparseThreads, 1)
    sparse_mla(const T* q, const u8* cache, const i32* indices, const i32* positions, const float* sinks, T* out, float* lse,
               float* parts, float* part_lse, i64 tokens, i64 heads, i64 keys, i64 count, i64 d_qk, i64 d_v, i64 splits, i64 q_row,
               i64 q_head, i64 cache_row, i64 index_row, double scale) {
    using Tile = MmaTile<kSparseWidth>;
    constexpr int kVectors = kSparseWidth / 8, kSteps = kSparseWidth / 64, kKeyTiles = kSparseKeys / 8;
    constexpr int kOutTiles = kSparseValue / 32;
    constexpr u32 kTileBytes = kSparseKeys * Tile::kPitch, kRawBytes = kSparseKeys * kCodedBytes;
    extern __shared__ __align__(128) u8 shared[];
    u8* const raw = shared + kTileBytes;  // with CODED: two stages
    float4* const score_parts = reinterpret_cast<float4*>(shared + (CODED ? kTileBytes + 2 * kRawBytes : 2 * kTileBytes));
    __shared__ i64 row_at[4][kSparseKeys];  // rows of a tile, -1 if they do not count

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int half = warp / 4, quarter = warp % 4, split = static_cast<int>(blockIdx.y);
    const int row_tiles = (static_cast<int>(heads) + kSparseRows - 1) / kSparseRows;
    const i64 token = blockIdx.x / row_tiles;
    const int row0 = static_cast<int>(blockIdx.x % row_tiles) * kSparseRows;
    const int all_tiles = (static_cast<int>(count) + kSparseKeys - 1) / kSparseKeys;
    const int per_split = (all_tiles + static_cast<int>(splits) - 1) / static_cast<int>(splits);
    const int begin = split * per_split, end = min(begin + per_split, all_tiles);
    const i64 last = positions == nullptr ? keys - 1 : min(static_cast<i64>(positions[token]), keys - 1);

    auto find_rows = [&](int tile) {  // by the first warp
        const int place = tile * kSparseKeys + lane;
        const i64 key = place < count ? indices[token * index_row + place] : -1;
        row_at[tile & 3][lane] = key >= 0 && key <= last ? key : -1;
    };
    auto fetch = [&](int tile) {
        constexpr int kEach = CODED ? kCodedBytes / 16 : kVectors;
        u8* const stage = CODED ? raw + (tile & 1) * kRawBytes : shared + (tile & 1) * kTileBytes;
        const ptx::SharedAddress to = ptx::shared_address(stage);
        const int vectors = CODED ? kEach : static_cast<int>(d_qk) / 8;
        for (int place = static_cast<int>(threadIdx.x); place < kSparseKeys * kEach; place += kSparseThreads) {
            const int row = place / kEach, vector = place % kEach;
            const i64 at = row_at[tile & 3][row];
            const bool exists = at >= 0 && vector < vectors;
            const u32 offset = CODED ? static_cast<u32>(row * kCodedBytes + vector * 16) : Tile::offset(row, vector);
            ptx::cp_async_16_or_zero(to + offset, cache + (exists ? at * cache_row + vector * 16 : 0), exists);
        }
        ptx::cp_async_commit();
    };
    if (warp == 0 && begin < end) {
        find_rows(begin);
        if (begin + 1 < end) find_rows(begin + 1);
    }
    __syncthreads();
    if (begin < end) fetch(begin);

    u32 a[kSteps][4];  // a quarter of the columns of 16 rows of q; those that do not exist are 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * half + lane / 4 + 8 * r;
        const bool exists = row < heads;
        const T* const from = q + token * q_row + (exists ? row : 0) * q_head;
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
        const u8* const tile_at = CODED ? shared : shared + (tile & 1) * kTileBytes;
        if constexpr (CODED) {
            const u8* const from = raw + (tile & 1) * kRawBytes;
            for (int place = static_cast<int>(threadIdx.x); place < kSparseKeys * kVectors; place += kSparseThreads) {
                const int row = place / kVectors, vector = place % kVectors;
                const u8* const latent = from + row * kCodedBytes;
                float f[8];
                if (vector < kSparseValue / 8) {
                    const uint2 two = *reinterpret_cast<const uint2*>(latent + 8 * vector);
                    const float by = *reinterpret_cast<const float*>(latent + kSparseValue + vector / 16 * 4);
                    unpack<e4m3, 8>(Raw<8>{{two.x, two.y}}, f);
#pragma unroll
                    for (int i = 0; i < 8; ++i) f[i] *= by;
                } else {
                    unpack<bf16, 8>(*reinterpret_cast<const Raw<16>*>(latent + kSparseValue + 16 + (vector - kSparseValue / 8) * 16), f);
                }
                *reinterpret_cast<Raw<16>*>(shared + Tile::offset(row, vector)) = pack<T, 8>(f);
            }
            __syncthreads();
        }
        float s[kKeyTiles][4];
        clear_sums(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyTiles / 2; ++n) {
                u32 b[4];
                Tile::right(b, tile_at, 16 * n, quarter * kSteps + step, lane);
                mma_step<T>(s[2 * n], a[step], b[0], b[1]);
                mma_step<T>(s[2 * n + 1], a[step], b[2], b[3]);
            }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
            score_parts[((half * 4 + quarter) * kKeyTiles + n) * kWarp + lane] =
                make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        if (warp == 0 && tile + 2 < end) find_rows(tile + 2);
        __syncthreads();
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
            for (int e = 0; e < 4; ++e)
                s[n][e] = row_at[tile & 3][8 * n + lane % 4 * 2 + e % 2] >= 0 ? values[e] : negative_infinity();
        }
        float correction[2];
        if (softmax.add_lazily(s, factor, correction)) scale_rows(sums, correction);
#pragma unroll
        for (int step = 0; step < kSparseKeys / 16; ++step) {
            u32 p[4];
            as_left<T>(p, s[2 * step], s[2 * step + 1]);
#pragma unroll
            for (int n = 0; n < kOutTiles / 2; ++n) {
                u32 b[4];
                Tile::right_transposed(b, tile_at, 16 * step, quarter * (kOutTiles / 2) + n, lane);
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
        if (row >= heads) continue;
        if (sinks != nullptr && splits == 1) add_sink(sinks[row], times[r], logs[r]);
        const i64 flat = token * heads + row;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
            const int column = quarter * (kSparseValue / 4) + 8 * n + lane % 4 * 2;
            const float values[2] = {sums[n][2 * r] * times[r], sums[n][2 * r + 1] * times[r]};
            if (column >= d_v) continue;
            if (splits > 1) {
                store<float, 2>(parts + (split * (tokens * heads) + flat) * d_v + column, values);
            } else {
                store<T, 2>(out + flat * d_v + column, values);
            }
        }
        if (quarter == 0 && lane % 4 == 0) (splits > 1 ? part_lse + split * (tokens * heads) : lse)[flat] = logs[r];
    }
}

}  // namespace rtk
