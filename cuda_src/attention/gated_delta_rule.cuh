// Gated delta rule: with a = exp(g) for each token and value head,
//     S' = a S,  u = beta (v - S'^T k),  S = S' + k u^T,  o = scale S^T q,
// in chunks of 64 tokens. With c = cumulative sums of g within a chunk, G_ij = exp(c_i - c_j) for i >= j (else 0), E =
// diag(exp c), F = diag(exp(c_end - c)) and the state S before the chunk:
//     T = (I + M)^-1,  M = strictly lower part of beta_i (k_i . k_j) G_ij,  P = scale (q_i . k_j) G_ij
//     R = beta (V - E K S),  U = T R,  O = scale E Q S + P U,  S_end = exp(c_end) S + (F K)^T U
// All exponents are differences <= 0. The state and sums are fp32; T, P, R, U and the state as an operand are rounded to
// the type of the inputs. Keys and queries that are to be normalised (r x, r = 1 / sqrt(sum x^2 + 1e-6)) stay as they
// are in products; r multiplies sums.
//
// Without the correction by the state (SSD of Mamba-2, `solve` null, kUncorrected): T = I, M = 0 and R = U = beta V.
//
// With a decay for each channel of keys (KDA), c_i is a vector, and so is what multiplies rows of a state:
//     M_ij = beta_i sum_d k_id k_jd exp(c_id - c_jd),  P_ij likewise,  E K, E Q and F K element by element.
// Scans get E K, E Q and F K as tensors, and of `rows` betas and c_end of the channels (kWholes).
//
// Chunks are numbered without a look at lengths: chunk i of sequence b of packed tokens is number cu[b] / 64 + b + i. An
// unused number has no rows. Value head h reads key head h / (heads / key heads).
#pragma once
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

inline constexpr int kDelta = 64;  // tokens of a chunk
inline constexpr float kMinDecay = -104.0f;  // exp of it is 0 in fp32

inline constexpr i64 kNormalised = 1, kUncorrected = 2;  // flags of gradients

// Numbers of the rows of a chunk and value head: [kRowKinds][64].
enum RowKind { kDecays, kBetas, kKeyNorms, kQueryNorms, kRowKinds };  // decays: c in log2
inline constexpr int kWholes = kKeyNorms;  // of channels: 128 numbers from here on, c_end in log2

// Rows of one sequence.
struct DeltaRows {
    i64 first;  // row of a packed tensor, else 0
    i64 chunk;  // number of its first chunk
    int rows, batch;
};

RTK_DEVICE DeltaRows delta_rows(int batch, i64 length, const i32* cu) {
    const Sequence s = sequence_at(batch, length, 0, cu, nullptr, nullptr);
    const i64 chunk = cu != nullptr ? s.q_row / kDelta + batch : batch * ((length + kDelta - 1) / kDelta);
    return {s.q_row, chunk, s.lq, batch};
}

// One chunk: its sequence (of packed tokens: 0), first row there, and number of rows.
struct DeltaChunk {
    i64 first;
    int batch, rows;
};

RTK_DEVICE DeltaChunk delta_chunk(i64 number, i64 length, const i32* cu, int sequences) {
    if (cu == nullptr) {
        const i64 each = (length + kDelta - 1) / kDelta, batch = number / each, first = (number - batch * each) * kDelta;
        return {first, static_cast<int>(batch), static_cast<int>(min(length - first, static_cast<i64>(kDelta)))};
    }
    int low = 0, high = sequences;  // the first sequence whose chunks come later
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle] / kDelta + middle <= number) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return {0, 0, 0};
    const DeltaRows own = delta_rows(low - 1, length, cu);
    const i64 skipped = (number - own.chunk) * kDelta;
    return {own.first + skipped, 0, static_cast<int>(max(min(own.rows - skipped, static_cast<i64>(kDelta)), i64{0}))};
}

// exp2 of a difference of cumulative log2 decays.
RTK_DEVICE float decay_between(float later, float earlier) { return ptx::ex2(later - earlier); }

// Two neighbours of a 16-bit tile, column 8n + 2 (lane % 4).
template <typename T, typename Tile>
RTK_DEVICE void read_pair(const u8* tile, int row, int n, int lane, float (&f)[2]) {
    unpack<T, 2>(Raw<4>{{*reinterpret_cast<const u32*>(tile + Tile::offset(row, n) + lane % 4 * 4)}}, f);
}
template <typename T, typename Tile>
RTK_DEVICE void write_pair(u8* tile, int row, int n, int lane, float lo, float hi) {
    *reinterpret_cast<u32*>(tile + Tile::offset(row, n) + lane % 4 * 4) = packed_pair<T>(lo, hi);
}

// The state of a head in a scan, or its gradient: [d_k][d_v] fp32 in memory, of which a block has the columns of a tile
// from `column0` on and a warp 16 rows in registers. As T in shared memory it is an operand of products.
template <typename T, typename Tile, int DK>
struct ScannedState {
    static constexpr int kTiles = Tile::kVectors;
    float sums[kTiles][4];
    i64 d_k, d_v;
    int row, column0, columns, lane;
    bool keeps;  // this warp has rows

