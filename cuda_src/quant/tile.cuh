// A 128 x 128 tile in the registers of one block, quantised along rows, along columns, or both, with the codes of the
// columns written transposed. A thread owns N neighbouring elements (16 bytes of input) of eight neighbouring rows: it
// reads them with eight independent loads, and holds eight codes of each of its columns together. Kernels that compute
// their values pass a function `value(row, i)`; everything here uses that.
//
// Transposed codes pass through shared memory, 128 bytes per column. The eight bytes of rows 8u .. 8u + 7 of column c
// are in unit u ^ (c / N % 16) of that column. When writing, 16 lanes have equal u and different c / N; when reading 16
// bytes, eight lanes share a column: both touch every bank once.
#pragma once
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

inline constexpr int kTileSide = 128;
inline constexpr int kTileRows = 8;                        // of one thread
inline constexpr int kTileThreadsDown = kTileSide / kTileRows;   // threads stacked along the rows

template <int N>
struct TileScratch {
    static constexpr int kWarps = kTileSide / N * kTileThreadsDown / kWarp;
    // Column operands are stored by fours, first those of columns 0..3 of every thread, then (if N is 8) 4..7; the
    // padding of 16 between the halves puts them on different banks.
    static constexpr int kPlaces = N == 8 ? kTileSide + 16 : kTileSide;

    __align__(16) u8 codes[kTileSide * kTileSide];
    __align__(16) float max_abs[kWarps][kPlaces];
    __align__(16) float inverse[kPlaces];

    RTK_DEVICE static int place(int column) {
        return column / 4 % (N / 4) * (kTileSide / 2 + 16) + column / N * 4 + column % 4;
    }
    RTK_DEVICE u8* unit(int column, int rows_above) {
        return codes + column * kTileSide + (((rows_above / 8) ^ (column / N % 16)) * 8);
    }
};

template <int N>
struct Tile {
    static constexpr int kLanes = kTileSide / N, kThreads = kLanes * kTileThreadsDown, kWarps = kThreads / kWarp;
    // 64 registers per thread, so that loads of some blocks overlap stores of others.
    static constexpr int kBlocksPerSm = 1024 / kThreads;

    int thread;            // this one
    int rows, columns;     // of the tile that exist
    int row, column;       // this thread's first
    int rows_here;         // of this thread's eight rows, how many exist; 0 or less: none
    int columns_here;      // likewise

    RTK_DEVICE Tile(i64 rows_left, i64 columns_left, int thread_ = static_cast<int>(threadIdx.x)) : thread(thread_) {
        rows = static_cast<int>(min(rows_left, static_cast<i64>(kTileSide)));
        columns = static_cast<int>(min(columns_left, static_cast<i64>(kTileSide)));
        row = thread / kLanes * kTileRows;
        column = thread % kLanes * N;
        rows_here = rows - row;
        columns_here = columns - column;
    }
};

// The threads that share a tile: this thread's index among them, and their barrier.
struct WholeBlock {
    RTK_DEVICE static u32 thread() { return threadIdx.x; }
    RTK_DEVICE static void meet() { __syncthreads(); }
};

// One of several sets of THREADS threads in a block, each with a tile of its own.
template <int THREADS>
struct PartOfBlock {
    RTK_DEVICE static u32 index() { return threadIdx.x / THREADS; }
    RTK_DEVICE static u32 thread() { return threadIdx.x % THREADS; }
    RTK_DEVICE static void meet() { ptx::named_barrier_sync(static_cast<int>(index()) + 1, THREADS); }
};

// Elements that do not exist are 0. ALIGNED16: rows can be read 16 bytes at a time, with this L2 policy. `x`: the
// tile's first element.
template <typename T, bool ALIGNED16>
RTK_DEVICE void load_tile(const Tile<16 / sizeof(T)>& tile, const T* x, i64 stride, Raw<16> (&raw)[kTileRows],
                          u64 policy = ptx::l2_last()) {
    constexpr int N = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
    const T* p = x + tile.row * stride + tile.column;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r, p += stride) {
        clear(raw[r]);
        if constexpr (ALIGNED16) {
            if (r < tile.rows_here && tile.columns_here > 0) raw[r] = load_raw<T, N>(p, policy);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (r < tile.rows_here && i < tile.columns_here)
                    raw[r].w[i / kPerWord] |= ptx::ld_keep<sizeof(T)>(p + i).w[0] << (i % kPerWord * 8 * sizeof(T));
        }
    }
}

// Element i of a packed row.
template <typename T>
RTK_DEVICE float element(const Raw<16>& raw, int i) {
    float v[16 / sizeof(T)];
    unpack<T, 16 / sizeof(T)>(raw, v);
    return v[i];
}

