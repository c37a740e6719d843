// Attention of packed queries over a paged KV cache with mma.sync: prefill, chunked prefill and mixed batches.
//
// A block owns BM = 64 * MT rows of one sequence and key head. Rows are the queries of all heads that share the keys
// (row r: query r / group, head r % group), so a sequence with one new token needs one block per key head. Tiles of
// sequence b have the numbers from cu_q[b] * group / BM + b on: a block finds its sequence by a search, and the grid
// depends on shapes only. Blocks take the last tiles first.
//
// Four warps own 16 * MT rows each and loop over tiles of BN keys as in attention_mma_fwd.cu; warps without rows only
// copy. 16 keys never cross a page: the offsets of each 16 keys of a tile are kept in shared memory, one tile earlier
// than the copies that use them. Entries of the page table after the last key are not read, keys past the last one are
// zero-filled.
//
// An 8-bit cache (CODES) is copied as it is and converted to T in shared memory; e4m3 and int8 are exact in both T.
// Scales are applied to scores and to the result.
#include "attention/codes.cuh"
#include "attention/mma_tile.cuh"
#include "attention/paged_rows.cuh"
#include "attention/scores.cuh"

namespace rtk {

inline constexpr int kPagedThreads = 128;

// Starts the copy of ROWS rows of VECTORS 16-byte vectors: `from(row)` is the address of a row, `at(row, vector)` its
// place in shared memory. Rows from `rows` on and vectors from `vectors` on are zero-filled.
template <int ROWS, int VECTORS, typename At, typename From>
RTK_DEVICE void copy_rows(u8* to, At at, From from, int rows, int vectors) {
    constexpr int kStep = kPagedThreads / VECTORS;
    static_assert(kPagedThreads % VECTORS == 0 && ROWS % kStep == 0, "all threads copy alike");
    const ptx::SharedAddress base = ptx::shared_address(to);
    const int first = static_cast<int>(this_thread()) / VECTORS, vector = static_cast<int>(this_thread()) % VECTORS;
#pragma unroll
    for (int i = 0; i < ROWS / kStep; ++i) {
        const int row = first + i * kStep;
        ptx::cp_async_16_or_zero(base + at(row, vector), from(row) + vector * 16, row < rows && vector < vectors);
    }
}

// Converts ROWS rows of D codes to a tile of T.
template <typename T, int CODES, int ROWS, int D>
RTK_DEVICE void convert_rows(u8* tile, const u8* codes) {
    const ptx::SharedAddress from = ptx::shared_address(codes), to = ptx::shared_address(tile);
#pragma unroll
    for (int i = 0; i < ROWS * D / 16; i += kPagedThreads) {
        const int place = i + static_cast<int>(this_thread()), row = place / (D / 16), vector = place % (D / 16);
        Raw<16> pairs[2];
        codes_to_vectors<T, CODES>(pairs, ptx::ld_shared_16(from + place * 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) ptx::st_shared_16(to + MmaTile<D>::offset(row, 2 * vector + half), pairs[half]);
    }
}

// Adds -slope * |position of the query - key|: s[n][2r + c] belongs to row row + 8r of the sequence and key
// key + 8n + c; slopes are those of the heads that share keys.
template <int N>
RTK_DEVICE void add_alibi(float (&s)[N][4], const float* slopes, i64 group, i64 group_divisor, int shift, int row, int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const PagedRow at(row + 8 * r, group, group_divisor);
        const float slope = slopes[at.head];
        const int distance = at.query + shift - key;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                s[n][2 * r + c] -= slope * fabsf(static_cast<float>(distance - 8 * n - c));
    }
}

template <typename T>
struct PagedArguments {
    const T* q;
    const u8 *k_cache, *v_cache;
    const i32 *cu_q, *lengths, *table;
    const float *k_scale, *v_scale, *sinks, *slopes;
    T* out;
    float* lse;
    i64 sequences, tiles, section, heads_kv, group, group_divisor, lkv, d_qk, d_v, page_size, page_divisor, table_row,
        q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_row, out_head, lse_head, k_scale_head,
        v_scale_head, slopes_batch, left, right, scale_factor, softcap_inverse;
};

template <typename T, int CODES, int D, int MT, int BN>
__global__ void __launch_bounds__(kPagedThreads, 2) attention_paged(const __grid_constant__ PagedArguments<T> args) {
    using Tile = MmaTile<D>;
    constexpr bool kByte = CODES != kSameType;
    constexpr int BM = 64 * MT, kKeyTiles = BN / 8, kBytes = kByte ? 1 : 2, kVectors = D * kBytes / 16;
    constexpr u32 kTileBytes = BN * Tile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8* const q_tile = shared;
    u8* const k_tiles = shared + BM * Tile::kPitch;  // two stages; of codes, a converted tile and two stages
    u8* const v_tiles = k_tiles + 2 * kTileBytes;

    __shared__ __align__(16) struct {
        PagedBlock block;
        const i32* pages;
        const u8 *k, *v;  // of the head
        float k_scale;
        struct {
            i64 k, v;  // bytes
        } keys[2][BN / kPageUnit];
    } walk;
    int begin, end;  // tiles of keys
    {
        const HeadTile here(args.tiles, args.section, args.heads_kv, args.heads_kv);
        PagedBlock own = paged_block<BM>(static_cast<int>(args.tiles) - 1 - here.number, args.cu_q, args.lengths,
                                         static_cast<int>(args.sequences), args.group, args.group_divisor, args.lkv,
                                         args.left, args.right);
        if (own.rows <= 0) return;
        own.head = here.head;
        begin = own.any.empty() ? 0 : own.any.first / BN, end = own.any.empty() ? 0 : (own.any.end + BN - 1) / BN;
        if (threadIdx.x == 0) {
            walk.block = own;
            walk.pages = args.table + own.batch * args.table_row;
            walk.k = args.k_cache + own.head * args.k_head * kBytes,
            walk.v = args.v_cache + own.head * args.v_head * kBytes;
            walk.k_scale = args.k_scale == nullptr ? 1.0f : args.k_scale[own.head * args.k_scale_head];
        }
        __syncthreads();
    }
    // Keys of a tile that this thread locates: 16 from here on, if they exist.
    auto own_keys = [&](int tile) { return tile * BN + static_cast<int>(this_thread()) * kPageUnit; };
    auto page_of = [&](int tile) -> i32 {
        const int key = own_keys(tile);
        if (this_thread() >= BN / kPageUnit || tile >= end || key >= walk.block.sequence.keys) return 0;
        return walk.pages[divided(static_cast<u32>(key), args.page_divisor)];
    };
    auto locate = [&](int tile, i64 page) {
        if (this_thread() >= BN / kPageUnit) return;
        const int key = own_keys(tile),
                  slot = key - static_cast<int>(divided(static_cast<u32>(key), args.page_divisor) * args.page_size);
        auto& to = walk.keys[tile & 1][this_thread()];
        to.k = (page * args.k_page + slot * args.k_row) * kBytes,
        to.v = (page * args.v_page + slot * args.v_row) * kBytes;
    };
    auto fetch = [&](int tile) {
        const int rows = walk.block.sequence.keys - tile * BN, stage = tile & 1;
        const u32 to = kByte ? kTileBytes + stage * (BN * D) : stage * kTileBytes;
        auto at = [&](int row, int vector) { return kByte ? static_cast<u32>(row * D + vector * 16) : Tile::offset(row, vector); };
        copy_rows<BN, kVectors>(
            k_tiles + to, at,
            [&](int row) {
                return walk.k + walk.keys[stage][row / kPageUnit].k + row % kPageUnit * args.k_row * kBytes;
            },
            rows, static_cast<int>(args.d_qk) / (16 / kBytes));
        copy_rows<BN, kVectors>(
            v_tiles + to, at,
            [&](int row) {
                return walk.v + walk.keys[stage][row / kPageUnit].v + row % kPageUnit * args.v_row * kBytes;
            },
            rows, static_cast<int>(args.d_v) / (16 / kBytes));
        ptx::cp_async_commit();
    };
    if (begin < end) {
        locate(begin, page_of(begin));
        locate(begin + 1, page_of(begin + 1));
        const PagedBlock& own = walk.block;
        copy_rows<BM, D / 8>(
            q_tile, [](int row, int vector) { return Tile::offset(row, vector); },
            [&](int row) {
                const PagedRow from(row < own.rows ? own.row0 + row : 0, args.group, args.group_divisor);
                return reinterpret_cast<const u8*>(args.q +
                                                   (own.sequence.q_row + static_cast<i64>(from.query)) * args.q_row +
                                                   (own.head * args.group + from.head) * args.q_head);
            },
            own.rows, static_cast<int>(args.d_qk) / 8);
        __syncthreads();
        fetch(begin);
    }
    const ScoreRule rule{args.scale_factor, args.softcap_inverse};
    const bool plain = !kByte && rule.softcap() == 0.0f && args.slopes == nullptr;  // the products are the scores

    float sums[MT][D / 8][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) clear_sums(sums[m]);
    LazySoftmax softmax[MT];

#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1);
        const i32 page = page_of(tile + 2);
        const u8* k_tile = k_tiles + (tile & 1) * kTileBytes;
        const u8* v_tile = v_tiles + (tile & 1) * kTileBytes;
        if constexpr (kByte) {
            k_tile = k_tiles, v_tile = v_tiles;
            const u32 from = kTileBytes + (tile & 1) * (BN * D);
            convert_rows<T, CODES, BN, D>(k_tiles, k_tiles + from);
            convert_rows<T, CODES, BN, D>(v_tiles, v_tiles + from);
            __syncthreads();
        }
        if (WarpRows(16 * MT).row < walk.block.rows) {
            float s[MT][kKeyTiles][4];
            const WarpRows qk(16 * MT);
#pragma unroll
            for (int m = 0; m < MT; ++m) clear_sums(s[m]);
            rows_by_rows<T, Tile, D / 16>(s, q_tile, qk.row, k_tile, 0, qk.lane);

            const int j0 = tile * BN;
            const bool whole = walk.block.sees_whole(j0, BN);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                if (!plain) {
                    if constexpr (kByte) {
                        const float by[2] = {walk.k_scale, walk.k_scale};
                        scale_rows(s[m], by);
                    }
                    cap_scores(s[m], rule);
                    if (args.slopes != nullptr) {
                        const PagedBlock& own = walk.block;
                        const WarpRows mine(16 * MT);
                        add_alibi(s[m], args.slopes + own.batch * args.slopes_batch + own.head * args.group, args.group,
                                  args.group_divisor, own.sequence.keys - own.sequence.lq,
                                  own.row0 + mine.row + 16 * m + mine.lane / 4, j0 + mine.lane % 4 * 2);
                    }
                }
                if (!whole) {
                    const WarpRows mine(16 * MT);
                    const PagedKeys seen{Mask(walk.block.sequence, args.left, args.right), walk.block.row0,
                                         args.group_divisor};
                    mask_scores(s[m], seen, mine.row + 16 * m, j0, mine.lane);
                }
                float correction[2];
                if (softmax[m].add_lazily(s[m], rule.factor(), correction)) scale_rows(sums[m], correction);
            }

            const WarpRows pv(16 * MT);
#pragma unroll
            for (int step = 0; step < BN / 16; ++step) {
                u32 a[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) as_left<T>(a[m], s[m][2 * step], s[m][2 * step + 1]);
                by_columns<T, Tile>(sums, a, v_tile, 16 * step, pv.lane);
            }
        }
        locate(tile + 2, page);
    }

    const WarpRows mine(16 * MT);
    const PagedBlock& own = walk.block;
    if (mine.row >= own.rows) return;
    const float value_scale = args.v_scale == nullptr ? 1.0f : args.v_scale[own.head * args.v_scale_head];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = mine.row + 16 * m + mine.lane / 4 + 8 * r;
            const PagedRow to(row < own.rows ? own.row0 + row : 0, args.group, args.group_divisor);
            const i64 query = own.sequence.q_row + static_cast<i64>(to.query), head = own.head * args.group + to.head;
            const float sink = args.sinks == nullptr ? negative_infinity() : args.sinks[head] * kLog2e;
            float times[2], logs[2];
            softmax[m].finish(rule.factor(), sink, times, logs);
            if (row >= own.rows) continue;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                const int column = 8 * n + mine.lane % 4 * 2;
                const float by = times[r] * value_scale;
                const float values[2] = {sums[m][n][2 * r] * by, sums[m][n][2 * r + 1] * by};
                if (column < args.d_v)
                    store<T, 2>(args.out + query * args.out_row + head * args.out_head + column, values);
            }
            if (mine.lane % 4 == 0) args.lse[head * args.lse_head + query] = logs[r];
        }
}

}  // namespace rtk
