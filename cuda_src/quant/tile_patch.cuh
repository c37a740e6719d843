// Quantises 128 x 128 tiles of fp32 numbers in the registers of a block (sm_90) to e4m3 along rows (1 x 128) and along
// columns (128 x 1, codes transposed), by warps that never use a block-wide barrier. A tile has 16 worker warps with 8
// x 128 numbers each, 4 x 8 per thread, and SIDES tiles are processed together. Four helper warps load inputs
// (quant/tile_stream.cuh), compute the column scales, and write transposed codes to memory. Data passes between warps
// while they do something else:
//
//     workers                                                 helpers
//     add_maxima      maxima of columns to shared memory
//     quantize_rows   needs nothing from other warps          make_scales     when all maxima are there
//     stage_columns   transposed codes to shared memory
//     store_column_ends                                       store_columns   when all codes are there
#pragma once
#include "common/fp8_scale.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_atomic.cuh"
#include "quant/shifted_columns.cuh"

namespace rtk {

inline constexpr int kPatchRows = 4;     // of a thread
inline constexpr int kPatchColumns = 8;  // of a thread
inline constexpr int kPatchWarpRows = 2 * kPatchRows;
inline constexpr int kPatchWarps = kTileSide / kPatchWarpRows;
inline constexpr int kPatchWorkers = kPatchWarps * kWarp;
inline constexpr int kPatchStoreWarps = 2;
inline constexpr int kPatchStorers = kPatchStoreWarps * kWarp;
inline constexpr int kPatchThreads = kPatchWorkers + 2 * kWarp + kPatchStorers;

// The first warp after the workers computes scales, one thread of the second loads inputs, the other warps store.
inline constexpr int kPatchFetcher = kPatchWorkers + kWarp;  // that thread
enum class PatchRole { kWork, kScale, kFetch, kStore, kNone };

RTK_DEVICE PatchRole patch_role() {
    const u32 thread = threadIdx.x;
    if (thread < kPatchWorkers) return PatchRole::kWork;
    if (thread < kPatchWorkers + kWarp) return PatchRole::kScale;
    if (thread >= kPatchWorkers + 2 * kWarp) return PatchRole::kStore;
    return thread == kPatchFetcher ? PatchRole::kFetch : PatchRole::kNone;
}

using Patch = float[kPatchRows][kPatchColumns];

RTK_DEVICE int patch_warp() { return static_cast<int>(this_thread() / kWarp); }
RTK_DEVICE int patch_lane() { return static_cast<int>(this_thread() % kWarp); }
RTK_DEVICE int patch_row() { return static_cast<int>(this_thread() / 16 * kPatchRows); }
RTK_DEVICE int patch_column() { return static_cast<int>(this_thread() % 16 * kPatchColumns); }

// Rows of the tile from `rows` on do not exist.
RTK_DEVICE void cut_rows(Patch& v, u32 rows) {
    const int here = static_cast<int>(rows) - patch_row();
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r)
#pragma unroll
        for (int i = 0; i < kPatchColumns; ++i)
            if (r >= here) v[r][i] = 0.0f;
}

// Destinations of the results of a tile; `right`: distance to those of the other side, in elements.
struct alignas(16) PatchOutput {
    e4m3* q;         // of the tile's first element
    float* scale;    // of its first row
    e4m3* q_t;
    float* scale_t;  // of its first column
    i64 q_right, scale_right, q_t_right, scale_t_right;
    u32 rows, columns;  // that exist; no rows: there is no such tile
    u32 pitch;          // from column to column of q_t
    u32 row, column;    // of the first element
    u32 whole;          // whether transposed codes can be written in vectors of 16
};

// State that the warps share.
template <int SIDES>
struct PatchShared {
    static constexpr int kMaxima = SIDES * kPatchRows;

