// Class T of the pointwise kernels (kernels.cuh): operands that are contiguous in dimension 1, not in 0 like the
// output, go through tiles in shared memory, so that all accesses are coalesced. Dimensions 2 to 5 are batches.
// pointwise_squares is for one such operand and 16-byte accesses, pointwise_transposed for anything else.
#pragma once
#include "layout/transpose_tile.cuh"
#include "pointwise/kernels.cuh"

namespace rtk {

// A block's tile: offsets of its corner in all operands, and how much of it exists in dimensions 0 and 1. Tiles are
// numbered along dimension 0 first, so that neighbours write adjacent memory.
struct TileCorner {
    Offsets at;
    i64 width, height;

    template <int kInputs>
    RTK_DEVICE static TileCorner of_block(const Strides<true>& strides, i64 dims, i64 tiles_x, i64 tiles_y, int across,
                                          int down) {
        const u32 per_batch = static_cast<u32>(tiles_x) * static_cast<u32>(tiles_y);
        const u32 batch = dims > 2 ? blockIdx.x / per_batch : 0, in_batch = blockIdx.x - batch * per_batch;
        const u32 y = in_batch / static_cast<u32>(tiles_x), x = in_batch - y * static_cast<u32>(tiles_x);
        const i64 x0 = static_cast<i64>(x) * across, y0 = static_cast<i64>(y) * down;
        TileCorner corner{strides.template at<2, kInputs>(batch, static_cast<int>(dims)), strides.n[0] - x0, strides.n[1] - y0};
        corner.at.out += x0 * strides.o[0] + y0 * strides.o[1];
        corner.at.a += x0 * strides.a[0] + y0 * strides.a[1];
        corner.at.b += x0 * strides.b[0] + y0 * strides.b[1];
        corner.at.d += x0 * strides.d[0] + y0 * strides.d[1];
        return corner;
    }
};

// The type of the operand that a kernel transposes.
template <typename A, typename B, typename D, int TILED>
struct TiledOperand {
    using Type = A;
};
template <typename A, typename B, typename D>
struct TiledOperand<A, B, D, 1> {
    using Type = B;
};
template <typename A, typename B, typename D>
struct TiledOperand<A, B, D, 2> {
    using Type = D;
};

// Blocks per SM: the loads of a thread, its square and as many bytes of every other operand, are in registers.
template <typename X, int kInputs>
inline constexpr int kSquareBlocks = 
    sizeof(X) == 2 ? (kInputs == 3 ? 2 : 3) : (kInputs == 3 ? 3 : 4);

struct Copy;

template <typename O, typename A, typename B, typename D>
struct SquaresArguments : StridedOperands<O, A, B, D, true> {
    i64 dims, steps, tiles_x, tiles_y;
};

// Operand TILED (0: a, 1: b, 2: d), of 2 or 4 bytes, is contiguous in dimension 1, the others and the output in
// dimension 0, or constant there (`steps` has a bit for each that is not). A block owns a tile of 128 x 128 or 64 x 64
// elements. A thread transposes a square of 16 x 16 bytes (layout/transpose_tile.cuh), then computes as many vectors,
// one of every 16th line of the tile; loads of the square and of four vectors of each other operand are in flight
// before it uses the first one. Sizes of dimensions 0 and 1, strides and addresses allow vectors of 16 bytes of TILED,
// and as many elements of the others. Threads: 256.
template <typename F, typename T, typename O, typename A, typename B, typename D, int TILED>
__global__ void __launch_bounds__(kPointwiseThreads, kSquareBlocks<typename TiledOperand<A, B, D, TILED>::Type, F::kInputs>)
    pointwise_squares(const __grid_constant__ SquaresArguments<O, A, B, D> args) {
    constexpr int S = sizeof(typename TiledOperand<A, B, D, TILED>::Type), kInputs = F::kInputs;
    using Shape = Squares<S>;
    constexpr int N = Shape::N;
    static_assert(Shape::kThreads == kPointwiseThreads && Shape::kAcross == Shape::kDown, "square tiles of 256 threads");
    __shared__ __align__(16) u8 memory[Shape::kBytes];
    const Scalars<T> s(args.s0, args.s1, args.s2, args.s3);
    const Strides<true>& strides = args.strides;
    const A* a = args.a;
    const B* b = args.b;
    const D* d = args.d;
    const TileCorner corner = TileCorner::of_block<kInputs>(strides, args.dims, args.tiles_x, args.tiles_y, Shape::kRows,
                                                            Shape::kCols);
    const int width = static_cast<int>(min(corner.width, static_cast<i64>(Shape::kRows)));
    const int height = static_cast<int>(min(corner.height, static_cast<i64>(Shape::kCols)));
    const int low = static_cast<int>(threadIdx.x) % Shape::kAcross, high = static_cast<int>(threadIdx.x) / Shape::kAcross;
    Raw<16> square[N];
    const int rows = low * N < height ? width - high * N : 0;
    if constexpr (TILED == 0) load_square<S>(square, a + corner.at.a + high * N * strides.a[0] + low * N,
                                             strides.a[0], rows);
    if constexpr (TILED == 1) load_square<S>(square, b + corner.at.b + high * N * strides.b[0] + low * N,
                                             strides.b[0], rows);
    if constexpr (TILED == 2) load_square<S>(square, d + corner.at.d + high * N * strides.d[0] + low * N,
                                             strides.d[0], rows);
    // The tiled operand is not loaded again: a null pointer makes it a number, which the tile's values replace.
    const A* pa = TILED == 0 || a == nullptr ? nullptr : a + corner.at.a + low * N * strides.a[0] + high * strides.a[1];
    const B* pb = TILED == 1 || b == nullptr ? nullptr : b + corner.at.b + low * N * strides.b[0] + high * strides.b[1];
    const D* pd = TILED == 2 || d == nullptr ? nullptr : d + corner.at.d + low * N * strides.d[0] + high * strides.d[1];
    Operands<F, T, A, B, D, N> in[N];
    constexpr int kInFlight = 4;  // lines; eight of 2-byte types would take the registers of a third block
    const int lines = low * N < width ? height - high : 0;
    const auto fetch_line = [&](int k) {
        const int line = k * Shape::kAcross;
        if (line < lines) in[k].fetch(pa, pb, pd, line * strides.a[1], line * strides.b[1], line * strides.d[1],
                                      args.steps);
    };
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) fetch_line(k);
    stage_square<S>(square, low, high, memory);
    __syncthreads();
    O* to = args.out + corner.at.out + low * N + high * strides.o[1];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if (k > 0 && k + kInFlight - 1 < N) fetch_line(k + kInFlight - 1);
        const int line = k * Shape::kAcross;
        if (line < lines) {
            const Raw<16>& unit = staged_unit<S>(memory, high + line, low);
            if constexpr (is_same<F, Copy>::value && is_same<O, A>::value) {
                ptx::st<16>(to, unit);
                to += Shape::kAcross * strides.o[1];
                continue;
            }
            in[k].unpack_fetched(pa, pb, pd, args.na, args.nb, args.nd);
            if constexpr (TILED == 0) in[k].a.raw.part[0] = unit, in[k].a.unpack_fetched();
            if constexpr (TILED == 1) in[k].b.raw.part[0] = unit, in[k].b.unpack_fetched();
            if constexpr (TILED == 2) in[k].d.raw.part[0] = unit, in[k].d.unpack_fetched();
            in[k].store(to, s);
        }
        to += Shape::kAcross * strides.o[1];
    }
}

