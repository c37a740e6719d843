// Reductions over contiguous (or arbitrary) elements: each result, or each of `slices` parts of it, belongs to a group
// of threads that reads its elements in order, 16 bytes at a time where rows are aligned, with several loads in flight
// per thread. Fixed order, no atomics: states of parts, each a block's, go to `partial` ([slices][results]), and the
// last block of a result (`tickets`) combines them.
//
// Grid: results * slices / groups in a block; block: 256 threads, or as many as share a row if these are more than a
// warp. Arithmetic: the monoid's (fp32 or 64-bit integers).
#include "ptx/forget.cuh"
#include "reduce/group_state.cuh"
#include "reduce/reduce.cuh"

namespace rtk {

// Blocks of 256 threads per SM, and loads in flight per thread.
template <typename M>
inline constexpr int kRowBlocks = sizeof(typename M::State) == 4 ? 4 : 2;
template <typename M>
inline constexpr int kRowLoads = sizeof(typename M::State) == 4 ? 8 : 4;

template <typename T, typename M, int N>
RTK_DEVICE void absorb(typename M::State& s, const Raw<sizeof(T) * N>& raw, i64 at, const Lift& lift) {
    ValueOf<T> v[N];
    values<T, N>(raw, v);
    if constexpr (N > 4 && kHasIndex<M>) M::absorb_each(s, v, at, lift);
    else M::absorb(s, v, at, 1, lift);
}

// `count` contiguous elements, for whole warps: each takes kLoads times 512 bytes at a time, so that one address
// suffices.
template <typename T, typename M>
RTK_DEVICE void absorb_dense(typename M::State& s, const T* x, i64 begin, int count, const RowGroup& group, const Lift& lift) {
    constexpr int N = 16 / sizeof(T), kLoads = kRowLoads<M>, kApart = kWarp * N;
    const int lane = group.thread % kWarp, step = group.threads * N * kLoads;
    int at = (group.thread - lane) * N * kLoads + lane * N;
    const T* p = x + begin + at;
    for (; at + (kLoads - 1) * kApart < count; at += step, p += step) {
        Raw<16> raw[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k) raw[k] = load_reduced<16>(p + k * kApart);
        if constexpr (is_same<M, Moments>::value) {  // the order is free, so all together: one division
            float v[kLoads * N];
#pragma unroll
            for (int k = 0; k < kLoads; ++k) {
                float some[N];
                values<T, N>(raw[k], some);
#pragma unroll
                for (int i = 0; i < N; ++i) v[k * N + i] = some[i];
            }
            M::absorb(s, v, 0, 1, lift);
        } else {
            const auto absorb_all = [&](const Lift& how) {
#pragma unroll
                for (int k = 0; k < kLoads; ++k) absorb<T, M, N>(s, raw[k], begin + at + k * kApart, how);
            };
            if (lift.kind == 0) absorb_all(Lift{0, 0.0f});  // one branch for all
            else absorb_all(lift);
        }
    }
    if (at >= count) return;
    Raw<16> raw[kLoads - 1];
#pragma unroll
    for (int k = 0; k < kLoads - 1; ++k)
        if (at + k * kApart < count) raw[k] = load_reduced<16>(p + k * kApart);
#pragma unroll
    for (int k = 0; k < kLoads - 1; ++k)
        if (at + k * kApart < count) absorb<T, M, N>(s, raw[k], begin + at + k * kApart, lift);
}

// `count` elements in any layout, N at a time.
template <typename T, typename M, int N>
RTK_DEVICE void absorb_strided(typename M::State& s, const T* x, i64 begin, int count, const RowGroup& group,
                               const Reduced& reduced, const Lift& lift) {
    constexpr int kLoads = 4;
    const int step = group.threads * N;
    for (int at = group.thread * N; at < count; at += step * kLoads) {
        Raw<sizeof(T) * N> raw[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k)
            if (at + k * step < count) raw[k] = load_reduced<sizeof(T) * N>(x + reduced.offset(begin + at + k * step));
#pragma unroll
        for (int k = 0; k < kLoads; ++k)
            if (at + k * step < count) absorb<T, M, N>(s, raw[k], begin + at + k * step, lift);
    }
}

// The work of a group of threads. Computed again after the elements, from a number of threads hidden from the compiler:
// kept in registers meanwhile, it would leave fewer for loads.
struct RowPart {
    RowGroup group;
    i64 result, slice;

    RTK_DEVICE RowPart(u32 threads, i64 slices) : group(threads) {
        result = static_cast<i64>(blockIdx.x) * group.count + group.index, slice = 0;
        if (slices > 1) {  // a slice belongs to one block
            result = blockIdx.x / static_cast<u32>(slices);
            slice = blockIdx.x - static_cast<u32>(result) * static_cast<u32>(slices);
        }
    }
};

template <typename T, typename M>
__global__ void __launch_bounds__(kReduceThreads, kRowBlocks<M>)
    reduce_rows(const T* x, void* out, void* second, void* partial, u32* tickets, i64 results, i64 size1, i64 size0, i64 x2, i64 x1,
                i64 x0, i64 out2, i64 out1, i64 out0, i64 count, i64 reduced1, i64 reduced0, i64 divider1, i64 divider0,
                i64 stride2, i64 stride1, i64 stride0, i64 slices, i64 per_slice, i64 threads_per_row, i64 aligned,
                i64 lift, double power, i64 finish, double number, i64 type) {
    const Kept kept{size1, size0, x2, x1, x0, out2, out1, out0};
    const Lift how{static_cast<int>(lift), static_cast<float>(power)};
    typename M::State s = M::identity();
    u32 threads = static_cast<u32>(threads_per_row);
    if (const RowPart part(threads, slices); part.result < results) {
        const Reduced reduced{reduced1, reduced0, divider1, divider0, stride2, stride1, stride0};
        const T* row = x + kept.place(part.result).x;
        const i64 begin = part.slice * per_slice;
        const int here = static_cast<int>(min(per_slice, count - begin));
        if (!aligned) {
            absorb_strided<T, M, 1>(s, row, begin, here, part.group, reduced, how);
        } else if (divider0 == 0 && threads >= kWarp) {
            absorb_dense<T, M>(s, row, begin, here, part.group, how);
        } else {
            absorb_strided<T, M, 16 / sizeof(T)>(s, row, begin, here, part.group, reduced, how);
        }
    }
    ptx::forget(threads);
    const RowPart part(threads, slices);
    const int thread = part.group.thread;
    s = combined<M>(s, static_cast<int>(threads));
    if (part.result >= results) return;
    const i64 to = kept.place(part.result).out;
    if (slices > 1) {
        typename M::State* parts = static_cast<typename M::State*>(partial) + to;
        if (thread == 0) parts[part.slice * results] = s;
        if (!is_last_block(tickets + part.result, slices)) return;
        s = M::identity();
        for (i64 i = thread; i < slices; i += threads) s = M::combine(s, parts[i * results]);
        s = combined<M>(s, static_cast<int>(threads));
    }
    if (thread != 0) return;
    M::finish(s, Finish{static_cast<int>(finish), static_cast<int>(type), number, how.kind, out, second}, to);
}

}  // namespace rtk
