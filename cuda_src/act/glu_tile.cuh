// How kernels that quantise a gated linear unit walk their tiles of 128 x 128 results and read them: tiles never cross
// experts, and a persistent block copies its next tile into shared memory while it works on the current one.
#pragma once
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/forget.cuh"
#include "quant/experts.cuh"
#include "quant/tile.cuh"

namespace rtk {

// A tile: up to 128 rows of one expert (without experts, all rows belong to one) by up to 128 columns.
struct alignas(16) TilePlace {
    u32 row, rows;     // the first one, and how many
    u32 start, count;  // the expert's first row, and its rows
    u32 down, column;  // number of the row block, and the first column
};

// All tiles, numbered along the columns first. Without counts there is one expert.
struct TilePlaces {
    ExpertTable table;
    u32 rows, across;
    bool by_expert;

    // `memory`: (2 * experts + 2) words of shared memory. Fewer than 2^31 rows. The whole block calls.
    RTK_DEVICE TilePlaces(u8* memory, const void* counts, i64 width, i64 experts, i64 all_rows, i64 cols)
        : table(reinterpret_cast<u32*>(memory), counts, width, experts, all_rows),
          rows(static_cast<u32>(all_rows)),
          across(static_cast<u32>((cols + (kTileSide - 1)) / kTileSide)),
          by_expert(counts != nullptr) {}

    RTK_DEVICE u32 row_blocks() const { return by_expert ? table.blocks() : (rows + (kTileSide - 1)) / kTileSide; }
    RTK_DEVICE u32 count() const { return row_blocks() * across; }

    // The whole warp calls; `index` must be less than count().
    RTK_DEVICE TilePlace find(u32 index) const {
        const u32 down = index / across;
        ExpertRows expert = {0, rows, down * kTileSide};
        if (by_expert) expert = table.find(down);
        const u32 left = expert.rows - expert.above;
        return {expert.first_row + expert.above, min(left, static_cast<u32>(kTileSide)), expert.first_row, expert.rows,
                down, (index - down * across) * kTileSide};
    }
};

// The same number, but the compiler does not know it: in a loop over tiles, it would work out everything that follows
// from a stride or the thread's place ahead, and keep it in registers.
RTK_DEVICE int unknown(int v) {
    Raw<4> raw = {static_cast<u32>(v)};
    ptx::forget(raw);
    return static_cast<int>(raw.w[0]);
}

RTK_DEVICE i64 unknown(i64 v) {
    Raw<8> raw = {static_cast<u32>(v), static_cast<u32>(static_cast<u64>(v) >> 32)};
    ptx::forget(raw);
    return static_cast<i64>(static_cast<u64>(raw.w[1]) << 32 | raw.w[0]);
}

// Where a warp keeps the places of its current and its next tile: reading them again is cheaper than the registers.
struct KeptPlaces {
    TilePlace* slot;  // two, in shared memory

    RTK_DEVICE void keep(int turn, const TilePlace& place) const {
        if (threadIdx.x % kWarp == 0) slot[turn] = place;
        __syncwarp();
    }
    RTK_DEVICE TilePlace operator[](int turn) const { return slot[unknown(turn)]; }
};

// Makes the compiler compute these numbers here: it would put it off until they are used, with all that they follow from
// in registers.
template <int N>
RTK_DEVICE void settle(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        Raw<4> raw = {__float_as_uint(v[i])};
        ptx::forget(raw);
        v[i] = __uint_as_float(raw.w[0]);
    }
}

// Tiles of INPUTS matrices on their way through shared memory. A warp copies the rows that its own threads read, so the
// block needs no barrier. With fewer than INPUTS slots of shared memory, the first inputs are copied ahead and the
// others when it is their turn, into the first slot.
template <typename T, int N, int INPUTS>
struct StagedTiles {
    static constexpr int kPer = 16 / sizeof(T), kAcross = kTileSide / kPer, kRowBytes = kTileSide * sizeof(T);
    static constexpr int kBytes = kTileSide * kRowBytes;  // of a slot
    static constexpr int kWarpRows = kTileSide / Tile<N>::kWarps;

