// Reductions with contiguous kept columns: a thread owns N neighbouring columns (up to 16 bytes) and goes down its
// share of the reduced dimension; `across` threads of a block share a row, so that reads are whole cache lines. The
// threads of a column combine in shared memory, in a fixed order; parts of long columns go to `partial`
// ([tiles][slices][columns]), and the last block of a tile (`tickets`) combines them.
//
// Grid: tiles of columns * slices * other kept dimensions; block: a power of two of threads up to kColumnThreads.
// Shared memory: a state for each column of each thread.
#include "ptx/forget.cuh"
#include "reduce/reduce.cuh"

namespace rtk {

// Threads per SM, all of which may belong to one block (rtkernels/ops/reduce/reduction.py). With 768 of them the 512
// tiles of a matrix of 65536 columns took two waves, and a sixth longer.
template <typename M>
inline constexpr int kColumnThreads =
    is_same<typename M::Value, float>::value && sizeof(typename M::State) == 4 ? 1024 : 512;

// Loads in flight per thread.
template <typename M>
inline constexpr int kLoadsDown = kColumnThreads<M> == 1024 ? 4 : 8;

// Combines the states of N columns from all threads that hold them: afterwards thread t, and t + blockDim.x and so on,
// has column t % across * N + t / across of the tile as `given(state, that column)`. Lanes of a warp that share columns
// exchange first, then one thread adds the warps' results in order: few barriers, because a reduction of moderate size
// waits mostly for those.
template <typename M, int N, typename Given>
RTK_DEVICE void combine_down(typename M::State (&s)[N], u8* memory, int across, const Given& given) {
    typename M::State* parts = reinterpret_cast<typename M::State*>(memory);  // [N][rows][across]
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        if (lanes < across) break;
#pragma unroll
        for (int j = 0; j < N; ++j) s[j] = M::combine(s[j], M::exchanged(s[j], lanes));
    }
    const int rows = across < kWarp ? threads / kWarp : threads / across, pitch = rows * across;
    if (thread % kWarp < across) {
        const int place = across < kWarp ? thread / kWarp * across + thread % kWarp : thread;
#pragma unroll
        for (int j = 0; j < N; ++j) parts[j * pitch + place] = s[j];
    }
    __syncthreads();
    for (int t = thread; t < across * N; t += threads) {
        const int j = t / across, a = t - j * across;
        const typename M::State* column = parts + j * pitch + a;
        typename M::State total = column[0];
#pragma unroll 8
        for (int row = 1; row < rows; ++row) total = M::combine(total, column[row * across]);
        given(total, a * N + j);
    }
}

// A thread's rows: `at`, at + step and so on of `count` from number `begin` on.
struct WalkDown {
    i64 begin;
    int at, count, step;
};

// Absorbs N columns from x on, kLoads rows at a time, as long as there are so many; their loads are in flight together,
// and the elements of a column enter together: one comparison or division for all.
template <typename T, typename M, int N, int kLoads>
RTK_DEVICE void absorb_rows(typename M::State (&s)[N], const T* x, WalkDown& walk, const Reduced& reduced, const Lift& lift) {
    // Columns are unpacked word by word: all of them at once would take more registers than their states.
    constexpr int kBytes = sizeof(T) * N, kPart = sizeof(T) > 4 ? sizeof(T) : kBytes < 4 ? kBytes : 4;
    constexpr int kParts = kBytes / kPart, kEach = N / kParts, kWords = (kPart + 3) / 4;
    const int step = walk.step;
    const i64 stride = step * reduced.stride0;
    const T* p = x + (walk.begin + walk.at) * reduced.stride0;
    for (; walk.at + (kLoads - 1) * step < walk.count; walk.at += step * kLoads, p += kLoads * stride) {
        const i64 first = walk.begin + walk.at;
        Raw<kBytes> raw[kLoads];
        if (reduced.divider0 == 0) {
#pragma unroll
            for (int k = 0; k < kLoads; ++k) raw[k] = load_reduced<kBytes>(p + k * stride);
        } else {
#pragma unroll
            for (int k = 0; k < kLoads; ++k) raw[k] = load_reduced<kBytes>(x + reduced.offset(first + k * step));
        }
        const auto absorb_all = [&](const Lift& how) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                ValueOf<T> v[kLoads][kEach];
#pragma unroll
                for (int k = 0; k < kLoads; ++k) {
                    Raw<kPart> words;
#pragma unroll
                    for (int w = 0; w < kWords; ++w) words.w[w] = raw[k].w[part * kWords + w];
                    values<T, kEach>(words, v[k]);
                }
#pragma unroll
                for (int j = 0; j < kEach; ++j) {
                    ValueOf<T> of_column[kLoads];
#pragma unroll
                    for (int k = 0; k < kLoads; ++k) of_column[k] = v[k][j];
                    M::absorb(s[part * kEach + j], of_column, first, step, how);
                }
            }
        };
        if (kColumnThreads<M> == 1024 && lift.kind == 0) absorb_all(Lift{0, 0.0f});  // one branch for all columns
        else absorb_all(lift);
    }
}

