// out[c] = x[c with coordinate `dim` replaced by index[c]]: gather, and index_select along any dimension. Moves bytes, one kernel for
// all types. A thread moves BYTES at a time: an element, or 16 bytes of neighbours that share an index.
//
// The result is dense, of up to four dimensions (sizes in units of BYTES); strides of x (0 along `dim`) are in bytes, those
// of the index in elements. Indices outside of 0 ... n - 1 stop the kernel, as torch's do; with `from_end` negative ones count
// from the end. A thread moves four of them: all indices are asked for before the first is used. Grid: result / 1024; 64-bit offsets.
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kGatherUnits = 4;

template <int BYTES>
__global__ void __launch_bounds__(256)
    gather_units(const u8* x, const void* index, u8* out, i64 units, i64 n, i64 x_dim, i64 index_int64, i64 from_end,
                 i64 size1, i64 size2, i64 size3, i64 divider1, i64 divider2, i64 divider3, i64 x0, i64 x1, i64 x2,
                 i64 x3, i64 index0, i64 index1, i64 index2, i64 index3) {
    const i64 first = static_cast<i64>(blockIdx.x) * (256 * kGatherUnits) + threadIdx.x;
    i64 from[kGatherUnits];  // in x, without the index
    i64 chosen[kGatherUnits];
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k) {
        const i64 at = first + k * 256;
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
        const i64 place = c0 * index0 + c1 * index1 + c2 * index2 + c3 * index3;
        chosen[k] = index_int64 ? static_cast<const i64*>(index)[place] : static_cast<const i32*>(index)[place];
        from[k] = c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3;
    }
    Raw<BYTES> raw[kGatherUnits];
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k) {
        if (first + k * 256 >= units) break;
        i64 i = chosen[k];
        if (from_end && i < 0) i += n;
        if (static_cast<u64>(i) >= static_cast<u64>(n)) __trap();
        raw[k] = ptx::ld_keep<BYTES>(x + from[k] + i * x_dim);
    }
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k)
        if (first + k * 256 < units) ptx::st<BYTES>(out + (first + k * 256) * BYTES, raw[k]);
}

}  // namespace rtk
