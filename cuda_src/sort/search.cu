// Returns whether each element of a dense x is among `count` sorted values (NaN last, and equal to nothing), by
// bisection; `invert` negates the answer. A thread owns an element; neighbours share the first steps, which are in L1.
// Grid: elements / 256.
#include "common/values.cuh"

namespace rtk {

template <typename T>
RTK_DEVICE ValueOf<T> value_at(const T* p, i64 at) {
    ValueOf<T> v[1];
    values<T, 1>(ptx::ld_keep<sizeof(T)>(p + at), v);
    return v[0];
}

template <typename T>
__global__ void __launch_bounds__(256) sorted_contains(const T* x, const T* sorted, u8* out, i64 n, i64 count, i64 invert) {
    const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (at >= n) return;
    const ValueOf<T> wanted = value_at(x, at);
    i64 low = 0, high = count;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (value_at(sorted, middle) < wanted) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const bool found = low < count && value_at(sorted, low) == wanted;
    out[at] = found != (invert != 0);
}

}  // namespace rtk