    RTK_DEVICE ScannedState(i64 d_k, i64 d_v, int column0, int columns, int warp, int lane)
        : d_k(d_k), d_v(d_v), row(16 * warp + lane / 4), column0(column0), columns(columns), lane(lane), keeps(16 * warp < DK) {}

    RTK_DEVICE bool has(int n, int r) const { return keeps && row + 8 * r < d_k && 8 * n + lane % 4 * 2 < columns; }
    RTK_DEVICE i64 at(i64 head, int n, int r) const {
        return (head * d_k + row + 8 * r) * d_v + column0 + 8 * n + lane % 4 * 2;
    }
    // From the state of a sequence's head, or zeros if there is none.
    RTK_DEVICE void load(const float* from, i64 head) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float pair[2] = {0.0f, 0.0f};
                if (from != nullptr && has(n, r)) load_keep<float, 2>(from + at(head, n, r), pair);
                sums[n][2 * r] = pair[0], sums[n][2 * r + 1] = pair[1];
            }
    }
    RTK_DEVICE void store_to(float* to, i64 head) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float pair[2] = {sums[n][2 * r], sums[n][2 * r + 1]};
                if (has(n, r)) store<float, 2>(to + at(head, n, r), pair);
            }
    }
    // By channels, from the numbers of a chunk's rows.
    RTK_DEVICE void decay(const float* numbers) {
        const float* const wholes = numbers + kWholes * kDelta;
        const float by[2] = {ptx::ex2(wholes[row]), ptx::ex2(wholes[row + 8])};
        scale_rows(sums, by);
    }
    RTK_DEVICE void show(u8* tile) const {
        if (!keeps) return;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) write_pair<T, Tile>(tile, row + 8 * r, n, lane, sums[n][2 * r], sums[n][2 * r + 1]);
    }
};

// MmaTile::fetch by 128 threads, of which this is `thread`.
template <typename Tile, int ROWS, typename T>
RTK_DEVICE void fetch_by(int thread, u8* tile, const T* source, i64 row_stride, int rows, int vectors) {
    constexpr int kStep = 128 / Tile::kVectors;
    static_assert(ROWS % kStep == 0, "all threads copy alike");
    const ptx::SharedAddress base = ptx::shared_address(tile);
    const int row = thread / Tile::kVectors, vector = thread % Tile::kVectors, last = vector < vectors ? rows : 0;
    const T* from = source + row * row_stride + vector * 8;
#pragma unroll
    for (int i = 0; i < ROWS / kStep; ++i) {
        ptx::cp_async_16_or_zero(base + Tile::offset(row + i * kStep, vector), from, row + i * kStep < last);
        from += kStep * row_stride;
    }
}

// Stores a tile to dense rows of `width` elements by 128 threads, vector by vector.
template <typename Tile, int ROWS, typename T>
RTK_DEVICE void store_by(int thread, T* to, i64 width, const u8* tile, int rows, int vectors) {
#pragma unroll
    for (int i = thread; i < ROWS * Tile::kVectors; i += 128) {
        const int row = i / Tile::kVectors, vector = i % Tile::kVectors;
        if (row < rows && vector < vectors)
            ptx::st<16>(to + row * width + vector * 8, *reinterpret_cast<const Raw<16>*>(tile + Tile::offset(row, vector)));
    }
}

// rows_by_rows, two steps at a time: fewer registers.
template <typename T, typename Tile, int STEPS, int N>
RTK_DEVICE void rows_by_rows_rolled(float (&d)[N][4], const u8* left, int row, const u8* right, int column, int lane) {
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        Tile::left(a, left, row, step, lane);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 b[4];
            Tile::right(b, right, column + 16 * n, step, lane);
            mma_step<T>(d[2 * n], a, b[0], b[1]);
            mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// d += rows row.. + 15 of one tile by the columns of another, summed over STEPS steps of 16 of its rows.
template <typename T, typename Left, typename Right, int STEPS, int N>
RTK_DEVICE void rows_by_columns(float (&d)[N][4], const u8* left, int row, const u8* right, int lane) {
    constexpr int kUnroll = N > 4 ? 2 : 4;
#pragma unroll kUnroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        Left::left(a, left, row, step, lane);
        by_columns<T, Right>(d, a, right, 16 * step, lane);
    }
}

// The same with columns column.. + 15 of the left tile as rows; steps from..end - 1 of its rows.
template <typename T, typename Left, typename Right, int N>
RTK_DEVICE void columns_by_columns(float (&d)[N][4], const u8* left, int column, const u8* right, int from, int end, int lane) {
#pragma unroll
    for (int step = 0; step < kDelta / 16; ++step) {
        if (step < from || step >= end) continue;
        u32 a[4];
        Left::left_transposed(a, left, 16 * step, column / 16, lane);
        by_columns<T, Right>(d, a, right, 16 * step, lane);
    }
}

// d += a by columns 8 first.. of rows row.. + 15 of a tile, summed over these rows.
template <typename T, typename Tile, int N>
RTK_DEVICE void by_some_columns(float (&d)[N][4], const u32 (&a)[4], const u8* tile, int row, int first, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        Tile::right_transposed(b, tile, row, first / 2 + n, lane);
        mma_step<T>(d[2 * n], a, b[0], b[1]);
        mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
    }
}

}  // namespace rtk
