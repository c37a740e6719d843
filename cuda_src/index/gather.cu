// out[c] = x[c with coordinate `dim` replaced by index[c]]: gather, and index_select along any dimension. Moves bytes,
// one kernel for all types. `gather_units` is the general one: a thread moves BYTES at a time, an element or 16 bytes
// of neighbours that share an index.
//
// The result is dense, of up to four dimensions (sizes in units of BYTES); strides of x (0 along `dim`) are in bytes,
// those of the index in elements. Indices outside of 0 ... n - 1 trap, as in torch; with `from_end` negative ones count
// from the end. A thread moves four units: all indices are loaded before the first is used. Grid: result / 1024; 64-bit
// offsets.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "index/coordinates.cuh"

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
        const Coordinates c = coordinates_at(at, size1, size2, size3, divider1, divider2, divider3);
        chosen[k] = index_at(index, c.dot(index0, index1, index2, index3), index_int64);
        from[k] = c.dot(x0, x1, x2, x3);
    }
    Raw<BYTES> raw[kGatherUnits];
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k) {
        if (first + k * 256 >= units) break;
        const i64 i = checked_index(chosen[k], from_end, n);
        raw[k] = ptx::ld_keep<BYTES>(x + from[k] + i * x_dim);
    }
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k)
        if (first + k * 256 < units) ptx::st<BYTES>(out + (first + k * 256) * BYTES, raw[k]);
}

// Whole rows: out[o][i] = x[o][index[i]], rows of `units` vectors of BYTES. A RowGroup owns a slice of one row of the
// result, with four vectors of it in flight per thread. Strides of x are in bytes. Grid: (outer * count) rows / groups
// of a block, slices.
template <int BYTES>
__global__ void __launch_bounds__(256)
    select_rows(const u8* x, const void* index, u8* out, i64 outer_rows, i64 count, i64 count_divisor, i64 units, i64 n,
                i64 x_outer, i64 x_dim, i64 index_stride, i64 index_int64, i64 from_end, i64 threads_per_row) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (row >= outer_rows || group.index >= group.count) return;
    const i64 outer = outer_rows == count ? 0 : static_cast<i64>(divided(static_cast<u32>(row), count_divisor));
    const i64 i = checked_index(index_at(index, (row - outer * count) * index_stride, index_int64), from_end, n);
    const i64 first = static_cast<i64>(blockIdx.y) * group.threads * kGatherUnits + group.thread;
    x += outer * x_outer + i * x_dim + first * BYTES;
    out += (row * units + first) * BYTES;
    Raw<BYTES> raw[kGatherUnits];
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k)
        if (first + k * group.threads < units) raw[k] = ptx::ld_stream<BYTES>(x + k * group.threads * BYTES);
#pragma unroll
    for (int k = 0; k < kGatherUnits; ++k)
        if (first + k * group.threads < units) ptx::st<BYTES>(out + k * group.threads * BYTES, raw[k]);
}

// gather along rows where many elements of each row are needed: out[r][j] = x[r][index[r][j]]. A block reads its rows
// once, in order, into shared memory, and picks the elements there; picking 32 of them from global memory would touch
// 32 cache lines. The `per_row` indices of a row, a multiple of four, are dense int64; a thread has four neighbours at
// a time. Rows of x have `columns` elements at x_row bytes, both multiples of 16 bytes. Grid: rows / rows_per_block.
template <int BYTES>
__global__ void __launch_bounds__(1024)
    gather_staged(const u8* x, const i64* index, u8* out, i64 rows, i64 rows_per_block, i64 columns, i64 per_row,
                  i64 row_divisor, i64 vector_divisor, i64 x_row) {
    extern __shared__ __align__(16) u8 staged[];
    const int threads = static_cast<int>(blockDim.x);
    const i64 first_row = static_cast<i64>(blockIdx.x) * rows_per_block;
    const int own_rows = static_cast<int>(min(rows_per_block, rows - first_row));
    const int vectors = static_cast<int>(columns * BYTES / 16), all = own_rows * vectors;
    x += first_row * x_row;
    for (int base = 0; base < all; base += kGatherUnits * threads) {
        Raw<16> raw[kGatherUnits];
#pragma unroll
        for (int k = 0; k < kGatherUnits; ++k) {
            const int at = base + k * threads + static_cast<int>(threadIdx.x);
            if (at >= all) break;
            const u32 row = divided(static_cast<u32>(at), vector_divisor);
            raw[k] = ptx::ld_stream<16>(x + row * x_row + (at - static_cast<int>(row) * vectors) * 16);
        }
#pragma unroll
        for (int k = 0; k < kGatherUnits; ++k) {
            const int at = base + k * threads + static_cast<int>(threadIdx.x);
            if (at < all) *reinterpret_cast<uint4*>(staged + at * 16) = make_uint4(raw[k].w[0], raw[k].w[1], raw[k].w[2], raw[k].w[3]);
        }
    }
    __syncthreads();
    const int quads = static_cast<int>(per_row / 4), wanted = own_rows * quads;
    index += first_row * per_row;
    out += first_row * per_row * BYTES;
    for (int base = static_cast<int>(threadIdx.x); base < wanted; base += 2 * threads) {
        Raw<16> named[2][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int at = base + k * threads;
            if (at >= wanted) break;
            named[k][0] = ptx::ld_stream<16>(index + static_cast<i64>(at) * 4);
            named[k][1] = ptx::ld_stream<16>(index + static_cast<i64>(at) * 4 + 2);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int at = base + k * threads;
            if (at >= wanted) break;
            const u8* line = staged + divided(static_cast<u32>(at), row_divisor) * columns * BYTES;
            u32 words[BYTES];  // of four elements
#pragma unroll
            for (int i = 0; i < BYTES; ++i) words[i] = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Raw<16>& two = named[k][i / 2];
                const u32 low = two.w[i % 2 * 2];
                if (two.w[i % 2 * 2 + 1] != 0 || low >= static_cast<u32>(columns)) __trap();
                if constexpr (BYTES == 8) {
                    const uint2 one = *reinterpret_cast<const uint2*>(line + low * 8);
                    words[2 * i] = one.x, words[2 * i + 1] = one.y;
                } else if constexpr (BYTES == 4) {
                    words[i] = *reinterpret_cast<const u32*>(line + low * 4);
                } else if constexpr (BYTES == 2) {
                    words[i / 2] |= static_cast<u32>(*reinterpret_cast<const u16*>(line + low * 2)) << (i % 2 * 16);
                } else {
                    words[0] |= static_cast<u32>(line[low]) << (i * 8);
                }
            }
            constexpr int kStore = BYTES == 8 ? 16 : 4 * BYTES;
#pragma unroll
            for (int i = 0; i < 4 * BYTES / kStore; ++i) {
                Raw<kStore> packed;
#pragma unroll
                for (int w = 0; w < kStore / 4; ++w) packed.w[w] = words[i * 4 + w];
                ptx::st<kStore>(out + static_cast<i64>(at) * 4 * BYTES + i * kStore, packed);
            }
        }
    }
}

}  // namespace rtk
