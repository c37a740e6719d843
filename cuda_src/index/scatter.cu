// out[c with one or two coordinates replaced by those that the indices name for c] = source[c], or a number: scatter,
// and assignment through indices. Moves bytes, one kernel for all types. A thread moves BYTES at a time: an element, or
// neighbours that share their indices.
//
// c has up to four dimensions (sizes in units of BYTES). Strides of `out` (0 along indexed dimensions) and of the source
// are in bytes, those of indices in elements. Without a source `value` holds the bits of the number. Indices outside of
// 0 ... n - 1 trap, as in torch; with `from_end` negative ones count from the end. Where several c name one place, one
// of their values stays, whole. A thread moves four units: all are loaded before the first is stored. Grid: units /
// 1024; 64-bit offsets.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "index/coordinates.cuh"

namespace rtk {

inline constexpr int kScatterUnits = 4;

template <int BYTES, int INDICES>
__global__ void __launch_bounds__(256)
    scatter_units(u8* out, const u8* source, const void* first_index, const void* second_index, i64 value, i64 units,
                  i64 from_end, i64 first_n, i64 first_stride, i64 first_int64, i64 second_n, i64 second_stride,
                  i64 second_int64, i64 size1, i64 size2, i64 size3, i64 divider1, i64 divider2, i64 divider3, i64 out0,
                  i64 out1, i64 out2, i64 out3, i64 source0, i64 source1, i64 source2, i64 source3, i64 first0,
                  i64 first1, i64 first2, i64 first3, i64 second0, i64 second1, i64 second2, i64 second3) {
    const i64 begin = static_cast<i64>(blockIdx.x) * (256 * kScatterUnits) + threadIdx.x;
    i64 to[kScatterUnits];
    Raw<BYTES> raw[kScatterUnits];
#pragma unroll
    for (int k = 0; k < kScatterUnits; ++k) {
        const i64 at = begin + k * 256;
        if (at >= units) break;
        const Coordinates c = coordinates_at(at, size1, size2, size3, divider1, divider2, divider3);
        const i64 first = index_at(first_index, c.dot(first0, first1, first2, first3), first_int64);
        to[k] = c.dot(out0, out1, out2, out3) + checked_index(first, from_end, first_n) * first_stride;
        if constexpr (INDICES == 2) {
            const i64 second = index_at(second_index, c.dot(second0, second1, second2, second3), second_int64);
            to[k] += checked_index(second, from_end, second_n) * second_stride;
        }
        if (source != nullptr) {
            raw[k] = ptx::ld_keep<BYTES>(source + c.dot(source0, source1, source2, source3));
        } else {
            raw[k].w[0] = static_cast<u32>(value);
            if constexpr (BYTES == 8) raw[k].w[1] = static_cast<u32>(static_cast<u64>(value) >> 32);
        }
    }
#pragma unroll
    for (int k = 0; k < kScatterUnits; ++k)
        if (begin + k * 256 < units) ptx::st<BYTES>(out + to[k], raw[k]);
}

}  // namespace rtk
