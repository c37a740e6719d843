// Latent attention (MLA) by mma.sync, for mla_decode.cu and sparse_mla.cu.
//
// A latent of up to 576 columns is a key; its first 512 columns are the value, too. A block owns 32 rows of q and goes
// through tiles of 32 keys. Four of its 8 warps share 16 rows: each holds a quarter of the columns of q in registers and
// computes that part of the scores of all keys. The parts are exchanged through shared memory; all four warps add them
// in the same order, compute the same softmax probabilities, and multiply a quarter of the columns of the values each.
//
// Scores, probabilities and sums are fp32; probabilities are rounded to T for the product.
#pragma once
#include "attention/mma_tile.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kLatentRows = 32;  // queries of a block
inline constexpr int kLatentKeys = 32;  // of a tile
inline constexpr int kLatentThreads = 256;
inline constexpr int kLatentWidth = 576;  // width of a latent with its rotated part
inline constexpr int kLatentValue = 512;  // of these, the columns that are values, too

template <typename T>
struct LatentWarp {
    using Tile = MmaTile<kLatentWidth>;
    static constexpr int kVectors = kLatentWidth / 8, kSteps = kLatentWidth / 64, kKeyTiles = kLatentKeys / 8;
    static constexpr int kOutTiles = kLatentValue / 32;
    static constexpr u32 kTileBytes = kLatentKeys * Tile::kPitch;

    int lane, half, quarter;    // half: of the rows, quarter: of the columns
    u32 a[kSteps][4];           // a quarter of the columns of 16 rows of q
    float sums[kOutTiles][4];   // a quarter of the columns of the result
    LazySoftmax softmax;

    RTK_DEVICE LatentWarp() {
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        lane = static_cast<int>(threadIdx.x) % kWarp, half = warp / 4, quarter = warp % 4;
        clear_sums(sums);
    }

    // Row r (0 or 1) of this thread among those of the block.
    RTK_DEVICE int row(int r) const { return 16 * half + lane / 4 + 8 * r; }

    // row_at(row): the address of a row, null if it does not exist: it is 0 then.
    template <typename RowAt>
    RTK_DEVICE void load_queries(i64 width, RowAt row_at) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const T* const from = row_at(row(r));
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int d = (quarter * kSteps + step) * 16 + 8 * h + lane % 4 * 2;
                    a[step][2 * h + r] = from != nullptr && d < width ? load_raw<T, 2, false>(from + d).w[0] : 0u;
                }
        }
    }

    // Stores this warp's part of the scores of a tile: [row half][quarter][key tile][lane]. A barrier must follow.
    RTK_DEVICE void store_scores(const u8* tile, float4* parts) const {
        float s[kKeyTiles][4];
        clear_sums(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyTiles / 2; ++n) {
                u32 b[4];
                Tile::right(b, tile, 16 * n, quarter * kSteps + step, lane);
                mma_step<T>(s[2 * n], a[step], b[0], b[1]);
                mma_step<T>(s[2 * n + 1], a[step], b[2], b[3]);
            }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
            parts[((half * 4 + quarter) * kKeyTiles + n) * kWarp + lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    }

    // Adds up the parts of the scores and the tile's values. counts(key, r): whether a key of the tile counts for row r.
    template <typename Counts>
    RTK_DEVICE void add_values(const u8* tile, const float4* parts, float factor, Counts counts) {
        float s[kKeyTiles][4];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            const float4* const from = parts + (half * 4 * kKeyTiles + n) * kWarp + lane;
            float4 sum = from[0];
#pragma unroll
            for (int part = 1; part < 4; ++part) {
                const float4 x = from[part * kKeyTiles * kWarp];
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = counts(8 * n + lane % 4 * 2 + e % 2, e / 2) ? values[e] : negative_infinity();
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
                Tile::right_transposed(b, tile, 16 * step, quarter * (kOutTiles / 2) + n, lane);
                mma_step<T>(sums[2 * n], p, b[0], b[1]);
                mma_step<T>(sums[2 * n + 1], p, b[2], b[3]);
            }
        }
    }

    // Row r of this thread in memory: to a part of a result in fp32 unless that is null.
    RTK_DEVICE void store_row(T* out, float* part, i64 d_v, int r, float times) const {
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
            const int column = quarter * (kLatentValue / 4) + 8 * n + lane % 4 * 2;
            const float values[2] = {sums[n][2 * r] * times, sums[n][2 * r + 1] * times};
            if (column >= d_v) continue;
            if (part != nullptr) {
                store<float, 2>(part + column, values);
            } else {
                store<T, 2>(out + column, values);
            }
        }
    }
};

}  // namespace rtk
