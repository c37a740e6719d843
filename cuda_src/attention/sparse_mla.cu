// Latent attention (MLA) of tokens over a choice of keys for each of them: DeepSeek's sparse attention. A block owns a
// token, 32 of its heads and one split of its `count` indices; latent_mma.cuh has its products. Indices outside of the
// cache, and those after positions[token], do not count.
//
// With CODED, a latent has 656 bytes: 512 e4m3 codes, an fp32 scale for 128 of them each, and 64 columns as bf16. Two
// stages have the bytes, and a tile of 32 keys is decoded to T before its products. Splits are merged as those of
// mla_decode.cu. Grid: tokens by tiles of heads, splits.
#include "attention/latent_mma.cuh"
#include "attention/sparse_mla.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T, bool CODED>
__global__ void __launch_bounds__(kLatentThreads, 1)
    sparse_mla(const T* q, const u8* cache, const i32* indices, const i32* positions, const float* sinks, T* out, float* lse,
               float* parts, float* part_lse, i64 tokens, i64 heads, i64 keys, i64 count, i64 d_qk, i64 d_v, i64 splits, i64 q_row,
               i64 q_head, i64 cache_row, i64 index_row, double scale) {
    using Warp = LatentWarp<T>;
    constexpr int kVectors = Warp::kVectors;
    constexpr u32 kTileBytes = Warp::kTileBytes, kRawBytes = kLatentKeys * kCodedBytes;
    extern __shared__ __align__(128) u8 shared[];
    u8* const raw = shared + kTileBytes;  // with CODED: two stages
    float4* const score_parts = reinterpret_cast<float4*>(shared + (CODED ? kTileBytes + 2 * kRawBytes : 2 * kTileBytes));
    __shared__ i64 row_at[4][kLatentKeys];  // rows of a tile, -1 if they do not count

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int split = static_cast<int>(blockIdx.y);
    const int row_tiles = (static_cast<int>(heads) + kLatentRows - 1) / kLatentRows;
    const i64 token = blockIdx.x / row_tiles;
    const int row0 = static_cast<int>(blockIdx.x % row_tiles) * kLatentRows;
    const int all_tiles = (static_cast<int>(count) + kLatentKeys - 1) / kLatentKeys;
    const int per_split = (all_tiles + static_cast<int>(splits) - 1) / static_cast<int>(splits);
    const int begin = split * per_split, end = min(begin + per_split, all_tiles);
    const i64 last = positions == nullptr ? keys - 1 : min(static_cast<i64>(positions[token]), keys - 1);

    auto find_rows = [&](int tile) {  // by the first warp
        const int place = tile * kLatentKeys + lane;
        const i64 key = place < count ? indices[token * index_row + place] : -1;
        row_at[tile & 3][lane] = key >= 0 && key <= last ? key : -1;
    };
    auto fetch = [&](int tile) {
        constexpr int kEach = CODED ? kCodedBytes / 16 : kVectors;
        u8* const stage = CODED ? raw + (tile & 1) * kRawBytes : shared + (tile & 1) * kTileBytes;
        const ptx::SharedAddress to = ptx::shared_address(stage);
        const int vectors = CODED ? kEach : static_cast<int>(d_qk) / 8;
        for (int place = static_cast<int>(threadIdx.x); place < kLatentKeys * kEach; place += kLatentThreads) {
            const int row = place / kEach, vector = place % kEach;
            const i64 at = row_at[tile & 3][row];
            const bool exists = at >= 0 && vector < vectors;
            const u32 offset = CODED ? static_cast<u32>(row * kCodedBytes + vector * 16) : Warp::Tile::offset(row, vector);
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

    Warp own;
    own.load_queries(d_qk, [&](int row) -> const T* {
        return row0 + row < heads ? q + token * q_row + (row0 + row) * q_head : nullptr;
    });
    const float factor = static_cast<float>(scale) * kLog2e;

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const u8* const tile_at = CODED ? shared : shared + (tile & 1) * kTileBytes;
        if constexpr (CODED) {
            const u8* const from = raw + (tile & 1) * kRawBytes;
            for (int place = static_cast<int>(threadIdx.x); place < kLatentKeys * kVectors; place += kLatentThreads) {
                const int row = place / kVectors, vector = place % kVectors;
                const u8* const latent = from + row * kCodedBytes;
                float f[8];
                if (vector < kLatentValue / 8) {
                    const uint2 two = *reinterpret_cast<const uint2*>(latent + 8 * vector);
                    const float by = *reinterpret_cast<const float*>(latent + kLatentValue + vector / 16 * 4);
                    unpack<e4m3, 8>(Raw<8>{{two.x, two.y}}, f);
#pragma unroll
                    for (int i = 0; i < 8; ++i) f[i] *= by;
                } else {
                    unpack<bf16, 8>(*reinterpret_cast<const Raw<16>*>(latent + kLatentValue + 16 + (vector - kLatentValue / 8) * 16), f);
                }
                *reinterpret_cast<Raw<16>*>(shared + Warp::Tile::offset(row, vector)) = pack<T, 8>(f);
            }
            __syncthreads();
        }
        own.store_scores(tile_at, score_parts);
        if (warp == 0 && tile + 2 < end) find_rows(tile + 2);
        __syncthreads();
        own.add_values(tile_at, score_parts, factor, [&](int key, int) { return row_at[tile & 3][key] >= 0; });
    }
    ptx::launch_dependents();
    float times[2], logs[2];
    own.softmax.finish(factor, negative_infinity(), times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + own.row(r);
        if (row >= heads) continue;
        if (sinks != nullptr && splits == 1) add_sink(sinks[row], times[r], logs[r]);
        const i64 flat = token * heads + row, of_split = split * (tokens * heads) + flat;
        own.store_row(out + flat * d_v, splits > 1 ? parts + of_split * d_v : nullptr, d_v, r, times[r]);
        if (own.quarter == 0 && lane % 4 == 0) (splits > 1 ? part_lse[of_split] : lse[flat]) = logs[r];
    }
}

}  // namespace rtk
