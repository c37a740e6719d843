// Shared by kernels that quantise gated linear units: tiles of 128 x 128 numbers that never span two experts, one at a
// time per block of a persistent grid, quantised along rows (1 x 128), along columns (128 x 1, codes transposed), or
// both.
//
// A block has 512 threads. A thread owns four neighbouring columns of eight neighbouring rows, a warp eight whole rows:
// row maxima stay within a warp, and a thread holds eight codes of each of its columns together. Transposed codes pass
// through shared memory, 128 bytes per column: the eight bytes of rows 8u .. 8u + 7 of column c are in unit u ^ (c / 4
// % 16) of that column. When writing, lanes have equal u and different c / 4; when reading 16 bytes, eight lanes share
// a column: both touch every bank once.
#pragma once
#include "act/glu_fp8_counts.cuh"
#include "quant/expert_tiles.cuh"
#include "common/fp8_scale.cuh"
#include "common/pressure.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kSide = kTileSide;
inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kThreadRows = kSide / kWarps;           // rows of a warp, and of a thread
inline constexpr int kThreadColumns = kSide / kWarp;            // columns of a thread

using Values = float[kThreadRows][kThreadColumns];

// The tiles of one block: blockIdx.x, blockIdx.x + gridDim.x, ... Their positions are computed 32 at a time, one per
// lane, and kept in shared memory, where reading them again costs less than registers.
struct TileWalk {
    static constexpr u32 kKept = 2 * kWarp;

    const TilePlaces& all;
    TilePlace* kept;  // kKept, in shared memory

    // The whole block calls; one barrier.
    RTK_DEVICE TileWalk(const TilePlaces& places, TilePlace* memory) : all(places), kept(memory) {
        if (threadIdx.x < kKept) find(threadIdx.x);
        __syncthreads();
    }

    RTK_DEVICE bool has(u32 nth) const { return blockIdx.x + nth * gridDim.x < all.count(); }
    RTK_DEVICE const TilePlace& operator[](u32 nth) const { return kept[nth % kKept]; }

    // Called at the beginning of each tile; the block must pass a barrier between two calls. Then all threads are done
    // with the tile before the last one, whose position is the next to be replaced.
    RTK_DEVICE void keep_up(u32 nth) const {
        if (nth % kWarp == 1 && nth > 1 && threadIdx.x < kWarp) find(nth - 1 + kWarp + threadIdx.x);
    }

   private:
    RTK_DEVICE void find(u32 nth) const {
        if (has(nth)) kept[nth % kKept] = all.find(blockIdx.x + nth * gridDim.x);
    }
};

// The thread's part of a tile: its first row and column, and how many of its rows (0 or less: none) exist.
struct Part {
    int warp, lane, row, column, rows;

    RTK_DEVICE explicit Part(u32 rows_of_tile) {
        const u32 thread = this_thread();
        warp = static_cast<int>(thread / kWarp), lane = static_cast<int>(thread % kWarp);
        row = warp * kThreadRows, column = lane * kThreadColumns;
        rows = static_cast<int>(rows_of_tile) - row;
    }
};

struct TileScratch512 {
    __align__(16) u8 codes[kSide * kSide];
    __align__(16) float max_abs[kWarps][kSide];
    __align__(16) float inverse[kSide];

    RTK_DEVICE u8* unit(int column, int rows_above) {
        return codes + column * kSide + (((rows_above / 8) ^ (column / kThreadColumns % 16)) * 8);
    }
};

static_assert(sizeof(TileScratch512) + TileWalk::kKept * sizeof(TilePlace) == 26624, "the host knows this number too");

// Writes the staged columns, each `pitch` bytes after the previous one; `q`: the code of the tile's first element. Call
// after a barrier; the next barrier frees the codes.
RTK_DEVICE void store_columns(TileScratch512& scratch, e4m3* q, u32 pitch, int rows, int columns) {
    const u32 thread = this_thread();
    const u64 mixed = reinterpret_cast<u64>(q) | static_cast<u64>(pitch) | static_cast<u64>(rows);
    if ((mixed & 15) == 0) {
        constexpr int kVectors = kSide / 16, kStep = kThreads / kVectors;
        const int vector = static_cast<int>(thread % kVectors), first = static_cast<int>(thread / kVectors);
        e4m3* to = settled(q + product(first, pitch) + vector * 16);
#pragma unroll
        for (int step = 0; step < kSide; step += kStep, to += product(kStep, pitch)) {
            const int column = first + step;
            // A vector is two units, which the xor swaps if its last bit is set.
            const int nth = column / kThreadColumns % 16;
            const Raw<16> raw =
                *reinterpret_cast<const Raw<16>*>(scratch.codes + column * kSide + ((vector ^ (nth / 2)) * 16));
            const bool swap = nth % 2 != 0;
            const Raw<16> codes = {swap ? raw.w[2] : raw.w[0], swap ? raw.w[3] : raw.w[1],
                                   swap ? raw.w[0] : raw.w[2], swap ? raw.w[1] : raw.w[3]};
            if (column < columns && vector * 16 < rows) ptx::st<16>(to, codes);
        }
        return;
    }
    // A column may begin at any byte. Lanes write its aligned words, each funnel-shifted from two words of codes, and
    // the bytes at the ends.
    auto word = [&](int column, int w) {
        if (w < 0 || w >= kSide / 4) return 0u;
        return *reinterpret_cast<const u32*>(scratch.unit(column, w * 4) + w % 2 * 4);
    };
#pragma unroll 1
    for (int column = static_cast<int>(thread / kWarp); column < columns; column += kWarps) {
        e4m3* p = q + product(column, pitch);
        const int misaligned = static_cast<int>(reinterpret_cast<u64>(p) & 3);
#pragma unroll 1
        for (int w = static_cast<int>(thread % kWarp); w * 4 - misaligned < rows; w += kWarp) {
            const Raw<4> codes = {__funnelshift_l(word(column, w - 1), word(column, w), misaligned * 8)};
            const int first = w * 4 - misaligned;
            if (first >= 0 && first + 4 <= rows) {
                ptx::st<4>(p + first, codes);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (first + b >= 0 && first + b < rows)
                        ptx::st<1>(p + first + b, Raw<1>{(codes.w[0] >> (8 * b)) & 0xffu});
            }
        }
    }
}

