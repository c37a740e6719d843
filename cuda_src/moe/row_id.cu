// The row of every routed (token, expert) pair as a dense map [tokens, experts], -1 where a token is not routed: rows
// sorted by expert, within an expert by token, every expert's rows padded to a multiple. Two launches with the same
// blocks, one or (with many experts) a few per chunk of tokens (common/chunks.cuh): row_id_count counts, row_id_place
// writes.
//
// A thread owns VEC neighbouring experts and kTokens consecutive tokens; threads with the same experts form a column,
// and the counts of those above are added to a thread's own. Counts of up to 248 tokens are kept in bytes, four per
// word.
#include "common/chunks.cuh"

namespace rtk {

inline constexpr int kTokens = 8;
inline constexpr int kMaxGroups = 32;

// A thread's part of a tile of tokens and experts. Blocks of a chunk (gridDim.y) share the experts.
template <int VEC, int THREADS>
struct MapTile {
    int first, columns, width, groups;  // of experts: this block's first and last (exclusive), in a tile; of tokens
    int group, column;
    int experts;

    RTK_DEVICE explicit MapTile(i64 expert_count) : experts(static_cast<int>(expert_count)) {
        const int all = experts / VEC, blocks = static_cast<int>(gridDim.y);
        const int share = ((all + blocks - 1) / blocks + 3) / 4 * 4;  // whole words of the table
        first = min(static_cast<int>(blockIdx.y) * share, all);
        columns = min(first + share, all);
        width = max(min(columns - first, THREADS), 1);
        groups = min(THREADS / width, kMaxGroups);
        group = static_cast<int>(threadIdx.x) / width;
        column = static_cast<int>(threadIdx.x) - group * width;
    }

    RTK_DEVICE bool one_column() const { return columns - first <= width; }
    RTK_DEVICE int tokens() const { return groups * kTokens; }