    __align__(16) u8 codes[SIDES][kTileSide * kTileSide];
    // Column 8k + 4h + i is at [16h + k][i], in the order of the lanes that hold it.
    __align__(16) float inverse[SIDES][kTileSide];
    u32 max_abs[SIDES][kTileSide];         // the same, in [i][16h + k], as bits; 0 between tiles
    u64 added, scaled, staged, stored;  // barriers, a phase for each tile

    // The whole block calls this, and synchronises afterwards.
    RTK_DEVICE void init() {
        if (threadIdx.x < SIDES * kTileSide) max_abs[0][threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(ptx::shared_address(&added), kPatchWarps);
            ptx::mbarrier_init(ptx::shared_address(&scaled), 1);
            ptx::mbarrier_init(ptx::shared_address(&staged), kPatchWarps);
            ptx::mbarrier_init(ptx::shared_address(&stored), kPatchStoreWarps);
        }
    }

    // Maxima of the thread's rows, and the warp's share in those of the columns.
    RTK_DEVICE void add_maxima(const Patch (&v)[SIDES], float (&rows)[kMaxima]) {
        auto find = [&](int side, float(&columns)[kPatchColumns], auto larger) {
#pragma unroll
            for (int i = 0; i < kPatchColumns; ++i) columns[i] = 0.0f;
#pragma unroll
            for (int r = 0; r < kPatchRows; ++r) {
                float row_amax = 0.0f;
#pragma unroll
                for (int i = 0; i < kPatchColumns; ++i) {
                    row_amax = larger(row_amax, v[side][r][i]);
                    columns[i] = larger(columns[i], v[side][r][i]);
                }
                rows[side * kPatchRows + r] = row_amax;
            }
        };
        const int lane = patch_lane();
        const bool lower = lane >= 16;
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            float columns[kPatchColumns];
            find(side, columns, [](float a, float b) { return fmaxf(a, fabsf(b)); });
            // Ignores NaN but not infinities; the rare thread that met an infinity repeats this without infinities.
            float largest = rows[side * kPatchRows];
#pragma unroll
            for (int r = 1; r < kPatchRows; ++r) largest = fmaxf(largest, rows[side * kPatchRows + r]);
            if (largest > 3.40282347e38f) find(side, columns, [](float a, float b) { return max_finite(a, b); });
            const ptx::SharedAddress to = ptx::shared_address(&max_abs[side][lane]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float kept = lower ? columns[i + 4] : columns[i], given = lower ? columns[i] : columns[i + 4];
                const float both = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, 16));
                ptx::shared_max(to + i * kWarp * 4, __float_as_uint(both));
            }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&added));
    }

    // Called by the warp that computes scales.
    RTK_DEVICE void make_scales(const PatchOutput& out, u32 nth, bool pow2) {
        ptx::mbarrier_wait(ptx::shared_address(&added), nth & 1);
        const int lane = static_cast<int>(threadIdx.x) % kWarp, column = lane % 16 * kPatchColumns + lane / 16 * 4;
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            Raw<16> scales, inverses;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float own = fp8_scale<e4m3>(__uint_as_float(max_abs[side][i * kWarp + lane]), pow2);
                max_abs[side][i * kWarp + lane] = 0;
                scales.w[i] = __float_as_uint(own);
                inverses.w[i] = __float_as_uint(inverse_scale(own));
            }
            *reinterpret_cast<Raw<16>*>(&inverse[side][lane * 4]) = inverses;
            float* to = out.scale_t + (side == 0 ? 0 : out.scale_t_right) + column;
            if (static_cast<u32>(column) < out.columns) ptx::st<16>(to, scales);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&scaled));
    }

    // Codes and scales of the thread's rows, from their maxima. Row pitches: `stride` for q, `step` for scales.
    RTK_DEVICE void quantize_rows(const Patch (&v)[SIDES], float (&rows)[kMaxima], const PatchOutput& out, u32 stride,
                                  u32 step, bool pow2) const {
        const int lane = patch_lane(), row = patch_row(), rows_here = static_cast<int>(out.rows) - row;
        const float own = fp8_scale<e4m3>(scattered<kMaxima, 16>(rows, lane, fmaxf), pow2);
        const int own_row = lane % kPatchRows, own_side = SIDES == 1 ? 0 : lane / kPatchRows % 2;
        if (lane % 16 < kMaxima && own_row < rows_here)
            out.scale[(own_side == 0 ? 0 : out.scale_right) + product(row + own_row, step)] = own;
        const float inverses = inverse_scale(own);
        const int column = patch_column(), rows_to_store = column < static_cast<int>(out.columns) ? rows_here : 0;
        e4m3* to = settled(out.q + product(row, stride) + column);
        const i64 right = SIDES == 1 ? 0 : out.q_right;
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r, to += stride)
#pragma unroll
            for (int side = 0; side < SIDES; ++side) {
                const float inverse_of_row = gathered_by_rows(inverses, side * kPatchRows + r);
                const Raw<8> codes_of_row = quantized<e4m3>(v[side][r], inverse_of_row);
                if (r < rows_to_store) ptx::st<8>(side == 0 ? to : to + right, codes_of_row);
            }
    }

    RTK_DEVICE void stage_columns(const Patch (&v)[SIDES], u32 nth) {
        const int row = patch_row(), k = patch_lane() % 16;
        const int place = square_unit(patch_column(), row / 8) + row % 8;
        ptx::mbarrier_wait(ptx::shared_address(&scaled), nth & 1);
        ptx::mbarrier_wait(ptx::shared_address(&stored), (nth & 1) ^ 1);  // of the tile before
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            Raw<16> four;
#pragma unroll
            for (int i = 0; i < kPatchColumns; ++i) {
                if (i % 4 == 0) four = *reinterpret_cast<const Raw<16>*>(&inverse[side][(i / 4 * 16 + k) * 4]);
                float down[kPatchRows];
#pragma unroll
                for (int r = 0; r < kPatchRows; ++r) down[r] = v[side][r][i];
                *reinterpret_cast<Raw<4>*>(codes[side] + place + i * kTileSide) =
                    quantized<e4m3>(down, __uint_as_float(four.w[i % 4]));
            }
        }
        __syncwarp();
        if (patch_lane() == 0) ptx::mbarrier_arrive(ptx::shared_address(&staged));
    }

    // Called by the storing warps.
    RTK_DEVICE void store_columns(const PatchOutput& out, u32 nth) {
        const int thread = static_cast<int>(threadIdx.x) - (kPatchThreads - kPatchStorers);
        ptx::mbarrier_wait(ptx::shared_address(&staged), nth & 1);
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            e4m3* to = out.q_t + (side == 0 ? 0 : out.q_t_right);
            const int rows = static_cast<int>(out.rows), columns = static_cast<int>(out.columns);
            if (out.whole) {
                store_whole_columns<kPatchStorers>(codes[side], to, out.pitch, rows, columns, thread);
            } else {
                store_shifted_vectors<kPatchStorers>(codes[side], to, out.pitch, rows, columns, thread);
            }
        }
        __syncwarp();
        if (thread % kWarp == 0) ptx::mbarrier_arrive(ptx::shared_address(&stored));
    }

    // Workers store the ends of columns that begin at any byte.
    RTK_DEVICE void store_column_ends(const PatchOutput& out, u32 nth) const {
        if (out.whole) return;
        ptx::mbarrier_wait(ptx::shared_address(&staged), nth & 1);
#pragma unroll 1
        for (int side = 0; side < SIDES; ++side)
            store_ends<kPatchWorkers>(codes[side], out.q_t + (side == 0 ? 0 : out.q_t_right), out.pitch,
                                      static_cast<int>(out.rows), static_cast<int>(out.columns),
                                      static_cast<int>(this_thread()));
    }
};

}  // namespace rtk