template <typename T, typename M, int N>
RTK_DEVICE void absorb_columns(typename M::State (&s)[N], const T* x, WalkDown walk, const Reduced& reduced, const Lift& lift) {
    if constexpr (kLoadsDown<M> == 8) absorb_rows<T, M, N, 8>(s, x, walk, reduced, lift);
    absorb_rows<T, M, N, 4>(s, x, walk, reduced, lift);
    absorb_rows<T, M, N, 1>(s, x, walk, reduced, lift);
}

// A block's work, and the column of this thread. Computed again after the elements, from a number of threads hidden
// from the compiler: kept in registers meanwhile, it would leave fewer for loads.
struct ColumnPart {
    i64 column, i1, i2;
    int row, slice;
    u32 ticket;

    RTK_DEVICE ColumnPart(u32 across, int width, i64 columns, i64 slices, i64 size1) {
        const u32 tiles = static_cast<u32>(ceil_div(columns, across * width));
        const u32 rest = blockIdx.x / tiles, tile = blockIdx.x - rest * tiles;
        const u32 outer = rest / static_cast<u32>(slices);
        row = static_cast<int>(threadIdx.x / across), slice = static_cast<int>(rest - outer * static_cast<u32>(slices));
        column = (static_cast<i64>(tile) * across + threadIdx.x % across) * width;
        i2 = outer / static_cast<u32>(size1), i1 = outer - static_cast<u32>(i2) * static_cast<u32>(size1);
        ticket = outer * tiles + tile;
    }
};

template <typename T, typename M, int N>
RTK_DEVICE void reduce_tile(const T* x, u8* memory, void* partial, u32* tickets, const Finish& finish, const Kept& kept,
                            const Reduced& reduced, i64 count, u32 across, i64 slices, i64 per_slice,
                            const Lift& lift) {
    using State = typename M::State;
    State s[N];
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] = M::identity();
    if (const ColumnPart part(across, N, kept.size0, slices, kept.size1); part.column < kept.size0) {
        const i64 begin = part.slice * per_slice;
        const int here = static_cast<int>(min(per_slice, count - begin)), down = static_cast<int>(blockDim.x / across);
        absorb_columns<T, M, N>(s, x + part.i2 * kept.x2 + part.i1 * kept.x1 + part.column,
                                WalkDown{begin, part.row, here, down}, reduced, lift);
    }
    ptx::forget(across);
    const ColumnPart part(across, N, kept.size0, slices, kept.size1);
    const i64 first = part.column - threadIdx.x % across * N, to = part.i2 * kept.out2 + part.i1 * kept.out1;
    if (slices == 1) {
        combine_down<M, N>(s, memory, static_cast<int>(across), [&](const State& total, int column) {
            if (first + column < kept.size0) M::finish(total, finish, to + (first + column) * kept.out0);
        });
        return;
    }
    // States of this tile: [slices][columns].
    const int columns = static_cast<int>(across) * N;
    State* parts = static_cast<State*>(partial) + part.ticket * slices * columns;
    combine_down<M, N>(s, memory, static_cast<int>(across),
                       [&](const State& total, int column) { parts[part.slice * columns + column] = total; });
    if (!is_last_block(tickets + part.ticket, slices)) return;
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += static_cast<int>(blockDim.x)) {
        State total = parts[column];
#pragma unroll 8
        for (i64 i = 1; i < slices; ++i) total = M::combine(total, parts[i * columns + column]);
        if (first + column < kept.size0) M::finish(total, finish, to + (first + column) * kept.out0);
    }
}

template <typename T, typename M>
__global__ void __launch_bounds__(kColumnThreads<M>, 1)
    reduce_columns(const T* x, void* out, void* second, void* partial, u32* tickets, i64 results, i64 size1, i64 size0, i64 x2, i64 x1,
                   i64 x0, i64 out2, i64 out1, i64 out0, i64 count, i64 reduced1, i64 reduced0, i64 divider1,
                   i64 divider0, i64 stride2, i64 stride1, i64 stride0, i64 slices, i64 per_slice, i64 across,
                   i64 aligned, i64 lift, double power, i64 finish, double number, i64 type) {
    constexpr int kWidth = sizeof(T) == 8 ? 2 : sizeof(T) == 2 && is_same<typename M::Value, float>::value ? 8 : 4;
    extern __shared__ __align__(16) u8 memory[];
    const Kept kept{size1, size0, x2, x1, x0, out2, out1, out0};
    const Reduced reduced{reduced1, reduced0, divider1, divider0, stride2, stride1, stride0};
    const Lift how{static_cast<int>(lift), static_cast<float>(power)};
    const Finish last{static_cast<int>(finish), static_cast<int>(type), number, how.kind, out, second};
    if (aligned) {
        reduce_tile<T, M, kWidth>(x, memory, partial, tickets, last, kept, reduced, count, static_cast<u32>(across),
                                  slices, per_slice, how);
    } else {
        reduce_tile<T, M, 1>(x, memory, partial, tickets, last, kept, reduced, count, static_cast<u32>(across), slices,
                             per_slice, how);
    }
}

}  // namespace rtk
