// The computation of quant/quantize_fp8_experts.cu with transposed codes among the results and for many tiles, for
// sm_90: up to two tiles are in flight by TMA, and warps do not wait for each other at barriers (quant/tile_patch.cuh).
//
// The tensor map has boxes of 16 rows by 128 columns. cols is a multiple of 8.
#include "common/vec.cuh"
#include "quant/tile_stream.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(kPatchThreads, 1)
    quantize_fp8_experts_stream(const __grid_constant__ ptx::TensorMap x, const void* counts, e4m3* q, float* scale,
                                e4m3* q_t, float* scale_t, u32* counter, i64 rows, i64 cols, i64 experts, i64 count_width,
                                i64 row_blocks, i64 pow2) {
    using Stream = PatchStream<2, 1>;
    __shared__ PatchShared<1> shared;
    __shared__ PatchOutput kept[StreamWalk::kKept];
    __shared__ u64 known[StreamWalk::kKept];
    __shared__ u64 barriers[Stream::kBarriers];
    extern __shared__ __align__(128) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(cols), true, pow2 != 0};
    const Stream stream(memory, barriers);
    if (threadIdx.x == kPatchFetcher) stream.init_first(), stream.init_rest();
    shared.init();
    StreamWalk::init(known);
    const TilePlaces places(memory + Stream::kBytes, counts, count_width, experts, rows, cols);
    const StreamWalk walk(places, out, static_cast<u32>(cols), kept, known, counter);
    if (threadIdx.x >= kPatchWorkers) {
        help(shared, walk, out.pow2, [&](const PatchOutput& place, u32 nth) { stream.fetch(place, nth, x); });
    } else {
#pragma unroll 1
        for (u32 nth = 0; walk[nth].rows != 0; ++nth) {
            const PatchOutput& place = walk.at(nth);
            Patch v[1];
            const ptx::SharedAddress own = stream.wait(nth);
#pragma unroll
            for (int r = 0; r < kPatchRows; ++r) unpack<T, 8>(stream.read(own, r), v[0][r]);
            stream.release(nth);
            if (place.rows < static_cast<u32>(kTileSide)) cut_rows(v[0], place.rows);
            float row_maxima[kPatchRows];
            shared.add_maxima(v, row_maxima);
            if (q != nullptr) shared.quantize_rows(v, row_maxima, place, out.cols, walk.scale_step(), out.pow2);
            shared.stage_columns(v, nth);
            shared.store_column_ends(place, nth);
        }
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

}  // namespace rtk