// Maxima of the thread's rows and columns.
template <typename Larger>
RTK_DEVICE void find_maxima(const Values& v, float (&rows)[kThreadRows], float (&columns)[kThreadColumns], const Larger& larger) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) columns[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        rows[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
            rows[r] = larger(rows[r], v[r][i]);
            columns[i] = larger(columns[i], v[r][i]);
        }
    }
}

// Quantises v, the thread's part of a tile: rows as `place` says (in shared memory, or wherever rereading it is cheap),
// `columns` of them from `column` on. Elements that do not exist must be 0. `words`: four codes of a row can be stored
// together. Every thread of the block calls; there is at least one barrier, and the scratch may be reused afterwards.
RTK_DEVICE void quantize_tile(const Values& v, const TilePlace& place, u32 column, u32 columns, bool words,
                              const Quantized& out, TileScratch512& scratch) {
    float rows[kThreadRows], max_abs[kThreadColumns];
    find_maxima(v, rows, max_abs, [](float a, float b) { return fmaxf(a, fabsf(b)); });
    constexpr float kLargest = 3.40282347e38f;
    if (fmaxf(fmaxf(max_abs[0], max_abs[1]), fmaxf(max_abs[2], max_abs[3])) > kLargest)
        find_maxima(v, rows, max_abs, max_finite);
    if (out.q_t != nullptr) {
        const Part part(place.rows);
        *reinterpret_cast<Raw<16>*>(&scratch.max_abs[part.warp][part.column]) = {
            __float_as_uint(max_abs[0]), __float_as_uint(max_abs[1]), __float_as_uint(max_abs[2]), __float_as_uint(max_abs[3])};
    }
    __syncthreads();
    // Four warps compute the scales of the columns while the others begin with the rows.
    if (out.q_t != nullptr && threadIdx.x < kSide) {
        const u32 c = this_thread();
        float m = scratch.max_abs[0][c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) m = fmaxf(m, scratch.max_abs[w][c]);
        u32 line = place.down;
        if (out.max_abs != nullptr) {
            line = out.expert;
            m = c < columns ? out.max_abs[product(line, out.cols) + column + c] : 0.0f;
        }
        const float own = fp8_scale<e4m3>(m, out.pow2);
        scratch.inverse[c] = inverse_scale(own);
        if (c < columns) out.scale_t[product(line, out.cols) + column + c] = own;
    }
    if (out.q != nullptr) {
        const Part part(place.rows);
        const int lane = part.lane;
        const float own = fp8_scale<e4m3>(scattered<kThreadRows, kWarp>(rows, lane, fmaxf), out.pow2);
        const u32 first = place.row + part.row;
        if (lane < kThreadRows && lane < part.rows) {
            const u32 groups = (out.cols + (kSide - 1)) / kSide, group = column / kSide, m = first + lane;
            const u64 by_group = product(place.start, groups - 1) + product(group, place.count) + m;
            out.scale[out.by_group ? by_group : product(m, groups) + group] = own;
        }
        const float inverses = inverse_scale(own);
        const int rows_here = static_cast<u32>(part.column) < columns ? part.rows : 0;
        e4m3* q = settled(out.q + product(first, out.cols) + (column + part.column));
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r, q += out.cols) {
            const float inverse = __shfl_sync(0xffffffffu, inverses, r);
            const Raw<4> codes = quantized<e4m3>(v[r], inverse);
            if (words) {
                if (r < rows_here) ptx::st<4>(q, codes);
            } else {
#pragma unroll
                for (int i = 0; i < kThreadColumns; ++i)
                    if (r < part.rows && static_cast<u32>(part.column + i) < columns)
                        ptx::st<1>(q + i, Raw<1>{(codes.w[0] >> (8 * i)) & 0xffu});
            }
        }
    }
    if (out.q_t == nullptr) return;
    __syncthreads();
    {
        const Part part(place.rows);
        const Raw<16> inverse = *reinterpret_cast<const Raw<16>*>(&scratch.inverse[part.column]);
        u8* to = scratch.unit(part.column, part.row);
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
            float down[kThreadRows];
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r) down[r] = v[r][i];
            *reinterpret_cast<Raw<8>*>(to + i * kSide) = quantized<e4m3>(down, __uint_as_float(inverse.w[i]));
        }
    }
    __syncthreads();
    const u32 start = out.pitch_t != 0 ? out.start_t : place.start, pitch = out.pitch_t != 0 ? out.pitch_t : place.count;
    const u64 first = product(start, out.cols) + product(column, pitch) + (place.row - place.start);
    store_columns(scratch, out.q_t + first, pitch, static_cast<int>(place.rows), static_cast<int>(columns));
}

}  // namespace rtk
