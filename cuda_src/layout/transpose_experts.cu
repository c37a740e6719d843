// Rows sorted by expert: transposes each expert's matrix [c, cols] by itself to [cols, p], p being c rounded up to a
// multiple of `pad_to` (the added rows are zeros). The results are stored one after another in y; the rest of its
// `rows_out` * cols elements is zeros. The number of rows per expert is known on the device only: every block of a
// persistent grid computes where they begin.
#include "layout/transpose_tile.cuh"

namespace rtk {

struct PaddedExperts {
    struct Entry {
        u32 row, out, tile;  // first of this expert: row of x, row of the result, line of tiles
    };
    Entry* entry;  // [experts + 1]
    int experts;

    // `counts`: of `width` bytes each. Negative ones count as 0, and experts end at row `rows` at the latest. The whole
    // block calls this; two barriers.
    RTK_DEVICE PaddedExperts(void* memory, const void* counts, i64 width, i64 count, i64 rows, u32 pad_to, u32 height)
        : entry(static_cast<Entry*>(memory)), experts(static_cast<int>(count)) {
        for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
            const i64 wanted = width == 8 ? static_cast<const i64*>(counts)[e] : static_cast<const i32*>(counts)[e];
            entry[e + 1].row = static_cast<u32>(min(max(wanted, 0ll), rows));
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
            const int lane = static_cast<int>(threadIdx.x);
            const u32 limit = static_cast<u32>(rows);
            Entry last = {0, 0, 0};
            if (lane == 0) entry[0] = last;
#pragma unroll 1
            for (int base = 0; base < experts; base += kWarp) {
                const int e = base + lane;
                const u32 end = prefix(e < experts ? entry[e + 1].row : 0u, last.row, limit);
                const u32 below = __shfl_up_sync(0xffffffffu, end, 1);
                const u32 own = end - (lane == 0 ? last.row : below);
                const u32 padded = (own + (pad_to - 1)) / pad_to * pad_to;
                const u32 out = prefix(padded, last.out, 0xffffffffu);
                const u32 tile = prefix((padded + (height - 1)) / height, last.tile, 0xffffffffu);
                if (e < experts) entry[e + 1] = {end, out, tile};
                last.row = __shfl_sync(0xffffffffu, end, kWarp - 1);
                last.out = __shfl_sync(0xffffffffu, out, kWarp - 1);
                last.tile = __shfl_sync(0xffffffffu, tile, kWarp - 1);
            }
        }
        __syncthreads();
    }

    RTK_DEVICE const Entry& end() const { return entry[experts]; }

    // The expert that owns this line of tiles.
    RTK_DEVICE int find(u32 tile) const {
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (entry[middle].tile <= tile) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }

   private:
    // Sum of the lanes up to this one and of `before`, at most `limit`.
    RTK_DEVICE static u32 prefix(u32 v, u32 before, u32 limit) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const u32 lower = __shfl_up_sync(0xffffffffu, v, offset);
            if (lane >= offset) v = min(v + lower, limit);
        }
        return min(v + before, limit);
    }
};

template <int S>
__global__ void __launch_bounds__(TileShape<S>::kThreads)
    transpose_experts(const u8* x, const void* counts, u8* y, i64 rows, i64 rows_out, i64 cols, i64 x_stride,
                      i64 experts, i64 count_width, i64 pad_to, i64 tiles_across, i64 size) {
    using Shape = TileShape<S>;
    extern __shared__ __align__(16) u8 table_memory[];
    __shared__ __align__(16) u8 memory[Shape::kBytes];
    const PaddedExperts table(table_memory, counts, count_width, experts, rows, static_cast<u32>(pad_to), Shape::kRows);
    const u32 tiles_in_line = static_cast<u32>(tiles_across), tiles = table.end().tile * tiles_in_line;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const u32 line = index / tiles_in_line;
        const i64 column = static_cast<i64>(index - line * tiles_in_line) * Shape::kCols;
        const int expert = table.find(line);
        const PaddedExperts::Entry first = table.entry[expert], next = table.entry[expert + 1];
        const i64 above = static_cast<i64>(line - first.tile) * Shape::kRows, pitch = next.out - first.out;
        transpose_tile<S>(x + (first.row + above) * x_stride + column * size, x_stride,
                          max(static_cast<i64>(next.row - first.row) - above, 0ll), pitch - above, cols - column,
                          y + (first.out * cols + column * pitch + above) * size, pitch * size, static_cast<int>(size),
                          memory);
        __syncthreads();
    }
    constexpr int kAccess = S != 0 ? 16 : 1;
    Raw<kAccess> zeros;
    clear(zeros);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x * kAccess;
    for (i64 at = table.end().out * cols * size + (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * kAccess;
         at < rows_out * cols * size; at += step)
        ptx::st<kAccess>(y + at, zeros);
}

}  // namespace rtk
