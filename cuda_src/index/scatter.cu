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

namespace rtk {

inline constexpr int kScatterUnits = 4;

// Returns the distance in bytes along the indexed dimension.
RTK_DEVICE i64 scatter_distance(const void* index, i64 place, i64 is_int64, i64 from_end, i64 n, i64 stride) {
    i64 i = is_int64 ? static_cast<const i64*>(index)[place] : static_cast<const i32*>(index)[place];
    if (from_end && i < 0) i += n;
    if (static_cast<u64>(i) >= static_cast<u64>(n)) __trap();
    return i * stride;
}

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
        i64 c0, c1, c2, c3;
        if (divider3 != 0) {  // fewer than 2^31
            const u32 rest2 = divided(static_cast<u32>(at), divider3), rest1 = divided(rest2, divider2);
            const u32 rest0 = divided(rest1, divider1);
            c3 = static_cast<u32>(at) - rest2 * static_cast<u32>(size3), c2 = rest2 - rest1 * static_cast<u32>(size2);
            c1 = rest1 - rest0 * static_cast<u32>(size1), c0 = rest0;
        } else {
            const i64 rest2 = at / size3, rest1 = rest2 / size2, rest0 = rest1 / size1;
            c3 = at - rest2 * size3, c2 = rest2 - rest1 * size2, c1 = rest1 - rest0 * size1, c0 = rest0;
        }
        to[k] = c0 * out0 + c1 * out1 + c2 * out2 + c3 * out3;
        to[k] += scatter_distance(first_index, c0 * first0 + c1 * first1 + c2 * first2 + c3 * first3, first_int64,
                                  from_end, first_n, first_stride);
        if constexpr (INDICES == 2)
            to[k] += scatter_distance(second_index, c0 * second0 + c1 * second1 + c2 * second2 + c3 * second3,
                                      second_int64, from_end, second_n, second_stride);
        if (source != nullptr) {
            raw[k] = ptx::ld_keep<BYTES>(source + c0 * source0 + c1 * source1 + c2 * source2 + c3 * source3);
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