// An operand's part of a tile.
template <typename A>
struct TileSource {
    const A* first;  // of the element at the tile's corner
    i64 step0, step1;
};

template <typename O, typename A, typename B, typename D>
struct TransposedArguments : StridedOperands<O, A, B, D, true> {
    i64 dims, tiles, tiles_x, tiles_y;
};

// Any number of transposed operands, of any types, sizes and alignment. A block owns a tile of 32 x 64, a thread four
// elements of dimension 0 by two of 1 to load, eight of dimension 1 to compute. `tiles` has a bit for each transposed
// operand, tiles_x and tiles_y count tiles of dimensions 0 and 1. Addresses are the tile's corner plus steps: 64-bit
// products for each element would make the kernel arithmetic-bound. Threads: 32 x 8.
template <typename F, typename T, typename O, typename A, typename B, typename D>
__global__ void __launch_bounds__(kPointwiseThreads, 4)
    pointwise_transposed(const __grid_constant__ TransposedArguments<O, A, B, D> args) {
    constexpr int kAcross = 32, kDown = 64, kRows = kPointwiseThreads / kAcross, kInputs = F::kInputs;
    __shared__ Compute<A> tile_a[kAcross][kDown + 1];
    __shared__ Compute<B> tile_b[kInputs > 1 ? kAcross : 1][kDown + 1];
    __shared__ Compute<D> tile_d[kInputs > 2 ? kAcross : 1][kDown + 1];
    const Scalars<T> s(args.s0, args.s1, args.s2, args.s3);
    const Strides<true>& strides = args.strides;
    const A* a = args.a;
    const B* b = args.b;
    const D* d = args.d;
    const TileCorner corner = TileCorner::of_block<kInputs>(strides, args.dims, args.tiles_x, args.tiles_y, kAcross,
                                                            kDown);
    const int width = static_cast<int>(min(corner.width, static_cast<i64>(kAcross)));
    const int height = static_cast<int>(min(corner.height, static_cast<i64>(kDown)));
    const int column = static_cast<int>(threadIdx.x) % kAcross, row = static_cast<int>(threadIdx.x) / kAcross;
    const auto fill_tile = [&](auto& tile, const auto& source) {
        const auto* p = source.first + row * source.step0 + column * source.step1;
        const i64 next = kRows * source.step0, half = kAcross * source.step1;
#pragma unroll
        for (int k = 0; k < kAcross; k += kRows) {
            if (row + k < width) {
                if (column < height) tile[row + k][column] = load_one(p);
                if (column + kAcross < height) tile[row + k][column + kAcross] = load_one(p + half);
            }
            p += next;
        }
    };
    if constexpr (kInputs > 0) {
        if (args.tiles & 1) fill_tile(tile_a, TileSource<A>{a + corner.at.a, strides.a[0], strides.a[1]});
    }
    if constexpr (kInputs > 1) {
        if (args.tiles & 2) fill_tile(tile_b, TileSource<B>{b + corner.at.b, strides.b[0], strides.b[1]});
    }
    if constexpr (kInputs > 2) {
        if (args.tiles & 4) fill_tile(tile_d, TileSource<D>{d + corner.at.d, strides.d[0], strides.d[1]});
    }
    // Tiled operands are not loaded again: a null pointer makes each a number, which the tile's value replaces.
    const A* pa = args.tiles & 1 || a == nullptr ? nullptr : a + corner.at.a + column * strides.a[0] + row * strides.a[1];
    const B* pb = args.tiles & 2 || b == nullptr ? nullptr : b + corner.at.b + column * strides.b[0] + row * strides.b[1];
    const D* pd = args.tiles & 4 || d == nullptr ? nullptr : d + corner.at.d + column * strides.d[0] + row * strides.d[1];
    constexpr int kEach = kDown / kRows;
    Operands<F, T, A, B, D, 1> in[kEach];
    i64 at_a = 0, at_b = 0, at_d = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        if (column < width && row + k * kRows < height) in[k].fetch(pa, pb, pd, at_a, at_b, at_d, 0);
        at_a += kRows * strides.a[1], at_b += kRows * strides.b[1], at_d += kRows * strides.d[1];
    }
    __syncthreads();
    O* to = args.out + corner.at.out + column * strides.o[0] + row * strides.o[1];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const int y = row + k * kRows;
        if (column < width && y < height) {
            in[k].unpack_fetched(pa, pb, pd, args.na, args.nb, args.nd);
            if constexpr (kInputs > 0) {
                if (args.tiles & 1) in[k].a.set(0, tile_a[column][y]);
            }
            if constexpr (kInputs > 1) {
                if (args.tiles & 2) in[k].b.set(0, tile_b[column][y]);
            }
            if constexpr (kInputs > 2) {
                if (args.tiles & 4) in[k].d.set(0, tile_d[column][y]);
            }
            in[k].store(to, s);
        }
        to += kRows * strides.o[1];
    }
}

}  // namespace rtk
