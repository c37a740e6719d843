// Shared by the wgmma scans of the gated delta rule (attention/gated_delta_rule_rows.cuh; sm_90a).
//
// A consumer warpgroup owns 64 columns of v and the state's part for these, transposed: S^T [64 of d_v, d_k] as fp32
// accumulators. So the state is the left operand of products where it is, in registers; tiles of 64 tokens are right
// operands; results have a column per token, and results of one product are the left operand of the next one. Warps
// exchange nothing. The last warpgroup copies tiles of later chunks to shared memory.
#pragma once
#include "attention/gated_delta_rule_rows.cuh"
#include "attention/sm90_tile.cuh"
#include "common/pressure.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/stmatrix.cuh"

namespace rtk {

enum class DeltaKind { kHeads, kChannels, kUncorrected };  // a decay per head, per channel of k; SSD of Mamba-2

inline constexpr int kProducerWarps = 4;

// Parts of T.
RTK_DEVICE constexpr int solve_parts(int kind) {
    return kind == static_cast<int>(DeltaKind::kHeads) ? 2 : kind == static_cast<int>(DeltaKind::kChannels) ? 1 : 0;
}

// Stages of tiles between the producer's warps and the consumers', as common/pipeline.cuh, with a number of stages that
// is known at run time: 2 or 3.
struct TileRing {
    ptx::SharedAddress barriers;
    int stages, stage = 0;
    u32 phase = 0;

    RTK_DEVICE TileRing(ptx::SharedAddress barriers, int stages) : barriers(barriers), stages(stages) {}

    RTK_DEVICE void init(u32 consumers) const {
        for (int i = 0; i < stages; ++i) {
            ptx::mbarrier_init(barriers + 8 * i, kProducerWarps);
            ptx::mbarrier_init(barriers + 8 * (stages + i), consumers);
        }
        ptx::mbarrier_fence_init();
    }
    RTK_DEVICE void advance() {
        if (++stage == stages) stage = 0, phase ^= 1u;
    }
    RTK_DEVICE void acquire() const { ptx::mbarrier_wait(barriers + 8 * (stages + stage), phase ^ 1u); }
    RTK_DEVICE void wait() const { ptx::mbarrier_wait(barriers + 8 * stage, phase); }
    // Called by a warp, one arrival.
    RTK_DEVICE void commit(int at) const {
        ptx::fence_async_shared();
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(barriers + 8 * at);
    }
    RTK_DEVICE void release(int at) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(barriers + 8 * (stages + at));
    }
};

// The producer's loop: `fetch(chunk, stage)` starts this thread's copies. A stage is ready before the producer waits
// for a free one that its consumers release only after they have it.
template <typename Fetch>
RTK_DEVICE void produce_tiles(TileRing ring, int chunks, Fetch fetch) {
    const int lag = ring.stages - 2;
    int ready = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks + lag; ++chunk) {
        if (chunk < chunks) {
            ring.acquire();
            fetch(chunk, ring.stage);
            ring.advance();
        }
        ptx::cp_async_commit();
        lag > 0 ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
        if (chunk < lag) continue;
        ring.commit(ready);
        ready = ready + 1 == ring.stages ? 0 : ready + 1;
    }
}

// Starts the copy of 64 rows of a tile (Boxed<64, COLUMNS>) by 128 threads. Rows from `rows` on, and vectors from
// `vectors` on, are zero-filled; with LOWER also vectors behind the diagonal, whatever memory holds there.
template <int COLUMNS, bool LOWER = false, typename T>
RTK_DEVICE void fetch_boxes(int thread, ptx::SharedAddress tile, const T* source, i64 row_stride, int rows, int vectors) {
    constexpr int kVectors = COLUMNS / 8, kStep = 128 / kVectors;
    const int row = thread / kVectors, vector = thread % kVectors, last = vector < vectors ? rows : 0;
    const T* from = source + row * row_stride + vector * 8;
    const ptx::SharedAddress box = tile + vector / 8 * (kDelta * kTileRow);
#pragma unroll
    for (int i = 0; i < kDelta / kStep; ++i) {
        const int at = row + i * kStep;
        ptx::cp_async_16_or_zero(box + (at * kTileRow + ((vector % 8 ^ (at & 7)) << 4)), from,
                                 at < last && (!LOWER || at >= 8 * vector));
        from = settled(from + kStep * row_stride);
    }
}

// Starts the copy of T of chunk and head `at` by 128 threads, in two parts to two boxes with a decay per head.
template <int PARTS, typename T>
RTK_DEVICE void fetch_solve(int thread, ptx::SharedAddress to, const T* solve, i64 at) {
    const T* const from = solve + at * (PARTS * kDelta * kDelta);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        fetch_boxes<64, PARTS == 2>(thread, to + part * (kDelta * kTileRow), from + part * (kDelta * kDelta), kDelta, kDelta, 8);
}

// A warp's 16 of 64 columns of v in a box: rows of tokens or of keys, each 32 bytes. Fragments have a column per row, and
// 16 rows per four words.
struct WarpColumns {
    u32 rows, vectors;  // offsets: of this lane's row of a fragment; of its vector

    RTK_DEVICE WarpColumns(int warp, int lane) {
        const int row = lane / 16 * 8 + lane % 8, vector = warp % 4 * 2 + lane / 8 % 2;
        rows = row * kTileRow + ((vector ^ (row & 7)) << 4);
        vectors = warp % 4 * 2 + lane % 2;
    }

