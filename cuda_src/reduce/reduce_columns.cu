// Reductions whose kept dimension is the one with elements side by side: a thread owns N neighbouring columns (up to 16 bytes) and
// walks down its share of the reduced dimension; `across` threads of a block share a row, so that reads are whole lines.
// The threads of a column combine in shared memory, in a fixed order; parts of long columns go to `partial`
// ([slices][results]), and the last block of a tile (`tickets`) combines them.
//
// Grid: tiles of columns * slices * other kept dimensions; block: 256 threads. Shared memory: a state for each column of each thread.
#include "reduce/reduce.cuh"

namespace rtk {

inline constexpr int kColumnThreads = 256, kColumnLoads = 4;

// Blocks on a multiprocessor: with three of them the 512 tiles of a matrix of 65536 columns were two waves, and a sixth slower.
template <typename M>
inline constexpr int kColumnBlocks = sizeof(typename M::State) <= 8 ? 4 : 3;

// The states of N columns from all threads that have them, for those of the first row.
template <typename M, int N>
RTK_DEVICE void combine_down(typename M::State (&s)[N], u8* memory, int across) {
    typename M::State* parts = reinterpret_cast<typename M::State*>(memory);  // [N][threads]
    const int thread = static_cast<int>(threadIdx.x), row = thread / across;
#pragma unroll
    for (int j = 0; j < N; ++j) parts[j * kColumnThreads + thread] = s[j];
    for (int half = kColumnThreads / across / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row >= half) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            s[j] = M::combine(s[j], parts[j * kColumnThreads + thread + half * across]);
            parts[j * kColumnThreads + thread] = s[j];
        }
    }
}

template <typename T, typename M, int N>
RTK_DEVICE void reduce_tile(const T* x, u8* memory, void* partial, u32* tickets, const Finish& finish, i64 column,
                            i64 columns, i64 begin, i64 end, int across, i64 out, i64 out0, i64 slice, i64 slices,
                            i64 results, const Reduced& reduced, const Lift& lift) {
    using State = typename M::State;
    const int thread = static_cast<int>(threadIdx.x), down = kColumnThreads / across, row = thread / across;
    State s[N];
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] = M::identity();
    if (column < columns) {
        i64 at = begin + row;
        for (; at + (kColumnLoads - 1) * down < end; at += down * kColumnLoads) {
            Raw<sizeof(T) * N> raw[kColumnLoads];
#pragma unroll
            for (int k = 0; k < kColumnLoads; ++k)
                raw[k] = ptx::ld_keep<sizeof(T) * N>(x + reduced.offset(at + k * down) + column);
            ValueOf<T> v[kColumnLoads][N];
#pragma unroll
            for (int k = 0; k < kColumnLoads; ++k) values<T, N>(raw[k], v[k]);
#pragma unroll
            for (int j = 0; j < N; ++j) {  // several elements of a column together: one comparison or division for all
                ValueOf<T> of_column[kColumnLoads];
#pragma unroll
                for (int k = 0; k < kColumnLoads; ++k) of_column[k] = v[k][j];
                M::absorb(s[j], of_column, at, down, lift);
            }
        }
        for (; at < end; at += down) {
            ValueOf<T> v[N];
            values<T, N>(ptx::ld_keep<sizeof(T) * N>(x + reduced.offset(at) + column), v);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                ValueOf<T> one[1] = {v[j]};
                M::absorb(s[j], one, at, down, lift);
            }
        }
    }
    combine_down<M, N>(s, memory, across);
    if (slices > 1) {
        State* parts = static_cast<State*>(partial) + out + column * out0;
        if (row == 0 && column < columns) {
#pragma unroll
            for (int j = 0; j < N; ++j) parts[slice * results + j * out0] = s[j];
        }
        const i64 tiles = ceil_div(columns, across * N);  // computed here: registers are short above
        u32* ticket = tickets + blockIdx.x / (tiles * slices) * tiles + blockIdx.x % tiles;
        if (!is_last_block(ticket, slices)) return;
#pragma unroll
        for (int j = 0; j < N; ++j) s[j] = M::identity();
        if (column < columns) {
            for (i64 i = row; i < slices; i += down)
#pragma unroll
                for (int j = 0; j < N; ++j) s[j] = M::combine(s[j], parts[i * results + j * out0]);
        }
        combine_down<M, N>(s, memory, across);
    }
    if (row != 0 || column >= columns) return;
#pragma unroll
    for (int j = 0; j < N; ++j) M::finish(s[j], finish, out + (column + j) * out0);
}

template <typename T, typename M>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks<M>)
    reduce_columns(const T* x, void* out, void* second, void* partial, u32* tickets, i64 results, i64 size1, i64 size0, i64 x2, i64 x1,
                   i64 x0, i64 out2, i64 out1, i64 out0, i64 count, i64 reduced1, i64 reduced0, i64 divider1,
                   i64 divider0, i64 stride2, i64 stride1, i64 stride0, i64 slices, i64 per_slice, i64 across,
                   i64 aligned, i64 lift, double power, i64 finish, double number, i64 type) {
    constexpr int kWidth = sizeof(T) == 8 ? 2 : 4;
    extern __shared__ __align__(16) u8 memory[];
    const int width = aligned ? kWidth : 1;
    const i64 tiles = ceil_div(size0, across * width);
    const i64 rest = blockIdx.x / tiles, tile = blockIdx.x - rest * tiles;
    const i64 outer = rest / slices, slice = rest - outer * slices;
    const i64 column = (tile * across + threadIdx.x % across) * width;
    const i64 i2 = outer / size1, i1 = outer - i2 * size1;
    const T* from = x + i2 * x2 + i1 * x1;
    const i64 to = i2 * out2 + i1 * out1;
    const i64 begin = slice * per_slice, end = min(begin + per_slice, count);
    const Reduced reduced{reduced1, reduced0, divider1, divider0, stride2, stride1, stride0};
    const Lift how{static_cast<int>(lift), static_cast<float>(power)};
    const Finish last{static_cast<int>(finish), static_cast<int>(type), number, how.kind, out, second};
    if (aligned) {
        reduce_tile<T, M, kWidth>(from, memory, partial, tickets, last, column, size0, begin, end, static_cast<int>(across),
                                  to, out0, slice, slices, results, reduced, how);
    } else {
        reduce_tile<T, M, 1>(from, memory, partial, tickets, last, column, size0, begin, end, static_cast<int>(across), to,
                             out0, slice, slices, results, reduced, how);
    }
}

}  // namespace rtk
