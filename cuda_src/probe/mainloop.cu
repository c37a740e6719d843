// A small persistent matrix product from the shared parts alone, to test them together: scheduler, pipeline, main loop
// and epilogue. out[m, n] = scale[n] * sum over k of a[m, k] b[n, k] + bias[n], a [rows, depth], b [columns, depth].
// Two consumer warpgroups own 64 of a tile's 128 rows each; one thread of a third loads the operands.
#include "common/tile_scheduler.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/mainloop.cuh"

namespace rtk {

template <typename T, int STAGES, bool PROMOTES>
__global__ void __launch_bounds__(kRouterThreads, 1)
    probe_mainloop(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                   const __grid_constant__ ptx::TensorMap out, const float* scale, const float* bias, i64 rows, i64 columns,
                   i64 depth, i64 promote) {
    using Output = StagedOutput<T, kRouterTile>;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* staged = memory + (stages - ptx::shared_address(memory)) + STAGES * KMajorOperands<T>::kStageBytes;
    const Pipeline<STAGES> pipeline{ptx::shared_address(staged + 2 * Output::kBytes)};
    PipelineState<STAGES> state;
    const Fragment place;
    const int group = place.warp / 4, blocks = static_cast<int>(ceil_div(depth, kBlockDepth));
    const KMajorOperands<T> operands{a, b, group * 64 * kTileRow};
    auto scheduler = scheduled(MatrixTiles<kRouterTile, kRouterTile, 8>(rows, columns), StaticSource());
    Tile tile;
    if (threadIdx.x == kConsumerWarps * kWarp) pipeline.init(1, kConsumerWarps);
    __syncthreads();

    if (place.warp >= kConsumerWarps) {
        ptx::registers_give<kProducerRegisters>();
        if (threadIdx.x == kConsumerWarps * kWarp)
            while (scheduler.next(tile))
                produce_tile(operands, pipeline, state, stages, blocks, tile.row, static_cast<i64>(tile.n) * kRouterTile);
    } else {
        ptx::registers_take<kConsumerRegisters>();
        const Output output{staged + group * Output::kBytes, 1 + group};
        while (scheduler.next(tile)) {
            float sums[64];
            if constexpr (PROMOTES) {
                sum_products(sums, operands, PromoteEvery{static_cast<int>(promote)}, pipeline, state, stages, blocks);
            } else {
                sum_products(sums, operands, KeepSums{}, pipeline, state, stages, blocks);
            }
            const i64 n = static_cast<i64>(tile.n) * kRouterTile;
            const TilePart part{tile.row + 64 * group, n, static_cast<int>(tile.rows) - 64 * group,
                                static_cast<int>(min(columns - n, static_cast<i64>(kRouterTile)))};
            output.open();
            finish_tile(sums, part, steps(ColumnScale{scale}, Bias<float>{bias}), output);
            output.send(out, part);
        }
        output.close();
    }
}

}  // namespace rtk