    template <int N>
    RTK_DEVICE void read(u32 (&fragments)[N][4], const u8* box) const {
#pragma unroll
        for (int k = 0; k < N; ++k) ptx::ldmatrix_x4_trans(fragments[k], box + rows + k * (16 * kTileRow));
    }
    template <int N>
    RTK_DEVICE void write(ptx::SharedAddress box, const u32 (&fragments)[N][4]) const {
#pragma unroll
        for (int k = 0; k < N; ++k)
            ptx::stmatrix_x4_trans(box + rows + k * (16 * kTileRow), fragments[k][0], fragments[k][1], fragments[k][2],
                                   fragments[k][3]);
    }
    // Copies what this warp has written to rows in memory; `columns` of the 64 exist.
    template <int ROWS, typename T>
    RTK_DEVICE void store(T* to, i64 stride, int count, int columns, ptx::SharedAddress box, int lane) const {
        if (static_cast<int>(vectors) * 8 >= columns) return;
#pragma unroll 4
        for (int i = 0; i < ROWS / 16; ++i) {
            const int row = 16 * i + lane / 2;
            if (row < count)
                ptx::st<16>(to + row * stride + vectors * 8, ptx::ld_shared_16(box + (row * kTileRow + ((vectors ^ (row & 7)) << 4))));
        }
    }
};

// Words of fragments, each a pair of tokens: to[k][i] = the pair of from[k][i], times the factors of its tokens.
template <typename T, int N>
RTK_DEVICE void scale_tokens(u32 (&to)[N][4], const u32 (&from)[N][4], const float* factors, int t) {
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 by = *reinterpret_cast<const float2*>(factors + 16 * k + 8 * h + 2 * t);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float pair[2];
                unpack<T, 2>(Raw<4>{{from[k][2 * h + r]}}, pair);
                to[k][2 * h + r] = packed_pair<T>(pair[0] * by.x, pair[1] * by.y);
            }
        }
}

// Words of sums with a column per token, times the factors of these.
template <typename T, int N>
RTK_DEVICE void pack_tokens(u32 (&to)[N / 8][4], const float (&sums)[N], const float* factors, int t) {
#pragma unroll
    for (int k = 0; k < N / 8; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 by = *reinterpret_cast<const float2*>(factors + 16 * k + i / 2 * 8 + 2 * t);
            to[k][i] = packed_pair<T>(sums[8 * k + 2 * i] * by.x, sums[8 * k + 2 * i + 1] * by.y);
        }
}

// d *= the factors of its columns.
template <int N>
RTK_DEVICE void scale_columns(float (&d)[N], const float* factors, int t) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 by = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; ++r) d[4 * j + 2 * r] *= by.x, d[4 * j + 2 * r + 1] *= by.y;
    }
}

// d = a b^T (+ d): a from registers, b a tile with a row per column of d.
template <typename T, int STEPS, int N>
RTK_DEVICE void packed_by_rows(float (&d)[N], const u32 (&a)[STEPS][4], ptx::SharedAddress b, bool add) {
    const u64 right = k_major_descriptor(b);
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
        ptx::wgmma_rs<T, false>(d, a[k], right + k / 4 * (kDelta * kTileRow >> 4) + k % 4 * kNextKMajor, add || k != 0);
}

// The transposed state of a head in registers, and [d_k][d_v] fp32 in memory.
template <int DK>
struct TransposedState {
    float sums[DK / 2];

    template <typename Visit>
    RTK_DEVICE void visit(i64 head, i64 d_k, i64 d_v, int column, int lane, Visit visit_one) {
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, own = column + i / 2 % 2 * 8;
            visit_one(sums[i], row < d_k && own < d_v, (head * d_k + row) * d_v + own);
        }
    }
    RTK_DEVICE void load(const float* from, i64 head, i64 d_k, i64 d_v, int column, int lane) {
        visit(head, d_k, d_v, column, lane, [&](float& sum, bool exists, i64 at) { sum = from != nullptr && exists ? from[at] : 0.0f; });
    }
    RTK_DEVICE void load_identity(int column, int lane) {
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) sums[i] = i / 4 * 8 + lane % 4 * 2 + i % 2 == column + i / 2 % 2 * 8 ? 1.0f : 0.0f;
    }
    RTK_DEVICE void store_to(float* to, i64 head, i64 d_k, i64 d_v, int column, int lane) {
        visit(head, d_k, d_v, column, lane, [&](float& sum, bool exists, i64 at) {
            if (exists) to[at] = sum;
        });
    }
    RTK_DEVICE void decay(float by) {
#pragma unroll
        for (float& sum : sums) sum *= by;
    }
    // By channels, from the numbers of a chunk's rows.
    RTK_DEVICE void decay_channels(const float* numbers, int t) {
#pragma unroll
        for (int j = 0; j < DK / 8; ++j) {
            const float2 whole = *reinterpret_cast<const float2*>(numbers + kWholes * kDelta + 8 * j + 2 * t);
            const float by[2] = {ptx::ex2(whole.x), ptx::ex2(whole.y)};
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * j + i] *= by[i % 2];
        }
    }
};

// Tiles of a stage, in bytes from its begin.
struct DeltaStage {
    u32 queries, values, solve, inner, after, numbers, bytes;

    // `solves`: boxes of T, with its remainder behind it if there are two.
    RTK_DEVICE DeltaStage(u32 key_bytes, int groups, bool has_queries, int solves, bool has_inner, bool has_after) {
        queries = key_bytes;
        values = queries + (has_queries ? key_bytes : 0);
        solve = values + groups * (kDelta * kTileRow);
        inner = solve + solves * (kDelta * kTileRow);
        after = inner + (has_inner ? kDelta * kTileRow : 0);
        numbers = after + (has_after ? key_bytes : 0);
        bytes = numbers + kRowKinds * kDelta * 4;
    }
};

}  // namespace rtk