    const T* x[INPUTS];   // in the order they are read
    i64 stride[INPUTS];
    u8* memory;           // 16-byte aligned
    int slots;

    // Begins the copies of a tile. Not before everything of the one before has been read.
    RTK_DEVICE void fetch(const Tile<N>& tile, const TilePlace& place) const {
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            if (k < slots) copy(tile, k, place);
        ptx::cp_async_commit();
    }

    // Waits for an input, after all those before it.
    RTK_DEVICE void wait(const Tile<N>& tile, int k, const TilePlace& place) const {
        if (k >= slots) {
            __syncwarp();
            copy(tile, k, place);
            ptx::cp_async_commit();
        }
        if (k == 0 || k >= slots) {
            ptx::cp_async_wait<0>();
            __syncwarp();
        }
    }

    // The thread's elements of its row r; 0 for those that do not exist.
    RTK_DEVICE Raw<sizeof(T) * N> read(const Tile<N>& tile, int k, int r) const {
        const u8* from = memory + slot(k) + tile.row * kRowBytes + tile.column * static_cast<int>(sizeof(T));
        return reinterpret_cast<const Aligned<sizeof(T) * N>*>(from + r * kRowBytes)->raw;
    }
    RTK_DEVICE void read(const Tile<N>& tile, int k, int r, float (&v)[N]) const { unpack<T, N>(read(tile, k, r), v); }

    // All of the thread's elements of an input, waiting for it.
    RTK_DEVICE void read_all(const Tile<N>& tile, int k, const TilePlace& place,
                             Raw<sizeof(T) * N> (&raw)[kTileRows]) const {
        wait(tile, k, place);
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) raw[r] = read(tile, k, r);
    }

   private:
    template <int B>
    struct alignas(B) Aligned {
        Raw<B> raw;
    };

    RTK_DEVICE int slot(int k) const { return k < slots ? k * kBytes : 0; }

    RTK_DEVICE void copy(const Tile<N>& tile, int k, const TilePlace& place) const {
        constexpr int kStep = kWarp / kAcross;
        const int lane = tile.thread % kWarp, piece = lane % kAcross;
        const int first = tile.thread / kWarp * kWarpRows + lane / kAcross;
        const int rows = piece * kPer < tile.columns ? tile.rows - first : 0;
        const i64 step = unknown(stride[k]);
        const T* from = x[k] + (static_cast<i64>(place.row) + first) * step + place.column + piece * kPer;
        u8* to = memory + slot(k) + first * kRowBytes + piece * 16;
        const ptx::SharedAddress address = ptx::shared_address(to);
#pragma unroll
        for (int r = 0; r < kWarpRows; r += kStep, from += kStep * step) {
            if (r < rows) {
                ptx::cp_async_16(address + r * kRowBytes, from);
            } else {
                clear(reinterpret_cast<Aligned<16>*>(to + r * kRowBytes)->raw);
            }
        }
    }
};

// The weights of a warp's rows, one per lane (0 for rows that do not exist); T, or fp32 if `wide`; 1 without weights.
template <typename T, int N>
RTK_DEVICE float lane_weight(const Tile<N>& tile, const void* weight, i64 wide, i64 first_row) {
    constexpr int kRows = kTileSide / Tile<N>::kWarps;
    const int thread = tile.thread, row = thread / kWarp * kRows + thread % kWarp;
    float w[1] = {1.0f};
    if (weight != nullptr) {
        w[0] = 0.0f;
        if (thread % kWarp < kRows && row < tile.rows) {
            if (wide) {
                load_keep<float, 1>(static_cast<const float*>(weight) + first_row + row, w);
            } else {
                load_keep<T, 1>(static_cast<const T*>(weight) + first_row + row, w);
            }
        }
    }
    return w[0];
}

// That of the thread's row r.
template <int N>
RTK_DEVICE float row_weight(const Tile<N>& tile, float lane_weight, int r) {
    return __shfl_sync(0xffffffffu, lane_weight, tile.row % (kTileSide / Tile<N>::kWarps) + r);
}

