// Statistics of logits = a b^T without storing them, on sm_90a: a [rows, depth] are hidden states, b [columns, depth] is
// the weight, both of the same 16-bit type. Every tile of 128 x COLS logits becomes a few numbers per row
// (loss/logprob_tile.cuh), which a second kernel folds to the parts of logprob.cuh.
//
// Grid: persistent, one block per SM. A block has two consumer warpgroups, each with 64 rows of a tile, and a producer
// warpgroup, of which one thread issues TMA loads, 64 of k per stage; it loads the next tile during the statistics.
//
// Numerics: sums are fp32 in the tensor cores over all of k. With ROUND, logits are rounded once to the type of the
// operands, as a product would round them. All statistics are fp32, in a fixed order.
#include "common/pipeline.cuh"
#include "gemm/operand_sm90.cuh"
#include "loss/logprob_tile.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <typename T, bool ROUND, int COLS, int STAGES>
__global__ void __launch_bounds__(384, 1)
    linear_logprob_tiles(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map,
                         const void* ids, float* tiles, float* targets, i64 rows, i64 columns, i64 depth, i64 ids_int64,
                         i64 ignore_index, i64 first, i64 wanted, i64 band, double factor) {
    using Operands = TypedOperands<T, T, false, false, 2, 1, COLS>;
    constexpr int kConsumerWarps = 8, kDepth = Operands::kDepth;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const Pipeline<STAGES> pipeline{stages + STAGES * Operands::kStageBytes};
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (threadIdx.x == kConsumerWarps * kWarp) {
        ptx::tma_prefetch_map(a_map);
        ptx::tma_prefetch_map(b_map);
        pipeline.init(1, kConsumerWarps);
    }
    __syncthreads();
    ProductTiles<128, COLS> all(nullptr, nullptr, nullptr, kNoGroups, 0, rows, columns, depth, static_cast<u32>(band));
    const u32 count = all.count();
    const int depth_blocks = static_cast<int>(ceil_div(depth, kDepth));
    PipelineState<STAGES> state;

    if (warp >= kConsumerWarps) {
        ptx::registers_give<40>();
        if (threadIdx.x != kConsumerWarps * kWarp) return;
        for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
            const ProductTile tile = all.find(index);
#pragma unroll 1
            for (int i = 0; i < depth_blocks; ++i, state.advance()) {
                pipeline.acquire(state);
                const ptx::SharedAddress full = pipeline.expect(state, Operands::kStageBytes);
                Operands::fetch(a_map, b_map, stages + state.stage * Operands::kStageBytes, full, i * kDepth, tile.row, 0,
                                tile.n, 0, 0);
            }
        }
        return;
    }

    ptx::registers_take<232>();
    const int consumer = warp / 4, own_row = warp % 4 * 16 + lane / 4;  // of 64; + 8 is the other row
    const bool speaks = lane == 0;
    const Ids of_rows{ids, ids_int64 != 0, 1, ignore_index, 0};
    const TilePlanes planes{tiles, static_cast<i64>(ceil_div(columns, COLS)), rows, (wanted & kWantsTotal) != 0,
                            (wanted & kWantsTop1) != 0};
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const ProductTile tile = all.find(index);
        const i64 row = tile.row + 64 * consumer + own_row;
        int place[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            place[r] = row + 8 * r < rows ? place_in_tile<COLS>(of_rows, row + 8 * r, first + tile.n) : -1;
        float sums[COLS / 2];
        PipelineState<STAGES> last = state;
        for (int i = 0; i < depth_blocks; ++i, state.advance()) {
            pipeline.wait(state);
            ptx::wgmma_fence();
            Operands::multiply(sums, stages + state.stage * Operands::kStageBytes, static_cast<u32>(consumer), 0, i != 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if (i != 0 && speaks) pipeline.release(last);
            last = state;
        }
        ptx::wgmma_wait<0>();
        if (speaks) pipeline.release(last);
        const int existing = static_cast<int>(min(columns - tile.n, static_cast<i64>(COLS)));
        finish_tile<T, ROUND, COLS>(sums, planes, targets, tile.n / COLS, row, place, existing, static_cast<float>(factor));
    }
}

// The parts [6, rows] of rows from the statistics of `count` tiles, whose columns begin at column `first` of the
// vocabulary; targets that no tile has written become -inf. Bad ids are reported as those of rows from `begin` on. A
// block has 32 rows: a lane owns a row, and its warps have every eighth tile each. A template only because every kernel
// is one; T is float.
template <typename T>
__global__ void __launch_bounds__(256)
    linear_logprob_fold(const T* tiles, const void* ids, T* parts, T* targets, i64* report, i64 rows, i64 columns, i64 count,
                        i64 wanted, i64 ids_int64, i64 ignore_index, i64 first, i64 vocabulary,
                        i64 begin) {
    constexpr int kWarps = 8;
    __shared__ float shared[kWarps][5][kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * kWarp + lane, at = row < rows ? row : 0;
    const bool totals = (wanted & kWantsTotal) != 0, top1 = (wanted & kWantsTop1) != 0;
    const i64 plane = count * rows;
    const T* const total_plane = tiles + 3 * plane;
    const T* const before_plane = total_plane + (totals ? plane : 0);
    RowParts<true, false> found;
    float before = -kInfinity;
#pragma unroll 4
    for (i64 i = warp; i < count; i += kWarps) {
        const i64 here = i * rows + at;
        RowParts<true, false> more;
        more.top = tiles[here], more.sum = tiles[plane + here], more.shifted = tiles[2 * plane + here];
        if (totals) more.total = total_plane[here];
        if (top1) before = fmaxf(before, before_plane[here]);
        found.fold(more);
    }
    shared[warp][0][lane] = found.top, shared[warp][1][lane] = found.sum, shared[warp][2][lane] = found.shifted;
    shared[warp][3][lane] = found.total, shared[warp][4][lane] = before;
    __syncthreads();
    if (warp != 0 || row >= rows) return;
#pragma unroll 1
    for (int w = 1; w < kWarps; ++w) {
        RowParts<true, false> more;
        more.top = shared[w][0][lane], more.sum = shared[w][1][lane], more.shifted = shared[w][2][lane];
        more.total = shared[w][3][lane];
        found.fold(more);
        before = fmaxf(before, shared[w][4][lane]);
    }
    const Ids all{ids, ids_int64 != 0, 1, ignore_index, vocabulary};
    const i64 id = all.load(row), local = id - first;
    const bool ignored = id == ignore_index;
    if (!ignored && !all.inside(id)) report[1] = id, report[2] = begin + row, report[0] = 2;
    if (ignored || local < 0 || local >= columns) targets[row] = -kInfinity;
    if (ignored) found.top = 0.0f, found.sum = 1.0f, found.shifted = 0.0f, found.total = 0.0f;
    found.store(parts, row, rows);
    parts[5 * rows + row] = before;
}

}  // namespace rtk
