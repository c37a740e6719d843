// fp8 of rows sorted by expert: 1 x 128 along rows, 128 x 1 along columns with transposed codes, or both. Groups of rows
// never cross from one expert to the next. Recipe: common/fp8_scale.cuh. An expert with rows s .. s + c - 1, whose blocks
// of 128 rows are the b-th and following ones of all, has
//
//     q        rows s .. of [rows, cols]
//     scale    [groups, c], from element s * groups on
//     q_t      [cols, c], from element s * cols on
//     scale_t  rows b .. of [row_blocks, cols]; rows past the last block are 0
//
// A persistent grid; q or q_t is null if not wanted.
#include "quant/experts.cuh"
#include "quant/tile_quantize.cuh"

namespace rtk {

template <typename T, typename F8, bool WIDE>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, Tile<16 / sizeof(T)>::kBlocksPerSm / (WIDE ? 1 : 2))
    quantize_fp8_experts(const T* x, const void* counts, F8* q, float* scale, F8* q_t, float* scale_t, i64 rows, i64 cols,
                         i64 x_stride, i64 experts, i64 count_width, i64 row_blocks, i64 column_tiles, i64 pow2) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ TileScratch<16 / sizeof(T)> scratch;
    const ExpertTable table(reinterpret_cast<u32*>(memory), counts, count_width, experts, rows);
    const u32 across = static_cast<u32>(column_tiles), tiles = table.blocks() * across;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        // As if the thread's number were new in each turn: what follows from it then takes no registers between them.
        Raw<4> thread = {threadIdx.x};
        ptx::forget(thread);
        const u32 block = index / across, group = index - block * across;
        const ExpertRows expert = table.find(block);
        const i64 first = expert.first_row, height = expert.rows, above = expert.above;
        const i64 row = first + above, column = static_cast<i64>(group) * kTileSide;
        const Tile<16 / sizeof(T)> tile(height - above, cols - column, static_cast<int>(thread.w[0]));
        TileOutput<F8> out = {};
        if (q != nullptr) {
            out.q = q + row * cols + column;
            out.stride = cols;
            out.scale = scale + first * column_tiles + group * height + above;
            out.scale_step = 1;
        }
        if (q_t != nullptr) {
            out.transposed = q_t + first * cols + column * height + above;
            out.pitch = height;
            out.column_scale = scale_t + block * cols + column;
        }
        quantize_tile<T, F8, WIDE, true, true, true>(tile, x + row * x_stride + column, x_stride, out, scratch,
                                                     pow2 != 0);
    }
    if (q_t != nullptr) {
        const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
        for (i64 i = table.blocks() * cols + blockIdx.x * blockDim.x + threadIdx.x; i < row_blocks * cols; i += step)
            scale_t[i] = 0.0f;
    }
}

}  // namespace rtk