// Where the codes of a matrix [rows, cols] go; either half may be missing. Within an expert, scales of rows lie by
// rows, or by groups if `by_group`; transposed codes and their scales lie as for a matrix of the expert's rows alone.
struct Quantized {
    e4m3* q;
    float* scale;
    e4m3* q_t;
    float* scale_t;
    i64 cols, pitch;  // pitch: from one row of q to the next
    i64 part;         // columns of the matrix whose tiles these are; 2 * part == cols: two such matrices side by side
    bool by_group, pow2;
};

// The largest finite magnitudes of a tile's elements: each lane has that of its row lane % 8, and those of its columns
// among its own rows. All elements are needed for them: what computes the elements cannot be put off until later, with
// all that it needs in registers, as the compiler likes to do.
template <int N>
struct TileMaxima {
    float row, columns[N];

    RTK_DEVICE TileMaxima(const Tile<N>& tile, const float (&v)[kTileRows][N]) {
        float rows[kTileRows], most = 0.0f;
        find(v, rows, [](float a, float b) { return fmaxf(a, fabsf(b)); });
#pragma unroll
        for (int i = 0; i < N; ++i) most = fmaxf(most, columns[i]);
        if (most > kLargest) find(v, rows, [](float a, float b) { return max_finite(a, b); });
        row = scattered_max<kTileRows, Tile<N>::kLanes>(rows, tile.thread);
    }

   private:
    static constexpr float kLargest = 3.40282347e38f;

    template <typename Larger>
    RTK_DEVICE void find(const float (&v)[kTileRows][N], float (&rows)[kTileRows], const Larger& larger) {
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            rows[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                rows[r] = larger(rows[r], v[r][i]);
                columns[i] = larger(columns[i], v[r][i]);
            }
        }
    }
};

// Quantises v, the thread's elements of the tile at `place`, or of the one `part` columns to the right of it. Every
// thread of the block calls; three barriers if there are transposed codes, after which the scratch may be used again.
template <int N>
RTK_DEVICE void quantize_values(const Tile<N>& tile, const TilePlace& place, bool right,
                                const float (&v)[kTileRows][N], TileMaxima<N>& most, const Quantized& out,
                                TileScratch<N>& scratch) {
    auto value = [&](int r, int i) { return v[r][i]; };
    const i64 cols = unknown(out.cols), column = place.column + (right ? out.part : 0);
    if (out.q_t != nullptr) share_columns(tile, most.columns, scratch);
    if (out.q != nullptr) {
        const i64 groups = (cols + (kTileSide - 1)) / kTileSide, group = column / kTileSide;
        const int row = tile.thread % kTileRows;
        const float scale = fp8_scale<e4m3>(most.row, out.pow2);
        if (tile.thread % Tile<N>::kLanes < kTileRows && row < tile.rows_here) {
            const i64 m = place.row + tile.row + row;
            out.scale[out.by_group ? place.start * (groups - 1) + group * place.count + m : m * groups + group] = scale;
        }
        const i64 pitch = unknown(out.pitch);
        store_rows<true>(tile, out.q + place.row * pitch + column, pitch, __frcp_rn(scale), value);
    }
    if (out.q_t != nullptr) {
        Tile<N> counted = tile;
        counted.columns = static_cast<int>(min(out.part - place.column, static_cast<i64>(kTileSide)));
        column_scales<e4m3>(counted, most.columns, scratch, out.scale_t + place.down * cols + column, out.pow2);
        stage_columns<e4m3>(tile, scratch, most.columns, value);
        __syncthreads();
        const i64 first = place.start * cols + column * place.count + (place.row - place.start);
        store_columns(counted, scratch, out.q_t + first, place.count);
    }
}

// There is room for the most row blocks that the rows can make; the scales of those that there are not are 0.
RTK_DEVICE void clear_scales(const TilePlaces& places, i64 row_blocks, i64 cols, float* scale_t) {
    if (scale_t == nullptr) return;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = places.row_blocks() * cols + blockIdx.x * blockDim.x + threadIdx.x; i < row_blocks * cols; i += step)
        scale_t[i] = 0.0f;
}

}  // namespace rtk
