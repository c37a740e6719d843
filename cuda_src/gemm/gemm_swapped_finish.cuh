// The end of products with weights as the left operand of wgmma: sums go from registers to the block of the cluster that
// finishes their token, which adds those of all blocks in order. There, a warp has a token and a lane has columns 32 apart,
// so that stores of the transposed tile are neighbours.
//
// Shared memory, from the same address on in all blocks: sums [parts][tokens of a block][kPitch]. Token i is finished by
// block i % parts.
#pragma once
#include "gemm/gemm_skinny_finish.cuh"
#include "ptx/cluster.cuh"

namespace rtk {

// As in rtkernels/ops/gemm/swapped_plan.py.
inline constexpr i64 kSwappedGated = 1, kSwappedAccumulate = 2, kSwappedConstant = 4, kSwappedAddLast = 8;

// The rows of weights of a tile: columns of the result; gated, half as many and their counterparts.
template <int CONSUMERS>
struct SwappedTile {
    static constexpr int kRows = 64 * CONSUMERS, kPitch = kRows + 4, kEach = kRows / 32;  // rows of a lane
    i64 first, n;
    int columns;

    RTK_DEVICE SwappedTile(int tile, i64 all_columns, bool gated) : n(all_columns), columns(gated ? kRows / 2 : kRows) {
        first = static_cast<i64>(tile) * columns;
    }

    // The row of weights at a place of the tile; it need not exist.
    RTK_DEVICE i64 row(int local) const { return first + column(local) + (local >= columns ? n : 0); }
    RTK_DEVICE bool exists(int local) const { return first + column(local) < n; }
    // The same row, or another one that exists.
    RTK_DEVICE i64 existing_row(int local) const { return min(first + column(local), n - 1) + (local >= columns ? n : 0); }
    RTK_DEVICE int column(int local) const { return local >= columns ? local - columns : local; }
};

// What multiplies the sums of a lane's rows, and what is added to them.
template <int CONSUMERS>
struct SwappedFactors {
    static constexpr int kEach = SwappedTile<CONSUMERS>::kEach;
    float times[kEach], plus[kEach];

    RTK_DEVICE void load(const SwappedTile<CONSUMERS>& tile, int lane, const float* scale, i64 scale_step, const void* bias,
                         int bias_type) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int local = lane + 32 * i;
            times[i] = 1.0f, plus[i] = 0.0f;
            if (tile.exists(local) && scale != nullptr) times[i] = scale[tile.row(local) * scale_step];
            if (tile.exists(local) && bias != nullptr) plus[i] = skinny_load(bias, tile.row(local), bias_type);
        }
    }
};

template <int CONSUMERS>
struct SwappedExchange {
    static constexpr int kPitch = SwappedTile<CONSUMERS>::kPitch, kEach = SwappedTile<CONSUMERS>::kEach;
    float* received;
    int tokens, parts_shift, rank;

    RTK_DEVICE int parts() const { return 1 << parts_shift; }
    RTK_DEVICE int own_tokens() const { return (tokens + parts() - 1) >> parts_shift; }

    // Of all threads of the cluster.
    RTK_DEVICE void barrier() const {
        __syncwarp();
        if (parts() > 1) {
            ptx::cluster_barrier();
        } else {
            __syncthreads();
        }
    }

    // Called by warps of consumers with the accumulators of wgmma.
    template <int SUMS>
    RTK_DEVICE void send(const float (&sums)[SUMS], int warp, int lane) const {
        float* const to = received + rank * own_tokens() * kPitch + warp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < SUMS / 4; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int token = 8 * j + lane % 4 * 2 + c;
                if (token >= tokens) continue;
                float* const of_token = to + (token >> parts_shift) * kPitch;
#pragma unroll
                for (int r = 0; r < 2; ++r) store(of_token + 8 * r, token, sums[4 * j + 2 * r + c]);
            }
    }

    // Called by warps of consumers. `of_token(token)`: the factor of a token's sums.
    template <typename OfToken>
    RTK_DEVICE void finish(const SwappedTile<CONSUMERS>& tile, const SwappedFactors<CONSUMERS>& factors, const SkinnyStore& store,
                           int warp, int lane, bool add_last, float factor, const OfToken& of_token) const {
        auto is_written = [&](int i) { return tile.exists(lane + 32 * i) && lane + 32 * i < tile.columns; };
        for (int local = warp; rank + (local << parts_shift) < tokens; local += 4 * CONSUMERS) {
            const int token = rank + (local << parts_shift);
            float added[kEach], value[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const bool has_add = store.add != nullptr && is_written(i);
                const i64 at = token * store.add_pitch + tile.first + lane + 32 * i;
                added[i] = has_add ? skinny_load(store.add, at, store.add_type) : 0.0f;
            }
            const float times_token = of_token(token);
#pragma unroll
            for (int i = 0; i < kEach; ++i) value[i] = 0.0f;
            for (int p = 0; p < parts(); ++p)
#pragma unroll
                for (int i = 0; i < kEach; ++i) value[i] += received[(p * own_tokens() + local) * kPitch + lane + 32 * i];
#pragma unroll
            for (int i = 0; i < kEach; ++i) value[i] = value[i] * times_token * factors.times[i] + factors.plus[i];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                if (!is_written(i)) continue;
                const i64 at = token * store.out_pitch + tile.first + lane + 32 * i;
                float v = skinny_activation(add_last ? value[i] : value[i] + added[i], store.act);
                if (store.gated) v *= value[(i + kEach / 2) % kEach];
                if (add_last) v = fmaf(v, factor, added[i]);
                if (store.accumulate) v += skinny_load(store.out, at, store.out_type);
                store.write(at, v);
            }
        }
    }

   private:
    // To the block that finishes the token.
    RTK_DEVICE void store(float* to, int token, float value) const {
        if (parts_shift == 0) {
            *to = value;
        } else {
            ptx::st_cluster(ptx::shared_address(to), token & (parts() - 1), value);
        }
    }
};

}  // namespace rtk
