// fp8 of rows sorted by expert: 1 x 128 along rows, 128 x 1 along columns with transposed codes, or both. Groups of rows
// never cross from one expert to the next. Recipe: common/fp8_scale.cuh. An expert with rows s .. s + c - 1, whose blocks
// of 128 rows are the b-th and following ones of all, has
//
//     q        rows s .. of [rows, cols]
//     scale    [groups, c], from element s * groups on
//     q_t      [cols, c], from element s * cols on
//     scale_t  rows b .. of [row_blocks, cols]; rows past the last block are 0
//
// A persistent grid; q or q_t is null if not needed.
#include "quant/expert_output.cuh"
#include "quant/tile_quantize.cuh"

namespace rtk {

// One tile, computed by one thread and kept in shared memory, where it costs no registers.
template <typename T, typename F8>
struct ExpertTile {
    const T* x;
    TileOutput<F8> out;
    TileExtent extent;
};

template <typename T, typename F8, bool ALIGNED16>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, Tile<16 / sizeof(T)>::kBlocksPerSm / (ALIGNED16 ? 1 : 2))
    quantize_fp8_experts(const T* x, const void* counts, F8* q, float* scale, F8* q_t, float* scale_t, i64 rows, i64 cols,
                         i64 x_stride, i64 experts, i64 count_width, i64 row_blocks, i64 column_tiles, i64 pow2) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ TileScratch<16 / sizeof(T)> scratch;
    __shared__ ExpertTile<T, F8> jobs[2];
    const ExpertTable table(memory, counts, count_width, experts, rows);
    auto tiles = [&] { return table.blocks() * static_cast<u32>(column_tiles); };

    auto prepare = [&](u32 index, ExpertTile<T, F8>& job) {
        if (threadIdx.x != 0 || index >= tiles()) return;
        const u32 across = static_cast<u32>(column_tiles), block = index / across, group = index - block * across;
        const ExpertRows expert = table.find(block);
        const i64 row = static_cast<i64>(expert.first_row) + expert.above, column = static_cast<i64>(group) * kTileSide;
        job.x = x + row * x_stride + column;
        job.extent = {static_cast<i64>(expert.rows) - expert.above, cols - column};
        ExpertOutput<F8>{q, scale, q_t, scale_t, cols, column_tiles}.tile(expert, block, group, job.out);
    };
    int phase = 0;
    prepare(blockIdx.x, jobs[0]);
    for (u32 index = blockIdx.x; index < tiles(); index += gridDim.x, phase ^= 1) {
        __syncthreads();
        prepare(index + gridDim.x, jobs[phase ^ 1]);
        const ExpertTile<T, F8>& job = jobs[phase];
        quantize_tile<T, F8, ALIGNED16, true, true, true>(job.extent, job.x, x_stride, job.out, scratch, pow2 != 0);
    }
    if (q_t != nullptr) {
        const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
        for (i64 i = table.blocks() * cols + blockIdx.x * blockDim.x + threadIdx.x; i < row_blocks * cols; i += step)
            scale_t[i] = 0.0f;
    }
}

}  // namespace rtk
