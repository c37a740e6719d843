// Scans along one dimension of (outer, n, inner): prefix sums and running extremes, fp32 or 64-bit integers, in a fixed
// order.
//
// scan_rows (inner = 1): a row, or each of its `slices`, belongs to a warp or to a block of 256 threads, which
// processes it in tiles of N neighbours per thread (16 bytes, or 32 for sums of floats) and carries the state from one
// tile to the next. scan_columns: a thread owns a column, or a slice of it; neighbouring threads read neighbouring
// columns. With several slices the kernel is launched twice: first it stores the state of each slice in `partial`
// ([rows][slices]), then each slice starts from the combined states before it. Grid: rows * slices / rows in a block. y
// and `indices` are dense.
#include "scan/scan.cuh"

namespace rtk {

#ifndef RTK_SCAN_BYTES
#define RTK_SCAN_BYTES 32
#endif

inline constexpr int kScanThreads = 256;
inline constexpr int kScanWarps = kScanThreads / kWarp;

// Combines the states of earlier slices, in order.
template <typename S>
RTK_DEVICE typename S::State before_slice(const void* partial, i64 row, i64 slice, i64 slices) {
    typename S::State s = S::identity();
    const typename S::State* all = static_cast<const typename S::State*>(partial) + row * slices;
    for (i64 i = 0; i < slice; ++i) s = S::combine(s, all[i]);
    return s;
}

template <typename S>
RTK_DEVICE typename S::State scanned_warp(typename S::State s, int lane) {
#pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
        const typename S::State left = S::from(s, lanes);
        if (lane >= lanes) s = S::combine(left, s);
    }
    return s;
}

template <typename T, int N, typename V>
RTK_DEVICE void values_of_parts(const RawParts<T, N>& raw, V (&v)[N]) {
    constexpr int kEach = N / RawParts<T, N>::kParts;
#pragma unroll
    for (int p = 0; p < raw.kParts; ++p) {
        V some[kEach];
        values<T, kEach>(raw.part[p], some);
#pragma unroll
        for (int i = 0; i < kEach; ++i) v[p * kEach + i] = some[i];
    }
}

template <typename T, typename Out, typename S, int N>
RTK_DEVICE void scan_slice(const T* x, Out* y, i64* indices, i64 begin, i64 end, i64 x_step, int threads, int thread,
                           typename S::State carry, typename S::State* partial, bool flip, typename S::State* shared) {
    using State = typename S::State;
    using V = typename S::Value;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 step = threads * N;
    RawParts<T, N> next_raw;
    if (begin + thread * N < end) next_raw = load_keep_raw<T, N>(x + (begin + thread * N) * x_step);
    State* parts = shared;  // states of warps; the other half is for the next tile, so that one barrier suffices
    for (i64 tile = begin; tile < end; tile += step) {
        const i64 at = tile + thread * N;
        V v[N];
        State own[N];
        values_of_parts<T, N>(next_raw, v);
        // The loads of the next tile are in flight while this one is scanned.
        if (at + step < end) next_raw = load_keep_raw<T, N>(x + (at + step) * x_step);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const State s = at < end ? S::of(v[k], at + k, flip) : S::identity();
            own[k] = k == 0 ? s : S::combine(own[k == 0 ? 0 : k - 1], s);
        }
        const State up_to = scanned_warp<S>(own[N - 1], lane);
        State left = S::from(up_to, 1);
        if (lane == 0) left = S::identity();
        State next;
        if (threads > kWarp) {
            if (lane == kWarp - 1) parts[warp] = up_to;
            __syncthreads();
            State earlier = S::identity(), all = S::identity();
#pragma unroll
            for (int w = 0; w < kScanWarps; ++w) {
                if (w == warp) earlier = all;
                all = S::combine(all, parts[w]);
            }
            left = S::combine(earlier, left);
            next = S::combine(carry, all);
            parts = parts == shared ? shared + kScanWarps : shared;
        } else {
            next = S::combine(carry, S::of_lane(up_to, kWarp - 1));
        }
        left = S::combine(carry, left);
        if (partial == nullptr && at < end) {
            V running[N];
            i64 found[N];
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const State s = S::combine(left, own[k]);
                running[k] = S::value(s, flip);
                found[k] = S::index(s);
            }
            store_values<Out, N>(y + at, running);
            if (indices != nullptr) store_values<i64, N>(indices + at, found);
        }
        carry = next;
    }
    if (partial != nullptr && thread == 0) *partial = carry;
}

