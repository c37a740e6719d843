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

struct ScatterArguments {
    u8* out;
    const u8* source;
    const void *first_index, *second_index;
    i64 value, units, from_end, first_n, first_stride, first_int64, second_n, second_stride, second_int64, size1,
        size2, size3, divider1, divider2, divider3, out0, out1, out2, out3, source0, source1, source2, source3,
        first0, first1, first2, first3, second0, second1, second2, second3;
};

template <int BYTES>
__global__ void __launch_bounds__(256)
    scatter_units(const __grid_constant__ ScatterArguments args) {
    const i64 begin = static_cast<i64>(blockIdx.x) * (256 * kScatterUnits) + threadIdx.x;
    i64 to[kScatterUnits];
    Raw<BYTES> raw[kScatterUnits];
#pragma unroll
    for (int k = 0; k < kScatterUnits; ++k) {
        const i64 at = begin + k * 256;
        if (at >= args.units) break;
        const Coordinates c = coordinates_at(at, args.size1, args.size2, args.size3, args.divider1, args.divider2,
                                             args.divider3);
        const i64 first = index_at(args.first_index, c.dot(args.first0, args.first1, args.first2, args.first3),
                                   args.first_int64);
        to[k] = c.dot(args.out0, args.out1, args.out2, args.out3);
        to[k] += checked_index(first, args.from_end, args.first_n) * args.first_stride;
        if (args.second_index != nullptr) {
            const i64 at_second = c.dot(args.second0, args.second1, args.second2, args.second3);
            const i64 second = index_at(args.second_index, at_second, args.second_int64);
            to[k] += checked_index(second, args.from_end, args.second_n) * args.second_stride;
        }
        if (args.source != nullptr) {
            raw[k] = ptx::ld_keep<BYTES>(args.source + c.dot(args.source0, args.source1, args.source2, args.source3));
        } else {
            raw[k].w[0] = static_cast<u32>(args.value);
            if constexpr (BYTES == 8) raw[k].w[1] = static_cast<u32>(static_cast<u64>(args.value) >> 32);
        }
    }
#pragma unroll
    for (int k = 0; k < kScatterUnits; ++k)
        if (begin + k * 256 < args.units) ptx::st<BYTES>(args.out + to[k], raw[k]);
}

}  // namespace rtk