// Maxima of COUNT numbers over `LANES` neighbouring lanes, scattered: each lane gets that of number lane % COUNT.
template <int COUNT, int LANES>
RTK_DEVICE float scattered_max(float (&v)[COUNT], int thread = static_cast<int>(threadIdx.x)) {
    return scattered<COUNT, LANES>(v, thread % LANES, fmaxf);
}

// Turns the thread's row maxima into the reciprocals of the rows' scales, scattered: each lane gets that of its row
// lane % 8. Stores the scales; that of the tile's row m goes to scale[m * step].
template <typename F8, int N>
RTK_DEVICE float row_scales(const Tile<N>& tile, float (&v)[kTileRows], float* scale, i64 step, bool pow2) {
    const int lane = tile.thread % Tile<N>::kLanes;
    const float own = fp8_scale<F8>(scattered_max<kTileRows, Tile<N>::kLanes>(v, tile.thread), pow2);
    if (lane < kTileRows && lane < tile.rows_here) scale[(tile.row + lane) * step] = own;
    return __frcp_rn(own);
}

// STREAM: the cache should evict the codes before other data.
template <bool STREAM, int B>
RTK_DEVICE void store_codes(void* place, const Raw<B>& codes) {
    if constexpr (STREAM) {
        ptx::st_stream<B>(place, codes);
    } else {
        ptx::st<B>(place, codes);
    }
}

// Writes the thread's packed codes of row r; `place`: address of its first element.
template <bool ALIGNED16, bool STREAM = false, typename F8, int N>
RTK_DEVICE void store_row(const Tile<N>& tile, int r, F8* place, const Raw<N>& codes) {
    if constexpr (ALIGNED16) {
        if (r < tile.rows_here && tile.columns_here > 0) store_codes<STREAM>(place, codes);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (r < tile.rows_here && i < tile.columns_here)
                ptx::st<1>(place + i, Raw<1>{(codes.w[i / 4] >> (i % 4 * 8)) & 0xffu});
    }
}

// Quantises and writes the thread's rows, using the reciprocals of row_scales. `q`: the code of the tile's first
// element.
template <bool ALIGNED16, bool STREAM = false, typename F8, int N, typename Value>
RTK_DEVICE void store_rows(const Tile<N>& tile, F8* q, i64 stride, float scattered_inverse, const Value& value) {
    F8* place = q + tile.row * stride + tile.column;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r, place += stride) {
        const float inverse = __shfl_sync(0xffffffffu, scattered_inverse, r, Tile<N>::kLanes);
        float v[N];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = value(r, i);
        store_row<ALIGNED16, STREAM>(tile, r, place, quantized<F8>(v, inverse));
    }
}

// Hands the thread's column maxima to column_scales, so that they take no registers in between.
template <int N>
RTK_DEVICE void share_columns(const Tile<N>& tile, const float (&v)[N], TileScratch<N>& scratch) {
    constexpr int kLanes = Tile<N>::kLanes;
    const int thread = tile.thread;
    const int half = thread / kLanes % (kWarp / kLanes);  // with two rows of threads in a warp, each keeps half of the columns
    Raw<16> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float max_abs = v[i];
        if constexpr (N == 8) {
            const float kept = half ? v[i + 4] : v[i], given = half ? v[i] : v[i + 4];
            max_abs = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, kLanes));
        }
        four.w[i] = __float_as_uint(max_abs);
    }
    *reinterpret_cast<Raw<16>*>(&scratch.max_abs[thread / kWarp][scratch.place(tile.column + 4 * half)]) = four;
}

// Writes the reciprocals of the scales of the thread's columns to `v`. Stores the scales; `scale` is that of the tile's
// first column. All threads of the tile call this; two barriers.
template <typename F8, typename TileThreads = WholeBlock, int N>
RTK_DEVICE void column_scales(const Tile<N>& tile, float (&v)[N], TileScratch<N>& scratch, float* scale, bool pow2) {
    constexpr int kWarps = Tile<N>::kWarps;
    const int thread = tile.thread;
    TileThreads::meet();
    if (thread < kTileSide) {
        const int place = scratch.place(thread);
        float max_abs = scratch.max_abs[0][place];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) max_abs = fmaxf(max_abs, scratch.max_abs[w][place]);
        const float own = fp8_scale<F8>(max_abs, pow2);
        if (thread < tile.columns) scale[thread] = own;
        scratch.inverse[place] = __frcp_rn(own);
    }
    TileThreads::meet();
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const Raw<16> part = *reinterpret_cast<const Raw<16>*>(&scratch.inverse[scratch.place(tile.column + i)]);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[i + k] = __uint_as_float(part.w[k]);
    }
}