// (outer, n) with elements x_step apart, rows x_row apart.
template <typename T, typename Out, typename S>
__global__ void __launch_bounds__(kScanThreads)
    scan_rows(const T* x, Out* y, i64* indices, void* partial, i64 rows, i64 n, i64 x_row, i64 x_step, i64 slices,
              i64 per_slice, i64 threads_per_row, i64 aligned, i64 totals, i64 flip) {
    constexpr int kWidth = sizeof(T) == 1 ? 4 : (sizeof(typename S::State) == 4 ? RTK_SCAN_BYTES : 16) / sizeof(T);
    __shared__ __align__(16) typename S::State shared[2 * kScanWarps];
    const int threads = static_cast<int>(threads_per_row), thread = static_cast<int>(threadIdx.x) % threads;
    const i64 item = static_cast<i64>(blockIdx.x) * (kScanThreads / threads) + threadIdx.x / threads;
    const i64 row = item / slices, slice = item - row * slices;
    if (row >= rows) return;  // a whole warp, or nobody
    const i64 begin = slice * per_slice, end = min(begin + per_slice, n);
    typename S::State carry = S::identity();
    if (slices > 1 && !totals) carry = before_slice<S>(partial, row, slice, slices);
    typename S::State* total = totals ? static_cast<typename S::State*>(partial) + item : nullptr;
    i64* to = indices == nullptr ? nullptr : indices + row * n;
    if (aligned) {
        scan_slice<T, Out, S, kWidth>(x + row * x_row, y + row * n, to, begin, end, x_step, threads, thread, carry, total,
                                      flip, shared);
    } else {
        scan_slice<T, Out, S, 1>(x + row * x_row, y + row * n, to, begin, end, x_step, threads, thread, carry, total, flip,
                                 shared);
    }
}

// (outer, n, inner), with inner elements x_inner apart, those along n x_step, outer ones x_row.
template <typename T, typename Out, typename S>
__global__ void __launch_bounds__(kScanThreads)
    scan_columns(const T* x, Out* y, i64* indices, void* partial, i64 columns, i64 n, i64 inner, i64 x_row, i64 x_step,
                 i64 x_inner, i64 slices, i64 per_slice, i64 totals, i64 flip) {
    constexpr int kLoads = 4;
    using State = typename S::State;
    using V = typename S::Value;
    const i64 item = static_cast<i64>(blockIdx.x) * kScanThreads + threadIdx.x;
    const i64 slice = item / columns, column = item - slice * columns;
    if (slice >= slices) return;
    const i64 outer = column / inner, k = column - outer * inner;
    const i64 begin = slice * per_slice, end = min(begin + per_slice, n);
    State s = S::identity();
    if (slices > 1 && !totals) s = before_slice<S>(partial, column, slice, slices);
    x += outer * x_row + k * x_inner;
    const i64 first = outer * n * inner + k;
    for (i64 at = begin; at < end; at += kLoads) {
        V v[kLoads][1];
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (at + j < end) values<T, 1>(ptx::ld_keep<sizeof(T)>(x + (at + j) * x_step), v[j]);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            if (at + j >= end) break;
            s = S::combine(s, S::of(v[j][0], at + j, flip));
            if (totals) continue;
            const V running[1] = {S::value(s, flip)};
            store_values<Out, 1>(y + first + (at + j) * inner, running);
            if (indices != nullptr) indices[first + (at + j) * inner] = S::index(s);
        }
    }
    if (totals) static_cast<State*>(partial)[column * slices + slice] = s;
}

}  // namespace rtk