    // Flags of this thread's experts in up to kTokens tokens from `token`, each `step` after the previous one. All are
    // loaded before any is used; those that do not exist read the first flags of the map.
    RTK_DEVICE void load(const u8* map, int token, int end, int step, int at, u32 (&flags)[kTokens]) const {
        const int here = group < groups && at < columns ? end - token : 0;
        const u8* from = here > 0 ? map + static_cast<i64>(token) * experts + at * VEC : map;
        if (end > 0)
#pragma unroll
            for (int k = 0; k < kTokens; ++k)
                flags[k] = ptx::ld_stream<VEC>(from + (k * step < here ? k * step * experts : 0)).w[0];
#pragma unroll
        for (int k = 0; k < kTokens; ++k) flags[k] = k * step < here ? set_flags<VEC>(flags[k]) : 0u;
    }
};

template <int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS)
    row_id_count(const u8* map, u8* table, i64 tokens, i64 per_chunk, i64 experts, i64 width) {
    __shared__ __align__(16) u32 part[THREADS * VEC];  // [groups][experts of a tile]
    ptx::launch_dependents();
    const ChunkTable chunks(table, width, gridDim.x, experts);
    const MapTile<VEC, THREADS> tile(experts);
    const Chunk mine(tokens, per_chunk);
    const int count = static_cast<int>(mine.to - mine.from);
    map += mine.from * experts;
    for (int start = tile.first; start < tile.columns; start += tile.width) {
        u32 sum[VEC];
#pragma unroll
        for (u32& s : sum) s = 0;
        for (int token = 0; token < count; token += tile.tokens()) {
            u32 flags[kTokens], bytes = 0;
            tile.load(map, token + tile.group, count, tile.groups, start + tile.column, flags);
#pragma unroll
            for (int k = 0; k < kTokens; ++k) bytes += flags[k];
#pragma unroll
            for (int b = 0; b < VEC; ++b) sum[b] += bytes >> (8 * b) & 0xffu;
        }
        if (start != tile.first) __syncthreads();
#pragma unroll
        for (int b = 0; b < VEC; ++b) part[threadIdx.x * VEC + b] = sum[b];
        __syncthreads();
        const int length = tile.width * VEC, here = min(tile.columns - start, tile.width) * VEC;
        for (int quad = threadIdx.x; 4 * quad < here; quad += THREADS) {
            u32 sums[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (int g = 0; g < tile.groups; ++g) {
                const u32* p = part + g * length + 4 * quad;
                if constexpr (VEC == 4) {
                    const uint4 four = *reinterpret_cast<const uint4*>(p);
                    sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
                } else {
                    for (int i = 0; i < 4 && 4 * quad + i < here; ++i) sums[i] += p[i];
                }
            }
            chunks.write(blockIdx.x, start * VEC / 4 + quad, sums);
        }
    }
}

template <int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    row_id_place(const u8* map, const u8* table, i32* ids, i32* counts, i32* offsets, i64 tokens, i64 per_chunk,
                 i64 experts, i64 row_count, i64 multiple, i64 width) {
    extern __shared__ __align__(16) u32 memory[];
    __shared__ u32 column[THREADS];  // [groups][width] counts in bytes
    const ChunkTable chunks(table, width, gridDim.x, experts);
    const RowLayout rows(memory, chunks, experts, row_count, multiple);
    const MapTile<VEC, THREADS> tile(experts);
    const Chunk mine(tokens, per_chunk);
    const int count = static_cast<int>(mine.to - mine.from), own_token = tile.group * kTokens;
    map += mine.from * experts;
    ids += mine.from * experts;
    u32 flags[kTokens], set = 0, bytes = 0, above = 0;
    // The flags in one word (token k in bit k of every byte), the counts of this thread and of those above it. One
    // barrier.
    const auto rank = [&] {
        set = bytes = above = 0;
#pragma unroll
        for (int k = 0; k < kTokens; ++k) bytes += flags[k], set |= flags[k] << k;
        column[threadIdx.x] = bytes;
        __syncthreads();
        if (tile.group < tile.groups)
            for (int g = 0; g < tile.group; ++g) above += column[g * tile.width + tile.column];
    };
    tile.load(map, own_token, count, 1, tile.first + tile.column, flags);
    // A chunk of one tile is filled with -1 while the counts are computed; afterwards only routed pairs remain to be
    // written.
    const bool one_tile = tile.one_column() && per_chunk <= tile.tokens();
    if (one_tile && tile.group < tile.groups && tile.first + tile.column < tile.columns) {
        Raw<4 * VEC> none;
#pragma unroll
        for (u32& word : none.w) word = 0xffffffffu;
        i32* target = ids + own_token * tile.experts + (tile.first + tile.column) * VEC;
#pragma unroll
        for (int k = 0; k < kTokens; ++k)
            if (own_token + k < count) ptx::st<4 * VEC>(target + k * tile.experts, none);
    }
    rank();
    ptx::wait_for_previous();
    rows.find(chunks, blockIdx.x);

    int start = tile.first, token = 0;
    while (start < tile.columns && token < count) {
        const int at = start + tile.column;
        const bool active = tile.group < tile.groups && at < tile.columns;
        u32 next[VEC];
        if (active) {
#pragma unroll
            for (int b = 0; b < VEC; ++b) next[b] = rows.base[at * VEC + b] + (above >> (8 * b) & 0xffu);
        }
        i32* target = ids + static_cast<i64>(token + own_token) * tile.experts + at * VEC;
        const int here = active ? count - token - own_token : 0;
        token += tile.tokens();
        if (token >= count) token = 0, start += tile.width;
        if (!one_tile) {
            tile.load(map, token + own_token, count, 1, start + tile.column, flags);
            __syncthreads();
            if (active && tile.group == tile.groups - 1)
#pragma unroll
                for (int b = 0; b < VEC; ++b) rows.base[at * VEC + b] = next[b] + (bytes >> (8 * b) & 0xffu);
        }
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
            Raw<4 * VEC> row;
#pragma unroll
            for (int b = 0; b < VEC; ++b) {
                const u32 flag = set >> (8 * b + k) & 1u;
                row.w[b] = flag != 0 && next[b] < rows.rows ? next[b] : 0xffffffffu;
                next[b] += flag;
            }
            if (k < here && (!one_tile || (set >> k & 0x01010101u) != 0)) ptx::st<4 * VEC>(target, row);
            target += tile.experts;
        }
        if (one_tile) break;
        rank();
    }
    if (blockIdx.x == 0 && blockIdx.y == 0) rows.write(counts, offsets);
}

}  // namespace rtk
