// Sorts short rows in shared memory, stable: the first `kept` elements of each row, with their indices. A block sorts
// 2048 places: `length`, a power of two, for each of its rows, by a bitonic network over (key, index) pairs, which are
// all different.
//
// A row's elements are x[row / parts][from ...], `count` of them at most, of a row of n; or, with `list`, the elements
// of x's row at the indices list[row] (-1: none). So the best of a long row are found in rounds: the best of each part
// of it first, then the best of those. Results: [rows][kept]; values only if they are needed, index -1 where there are
// fewer elements. Grid: rows / rows in a block; block: 256 threads.
#include "sort/keys.cuh"

namespace rtk {

inline constexpr int kSortPlaces = 2048;
inline constexpr int kSortBlock = 256;

template <typename T>
__global__ void __launch_bounds__(kSortBlock)
    sort_rows(const T* x, const i64* list, T* out, i64* indices, i64 rows, i64 n, i64 parts, i64 count, i64 length,
              i64 kept, i64 descending) {
    using Key = KeyOf<T>;
    constexpr u32 kNobody = 0xffffffffu;
    constexpr Key kLast = static_cast<Key>(~static_cast<Key>(0));
    __shared__ Key keys[kSortPlaces];
    __shared__ u32 from[kSortPlaces];
    const int size = static_cast<int>(length), thread = static_cast<int>(threadIdx.x);
    const int rows_here = kSortPlaces / size;
    const i64 first = static_cast<i64>(blockIdx.x) * rows_here;
    for (int at = thread; at < kSortPlaces; at += kSortBlock) {
        const i64 row = first + at / size, source = row / parts;
        const int place = at % size;
        i64 index = -1;
        if (row < rows && place < count) {
            if (list != nullptr) {
                index = list[row * count + place];
            } else {
                index = (row - source * parts) * count + place;
                if (index >= n) index = -1;
            }
        }
        keys[at] = index < 0 ? kLast : key(x + source * n + index, descending);
        from[at] = index < 0 ? kNobody : static_cast<u32>(index);
    }
    for (int block = 2; block <= size; block *= 2) {
        for (int step = block / 2; step > 0; step /= 2) {
            __syncthreads();
#pragma unroll
            for (int k = 0; k < kSortPlaces / 2 / kSortBlock; ++k) {
                const int pair = k * kSortBlock + thread;
                const int low = 2 * pair - (pair & (step - 1)), high = low + step;
                const bool up = (low & (size - 1) & block) == 0;
                const Key a = keys[low], b = keys[high];
                const u32 i = from[low], j = from[high];
                const bool ordered = a < b || (a == b && i <= j);
                if (ordered != up) {
                    keys[low] = b, keys[high] = a;
                    from[low] = j, from[high] = i;
                }
            }
        }
    }
    __syncthreads();
    const int wanted = static_cast<int>(kept), all = wanted * rows_here;
    for (int at = thread; at < all; at += kSortBlock) {
        const int r = at / wanted, place = at - r * wanted;
        const i64 row = first + r;
        if (row >= rows) return;
        const u32 index = place < size ? from[r * size + place] : kNobody;
        const i64 to = row * wanted + place;
        indices[to] = index == kNobody ? -1 : static_cast<i64>(index);
        if (out != nullptr && index != kNobody) out[to] = x[row / parts * n + index];
    }
}

}  // namespace rtk
