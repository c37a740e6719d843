// Up to 8 dense inputs side by side: row r of the output is row r of each input in order. Elements are bits of type T; widths
// and starts are in elements. Grid: x over the vectors (or elements) of the largest input, y over the inputs. With `vectors`,
// widths, starts, the output's rows and all addresses allow 16-byte accesses.
#include "pointwise/element.cuh"

#define RTK_INPUTS const T* x0, const T* x1, const T* x2, const T* x3, const T* x4, const T* x5, const T* x6, const T* x7
#define RTK_WIDTHS i64 w0, i64 w1, i64 w2, i64 w3, i64 w4, i64 w5, i64 w6, i64 w7
#define RTK_STARTS i64 t0, i64 t1, i64 t2, i64 t3, i64 t4, i64 t5, i64 t6, i64 t7

namespace rtk {

// Selects one of eight arguments. An array would be written to local memory by every thread, more bytes than it copies.
template <typename V>
RTK_DEVICE V argument(int at, V a0, V a1, V a2, V a3, V a4, V a5, V a6, V a7) {
    const V low = at < 2 ? (at == 0 ? a0 : a1) : (at == 2 ? a2 : a3);
    const V high = at < 6 ? (at == 4 ? a4 : a5) : (at == 6 ? a6 : a7);
    return at < 4 ? low : high;
}

template <typename T>
__global__ void __launch_bounds__(256)
    concat(T* y, RTK_INPUTS, RTK_WIDTHS, RTK_STARTS, i64 rows, i64 out_width, i64 vectors) {
    constexpr int N = 16 / sizeof(T);
    const int input = static_cast<int>(blockIdx.y);
    const T* x = argument(input, x0, x1, x2, x3, x4, x5, x6, x7);
    const i64 width = argument(input, w0, w1, w2, w3, w4, w5, w6, w7);
    const i64 start = argument(input, t0, t1, t2, t3, t4, t5, t6, t7);
    const int each = vectors != 0 ? N : 1;
    const i64 per_row = vectors != 0 ? width / N : width, count = rows * per_row;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    const bool narrow = count < (1ll << 32);  // a 32-bit division, which is several times faster
    for (i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += step) {
        i64 row = 0;
        if (rows > 1) row = narrow ? static_cast<u32>(index) / static_cast<u32>(per_row) : index / per_row;
        const i64 to = row * out_width + start + (index - row * per_row) * each;
        if (vectors != 0) {
            ptx::st<16>(y + to, ptx::ld_stream<16>(x + index * N));
        } else {
            ptx::st<sizeof(T)>(y + to, ptx::ld_stream<sizeof(T)>(x + index));
        }
    }
}

}  // namespace rtk
