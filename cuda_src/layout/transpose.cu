// Swaps two dimensions of a tensor of up to four. Elements are `size` bytes; strides are in bytes.
#include "common/reduce.cuh"
#include "layout/transpose_tile.cuh"

namespace rtk {

// The last dimension with another one: matrices x [rows, cols] to y [cols, rows_out], with zeros for rows past `rows`.
// Two more dimensions number the matrices; the inner one has `inner` entries. One block per tile, numbered down the
// rows of x first, so that neighbours write adjacent memory.
template <int S>
__global__ void __launch_bounds__(TileShape<S>::kThreads, TileShape<S>::kBlocksPerSm)
    transpose_tiles(const u8* x, u8* y, i64 rows, i64 rows_out, i64 cols, i64 x_stride, i64 y_stride, i64 tiles_across,
                    i64 tiles_down, i64 inner, i64 x_outer, i64 x_inner, i64 y_outer, i64 y_inner,
                    i64 size) {
    using Shape = TileShape<S>;
    __shared__ __align__(16) u8 memory[Shape::kBytes];
    const u32 strip = blockIdx.x / static_cast<u32>(tiles_down);
    const u32 matrix = strip / static_cast<u32>(tiles_across), outer = matrix / static_cast<u32>(inner);
    const i64 row = static_cast<i64>(blockIdx.x - strip * static_cast<u32>(tiles_down)) * Shape::kRows;
    const i64 column = static_cast<i64>(strip - matrix * static_cast<u32>(tiles_across)) * Shape::kCols;
    const i64 within = matrix - outer * static_cast<u32>(inner);
    x += outer * x_outer + within * x_inner + row * x_stride + column * size;
    y += outer * y_outer + within * y_inner + column * y_stride + row * size;
    transpose_tile<S>(x, x_stride, rows - row, rows_out - row, cols - column, y, y_stride, static_cast<int>(size), memory);
}

// Dense matrices x [rows, cols], with their addresses in a table, to y [matrices, cols, rows_out]; blocks as above.
// Strides are arguments although they follow from sizes: as products they would take registers, and spill.
template <int S>
__global__ void __launch_bounds__(TileShape<S>::kThreads, TileShape<S>::kBlocksPerSm)
    transpose_list(const i64* matrices, u8* y, i64 rows, i64 rows_out, i64 cols, i64 x_stride, i64 y_stride, i64 y_matrix,
                   i64 tiles_across, i64 tiles_down, i64 size) {
    using Shape = TileShape<S>;
    __shared__ __align__(16) u8 memory[Shape::kBytes];
    const u32 strip = blockIdx.x / static_cast<u32>(tiles_down), matrix = strip / static_cast<u32>(tiles_across);
    const i64 row = static_cast<i64>(blockIdx.x - strip * static_cast<u32>(tiles_down)) * Shape::kRows;
    const i64 column = static_cast<i64>(strip - matrix * static_cast<u32>(tiles_across)) * Shape::kCols;
    const u8* x = reinterpret_cast<const u8*>(matrices[matrix]) + row * x_stride + column * size;
    y += matrix * y_matrix + column * y_stride + row * size;
    transpose_tile<S>(x, x_stride, rows - row, rows_out - row, cols - column, y, y_stride, static_cast<int>(size), memory);
}

// Two dimensions before the last: y is dense, and dimensions [.., d1, d2], with strides s0, s1 and s2 in x, number its
// rows. A group of threads copies `slices_per_row` slices of each row, one access of B bytes per thread.
template <int B>
__global__ void __launch_bounds__(256)
    transpose_rows(const u8* x, u8* y, i64 slices, i64 slices_per_row, i64 row_bytes, i64 threads_per_row, i64 d1, i64 d2,
                   i64 s0, i64 s1, i64 s2) {
    constexpr int kInFlight = B == 16 ? 4 : 8;
    const RowGroup group(threads_per_row);
    Raw<B> raw[kInFlight];
    i64 place[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
        const i64 slice = (static_cast<i64>(blockIdx.x) * kInFlight + k) * group.count + group.index;
        const u32 number = static_cast<u32>(slice), row = number / static_cast<u32>(slices_per_row);
        const i64 byte = (static_cast<i64>(number - row * static_cast<u32>(slices_per_row)) * group.threads + group.thread) * B;
        const u32 upper = row / static_cast<u32>(d2), i2 = row - upper * static_cast<u32>(d2);
        const u32 i0 = upper / static_cast<u32>(d1), i1 = upper - i0 * static_cast<u32>(d1);
        place[k] = slice < slices && byte < row_bytes ? row * row_bytes + byte : -1;
        if (place[k] >= 0) raw[k] = ptx::ld_stream<B>(x + i0 * s0 + i1 * s1 + i2 * s2 + byte);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
        if (place[k] >= 0) ptx::st<B>(y + place[k], raw[k]);
}

}  // namespace rtk
