// Transposes one tile of elements of S bytes through shared memory.
//
// A thread owns a square of N x N elements, N = 16 / S: it reads N rows of 16 bytes, transposes the square in its
// registers, and stores N columns of 16 bytes (units) to shared memory. Unit u of the tile's column c is at place u ^
// (c / N): when writing, neighbouring lanes have equal u and different c / N; when reading, they share a column; both
// touch every bank once.
#pragma once
#include "common/vec.cuh"

namespace rtk {

template <int S>
struct Squares {
    static constexpr int N = 16 / S;
    static constexpr int kAcross = 16;               // of 256 bytes per row of x
    static constexpr int kDown = S == 1 ? 8 : 16;    // of 128 or 256 bytes per row of the result
    static constexpr int kThreads = kAcross * kDown;
    static constexpr int kBlocksPerSm = S == 1 ? 5 : S == 2 ? 3 : 4;
    static constexpr int kRows = kDown * N, kCols = kAcross * N;
    static constexpr int kBytes = kThreads * N * 16;
};

// Any alignment and any size of elements: 64 x 64 of them, moved one at a time.
struct SingleElements {
    static constexpr int kThreads = 256, kBlocksPerSm = 4;
    static constexpr int kRows = 64, kCols = 64;
    static constexpr int kBytes = kRows * (kCols + 1) * 4;
};

// Transposes words of four rows' bytes of four columns into words of four columns' bytes of those rows.
RTK_DEVICE void transpose_bytes(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const u32 high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410);
    b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(high_ab, high_cd, 0x5410);
    d = __byte_perm(high_ab, high_cd, 0x7632);
}

// Transposes a square, in place.
template <int S>
RTK_DEVICE void transpose_square(Raw<16> (&raw)[16 / S]) {
    constexpr int N = 16 / S, kPerWord = 4 / S;
    // Blocks of one word by as many rows as it has elements; afterwards raw[kPerWord * b + i].w[w] belongs to column
    // kPerWord * w + i and rows kPerWord * b ...
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int r = 0; r < N; r += kPerWord) {
            if constexpr (S == 1) {
                transpose_bytes(raw[r].w[w], raw[r + 1].w[w], raw[r + 2].w[w], raw[r + 3].w[w]);
            } else if constexpr (S == 2) {
                const u32 low = __byte_perm(raw[r].w[w], raw[r + 1].w[w], 0x5410);
                raw[r + 1].w[w] = __byte_perm(raw[r].w[w], raw[r + 1].w[w], 0x7632);
                raw[r].w[w] = low;
            }
        }
    }
}

// Reads a thread's square; `rows` rows of it exist, others are zeros. Stride in bytes, or in elements of X.
template <int S, typename X>
RTK_DEVICE void load_square(Raw<16> (&raw)[16 / S], const X* p, i64 stride, int rows) {
#pragma unroll
    for (int r = 0; r < 16 / S; ++r, p += stride) {
        clear(raw[r]);
        if (r < rows) raw[r] = ptx::ld_stream<16>(p);
    }
}

// Stores the columns of a thread's square, number `across` and `down` of its tile, to shared memory.
template <int S>
RTK_DEVICE void stage_square(Raw<16> (&raw)[16 / S], int across, int down, u8* memory) {
    using Shape = Squares<S>;
    constexpr int kPerWord = 4 / S;
    transpose_square<S>(raw);
    u8* unit = memory + (across * Shape::N * Shape::kDown + (down ^ (across % Shape::kDown))) * 16;
#pragma unroll
    for (int i = 0; i < Shape::N; ++i) {
        Raw<16> column;
#pragma unroll
        for (int b = 0; b < 4; ++b) column.w[b] = raw[b * kPerWord + i % kPerWord].w[i / kPerWord];
        *reinterpret_cast<Raw<16>*>(unit + i * Shape::kDown * 16) = column;
    }
}

// Unit u of a column of the tile.
template <int S>
RTK_DEVICE const Raw<16>& staged_unit(const u8* memory, int column, int u) {
    using Shape = Squares<S>;
    return *reinterpret_cast<const Raw<16>*>(memory + (column * Shape::kDown + (u ^ (column / Shape::N % Shape::kDown))) * 16);
}

RTK_DEVICE u32 load_one(const u8* p, int size) {
    return size == 1 ? ptx::ld_stream<1>(p).w[0] : size == 2 ? ptx::ld_stream<2>(p).w[0] : ptx::ld_stream<4>(p).w[0];
}

RTK_DEVICE void store_one(u8* p, u32 bits, int size) {
    if (size == 1) {
        ptx::st<1>(p, Raw<1>{bits});
    } else if (size == 2) {
        ptx::st<2>(p, Raw<2>{bits});
    } else {
        ptx::st<4>(p, Raw<4>{bits});
    }
}

// S: 16 bytes at a time, elements of S bytes; 0: one at a time, elements of `size` bytes. `x` and `y`: the tile's first
// element and its destination. `rows` rows (less than one: none) and `cols` columns of the tile exist; rows from there
// to `rows_out` are zeros of the result. Strides in bytes. The whole block calls this; one barrier inside, and one is
// needed before the next call.
template <int S>
RTK_DEVICE void transpose_tile(const u8* x, i64 x_stride, i64 rows, i64 rows_out, i64 cols, u8* y, i64 y_stride,
                               int size, u8* memory) {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (S != 0) {
        using Shape = Squares<S>;
        constexpr int N = Shape::N, kDown = Shape::kDown;
        const int across = thread % Shape::kAcross, down = thread / Shape::kAcross;
        const int here = across * N < cols ? static_cast<int>(min(rows, static_cast<i64>(Shape::kRows))) - down * N : 0;
        const int rows_here = static_cast<int>(min(rows_out, static_cast<i64>(Shape::kRows)));
        const int cols_here = static_cast<int>(min(cols, static_cast<i64>(Shape::kCols)));
        Raw<16> raw[N];
        load_square<S>(raw, x + down * N * x_stride + across * 16, x_stride, here);
        stage_square<S>(raw, across, down, memory);
        __syncthreads();
        const int u = thread % kDown, first = thread / kDown;
        u8* to = y + first * y_stride + u * 16;
#pragma unroll
        for (int step = 0; step < N; ++step, to += Shape::kAcross * y_stride) {
            const int column = first + step * Shape::kAcross;
            if (column < cols_here && u * N < rows_here) ptx::st<16>(to, staged_unit<S>(memory, column, u));
        }
    } else {
        using Shape = SingleElements;
        constexpr int kPitch = Shape::kCols + 1, kStep = Shape::kThreads / Shape::kCols;
        u32* cells = reinterpret_cast<u32*>(memory);
        const int lane = thread % Shape::kCols, first = thread / Shape::kCols;
#pragma unroll 8
        for (int r = 0; r < Shape::kRows; r += kStep) {
            const int row = r + first;
            cells[row * kPitch + lane] =
                row < rows && lane < cols ? load_one(x + row * x_stride + lane * size, size) : 0u;
        }
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < Shape::kCols; c += kStep) {
            const int column = c + first;
            if (column < cols && lane < rows_out)
                store_one(y + column * y_stride + lane * size, cells[lane * kPitch + column], size);
        }
    }
}

template <int S>
struct TileShape : Squares<S> {};
template <>
struct TileShape<0> : SingleElements {};

}  // namespace rtk
