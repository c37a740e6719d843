// Consumers of the wgmma kernels for latent attention (MLA), mla_decode_sm90.cu and sparse_mla_sm90.cu.
//
// A latent of up to 576 columns is a key; its first 512 columns are the value, too. Shared memory holds 64 rows of q and
// two tiles of 64 latents. Two warpgroups own all 64 rows and half of the result's columns each. Warpgroup g computes
// scores and softmax probabilities of tiles 2j + g and hands the probabilities, with the maximum that they are relative
// to, to the other one, warp by warp; each accumulates both tiles' values into its columns. So warpgroup 1 runs about
// half a round behind, and the products of one overlap with the softmax of the other.
//
// Two tiles take 144 KB, which leaves no room for a third one to prefetch. Instead, parts of a tile are released
// separately: the last box of columns after the scores, each half of the others after the one product that reads it as
// values. Each tile has producer warps of its own, so no load waits for a part of the other tile.
//
// Scores, probabilities and sums are fp32; probabilities are rounded to T for the product.
#pragma once
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

struct LatentBlock {
    static constexpr int kRows = 64, kKeys = 64, kWidth = 576, kColumns = 256, kConsumers = 8, kStages = 2;
    static constexpr int kHalfBoxes = kColumns / 64;  // of a warpgroup's columns
    static constexpr int kThreads = 384;
    using Tile = Boxed<kKeys, kWidth>;
    using Pipe = Pipeline<kStages>;
    static constexpr u32 kHalf = kHalfBoxes * Tile::kBoxBytes;
    static constexpr u32 kBarriers = 3 * Pipe::kBytes;

    ptx::SharedAddress q_tile, tiles, packed_p, barriers, after;  // after: what a kernel adds

    RTK_DEVICE explicit LatentBlock(u8* memory) {
        q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
        tiles = q_tile + Tile::kBytes;
        packed_p = tiles + kStages * Tile::kBytes;  // [4][128] vectors, then [128] pairs of maxima or sums
        barriers = packed_p + 128 * (4 * 16 + 8);
        after = barriers + kBarriers;
    }
    RTK_DEVICE Pipe half_pipe(int half) const { return Pipe{barriers + half * Pipe::kBytes}; }  // a warpgroup's columns, in both tiles
    RTK_DEVICE Pipe last_pipe() const { return Pipe{barriers + 2 * Pipe::kBytes}; }             // the columns that are not values

    // Called by one thread; `producers` arrivals fill a part of a tile.
    RTK_DEVICE void init(u32 producers) const {
        for (int i = 0; i < 2; ++i) half_pipe(i).init(producers, kConsumers / 2);
        last_pipe().init(producers, kConsumers / 2);
    }

    // Stores q in the layout that TMA would write, by all threads. row_at(row): the address of a row, null if it does not
    // exist: it is 0 then.
    template <typename T, typename RowAt>
    RTK_DEVICE void store_queries(i64 width, RowAt row_at) const {
        for (int i = threadIdx.x; i < kRows * (kWidth / 8); i += kThreads) {
            const int row = i / (kWidth / 8), vector = i % (kWidth / 8);
            Raw<16> raw{{0, 0, 0, 0}};
            const T* const from = row_at(row);
            if (from != nullptr && vector * 8 < width) raw = load_raw<T, 8, false>(from + vector * 8);
            ptx::st_shared_16(q_tile + vector / 8 * Tile::kBoxBytes + row * kTileRow + ((vector % 8 ^ row % 8) << 4), raw);
        }
    }

    // Called by both consumer warpgroups. The result, without its factors times[r], is o; logs[r]: log-sum-exp. `mask` has
    // read(tile), called while the tile's last box is there, and apply(s, tile).
    template <typename T, typename Masking>
    RTK_DEVICE void attend(int rounds, float factor, Masking mask, float (&o)[kColumns / 2], float (&times)[2], float (&logs)[2]) const {
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
        const int group = warp / 4;
        const Pipe own_half = half_pipe(group), other_half = half_pipe(1 - group), last = last_pipe();
        const u32 half_at = group * kHalf, other_at = kHalf - half_at;
        const ptx::SharedAddress vectors = packed_p + threadIdx.x % 128 * 16, pair = packed_p + 128 * 64 + threadIdx.x % 128 * 8;
        SoftmaxState softmax;
        float s[kKeys / 2], correction[2] = {1.0f, 1.0f};
#pragma unroll
        for (float& x : o) x = 0.0f;

        auto make_scores = [&](const Pipe::State& state, int round) {
            u32 keys_at = group * Tile::kBytes, queries_at = 0;
            ptx::forget(keys_at), ptx::forget(queries_at);  // the compiler would keep 72 loop-invariant descriptors in registers
            const ptx::SharedAddress keys = tiles + keys_at, queries = q_tile + queries_at;
            last.wait(state);
            mask.read(2 * round + group);
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
            mask.apply(s, 2 * round + group);
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
                correction[r] = fall_of(softmax.top[r], factor, scaled_top(top, factor));
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
                make_scores(first, round);
                ptx::wgmma_wait<0>();
                if (lane == 0) last.release(first);
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
                make_scores(second, round);
                ptx::named_barrier_sync(from_0, 64);
                take_probabilities(p);
                scale_sums();
                own_half.wait(first);
                add_values(p, 0);
                ptx::wgmma_wait<1>();
                if (lane == 0) last.release(second);
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
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.sum[r] += __uint_as_float(other_sums.w[r]);
        softmax.finish(factor, negative_infinity(), times, logs);
    }

    // A row of this thread in memory: to a part of a result in fp32 unless that is null.
    template <typename T>
    RTK_DEVICE static void store_row(T* out, float* part, i64 d_v, const float (&o)[kColumns / 2], int r, float times) {
        const int group = static_cast<int>(threadIdx.x) / 128, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const int column = group * kColumns + 8 * j + 2 * t;
            const float values[2] = {o[4 * j + 2 * r] * times, o[4 * j + 2 * r + 1] * times};
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