// Puts the codes of the thread's columns into shared memory.
template <typename F8, int N, typename Value>
RTK_DEVICE void stage_columns(const Tile<N>& tile, TileScratch<N>& scratch, const float (&inverse)[N],
                              const Value& value) {
    u8* place = scratch.unit(tile.column, tile.row);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float v[kTileRows];
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) v[r] = value(r, i);
        *reinterpret_cast<Raw<8>*>(place + i * kTileSide) = quantized<F8>(v, inverse[i]);
    }
}

// Transposes words of four rows' codes of four columns into words of four columns' codes of those rows.
RTK_DEVICE void transpose_bytes(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const u32 high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410);
    b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(high_ab, high_cd, 0x5410);
    d = __byte_perm(high_ab, high_cd, 0x7632);
}

// The same from existing codes, packed by rows: for scales that rows and columns share.
template <int N>
RTK_DEVICE void stage_columns(const Tile<N>& tile, TileScratch<N>& scratch, Raw<N> (&codes)[kTileRows]) {
    u8* place = scratch.unit(tile.column, tile.row);
#pragma unroll
    for (int w = 0; w < N / 4; ++w) {
#pragma unroll
        for (int r = 0; r < kTileRows; r += 4)
            transpose_bytes(codes[r].w[w], codes[r + 1].w[w], codes[r + 2].w[w], codes[r + 3].w[w]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<Raw<8>*>(place + (4 * w + i) * kTileSide) = {codes[i].w[w], codes[4 + i].w[w]};
    }
}

// Writes the staged columns, each `pitch` bytes after the previous one; `q`: the code of the tile's first element. Call
// after a barrier; the next barrier frees the codes.
template <bool STREAM = false, typename F8, int N>
RTK_DEVICE void store_columns(const Tile<N>& tile, TileScratch<N>& scratch, F8* q, i64 pitch) {
    const int thread = tile.thread;
    const u64 mixed = reinterpret_cast<u64>(q) | static_cast<u64>(pitch) | static_cast<u64>(tile.rows);
    if ((mixed & 15) == 0) {
        constexpr int kVectors = kTileSide / 16, kStep = Tile<N>::kThreads / kVectors;
        const int vector = thread % kVectors, first = thread / kVectors;
        Raw<16> codes[kTileSide / kStep];
#pragma unroll
        for (int step = 0; step < kTileSide; step += kStep) {
            // A vector is two units, which the xor swaps if its last bit is set.
            const int column = first + step, swizzle = column / N % 16;
            const Raw<16> raw =
                *reinterpret_cast<const Raw<16>*>(scratch.codes + column * kTileSide + ((vector ^ (swizzle / 2)) * 16));
            const bool swap = swizzle % 2 != 0;
            codes[step / kStep] = {swap ? raw.w[2] : raw.w[0], swap ? raw.w[3] : raw.w[1],
                                   swap ? raw.w[0] : raw.w[2], swap ? raw.w[1] : raw.w[3]};
        }
        F8* p = q + first * pitch + vector * 16;
#pragma unroll
        for (int step = 0; step < kTileSide; step += kStep, p += kStep * pitch)
            if (first + step < tile.columns && vector * 16 < tile.rows) store_codes<STREAM>(p, codes[step / kStep]);
        return;
    }
    // A column may begin at any byte. Lanes write its aligned words, each funnel-shifted from two words of codes, and
    // the bytes at the ends.
    auto word = [&](int column, int w) {
        if (w < 0 || w >= kTileSide / 4) return 0u;
        return *reinterpret_cast<const u32*>(scratch.unit(column, w * 4) + w % 2 * 4);
    };
    for (int column = thread / kWarp; column < tile.columns; column += Tile<N>::kWarps) {
        F8* p = q + column * pitch;
        const int misaligned = static_cast<int>(reinterpret_cast<u64>(p) & 3);
        for (int w = thread % kWarp; w * 4 - misaligned < tile.rows; w += kWarp) {
            const Raw<4> codes = {__funnelshift_l(word(column, w - 1), word(column, w), misaligned * 8)};
            const int first = w * 4 - misaligned;
            if (first >= 0 && first + 4 <= tile.rows) {
                ptx::st<4>(p + first, codes);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (first + b >= 0 && first + b < tile.rows)
                        ptx::st<1>(p + first + b, Raw<1>{(codes.w[0] >> (8 * b)) & 0xffu});
            }
        }
    }
}

}  // namespace rtk
