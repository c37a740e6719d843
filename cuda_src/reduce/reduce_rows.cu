// Reductions whose elements lie side by side (or anywhere): each result, or each of `slices` parts of it, belongs to a group of
// threads that reads its elements in order, 16 bytes at a time where rows are aligned. Fixed order, no atomics: states of
// parts, each a block's, go to `partial` ([slices][results]), and the last block of a result (`tickets`) combines them.
//
// Grid: results * slices / groups in a block; block: 256 threads. Arithmetic: the monoid's (fp32 or 64-bit integers).
#include "reduce/group_state.cuh"
#include "reduce/reduce.cuh"

namespace rtk {

inline constexpr int kReduceLoads = 4;

template <typename T, typename M, int N>
RTK_DEVICE void absorb_row(typename M::State& s, const T* x, i64 begin, i64 end, const RowGroup& group,
                           const Reduced& reduced, const Lift& lift) {
    const i64 step = group.threads * N;
    for (i64 at = begin + group.thread * N; at < end; at += step * kReduceLoads) {
        Raw<sizeof(T) * N> raw[kReduceLoads];
#pragma unroll
        for (int k = 0; k < kReduceLoads; ++k)
            if (at + k * step < end) raw[k] = ptx::ld_keep<sizeof(T) * N>(x + reduced.offset(at + k * step));
#pragma unroll
        for (int k = 0; k < kReduceLoads; ++k) {
            if (at + k * step >= end) break;
            ValueOf<T> v[N];
            values<T, N>(raw[k], v);
            M::absorb(s, v, at + k * step, 1, lift);
        }
    }
}

template <typename T, typename M>
__global__ void __launch_bounds__(kReduceThreads, 2)
    reduce_rows(const T* x, void* out, void* second, void* partial, u32* tickets, i64 results, i64 size1, i64 size0, i64 x2, i64 x1,
                i64 x0, i64 out2, i64 out1, i64 out0, i64 count, i64 reduced1, i64 reduced0, i64 divider1, i64 divider0,
                i64 stride2, i64 stride1, i64 stride0, i64 slices, i64 per_slice, i64 threads_per_row, i64 aligned,
                i64 lift, double power, i64 finish, double number, i64 type) {
    const RowGroup group(threads_per_row);
    const i64 item = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 result = slices == 1 ? item : item / slices, slice = item - result * slices;
    const Kept kept{size1, size0, x2, x1, x0, out2, out1, out0};
    const Reduced reduced{reduced1, reduced0, divider1, divider0, stride2, stride1, stride0};
    const Lift how{static_cast<int>(lift), static_cast<float>(power)};
    typename M::State s = M::identity();
    Kept::Place place{0, 0};
    if (result < results) {
        place = kept.place(result);
        const i64 begin = slice * per_slice, end = min(begin + per_slice, count);
        if (aligned) {
            absorb_row<T, M, 16 / sizeof(T)>(s, x + place.x, begin, end, group, reduced, how);
        } else {
            absorb_row<T, M, 1>(s, x + place.x, begin, end, group, reduced, how);
        }
    }
    s = combined<M>(s, group.threads);
    if (slices > 1) {
        typename M::State* parts = static_cast<typename M::State*>(partial) + place.out;
        if (group.thread == 0) parts[slice * results] = s;
        if (!is_last_block(tickets + result, slices)) return;
        s = M::identity();
        for (i64 i = group.thread; i < slices; i += group.threads) s = M::combine(s, parts[i * results]);
        s = combined<M>(s, group.threads);
    }
    if (group.thread != 0 || result >= results) return;
    M::finish(s, Finish{static_cast<int>(finish), static_cast<int>(type), number, how.kind, out, second}, place.out);
}

}  // namespace rtk
