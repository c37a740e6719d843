// Products whose result is known to be symmetric, on sm_90a, for a batch of matrices:
//   out[e] = alpha a[e] b[e]^T + beta add[e] + gamma I,   a, b [n, k], add and out [n, n] of the same 16-bit type.
// a and b are the same matrix, or two that commute; add is symmetric. Only the lower triangle is computed, and every
// block of 64 x 64 below the diagonal is stored twice, the second time transposed. Nothing is read above the diagonal of
// `add`, and the blocks on the diagonal are stored as they are computed.
//
// Grid: persistent, one block per SM, over the tiles of all matrices. A block has two consumer warpgroups, each with 64
// rows of a tile of 128 x COLS, and a producer warpgroup, of which one thread issues TMA loads, 64 of k per stage.
// ACROSS: a and b lie across, k rows of n columns (the product of a tall matrix with its transpose, which need not be
// transposed in memory for it).
//
// Numerics: sums are fp32 in the tensor cores over all of k; alpha, beta and gamma are applied to them in fp32, followed
// by one rounding.
#include "common/pipeline.cuh"
#include "common/vec.cuh"
#include "gemm/operand_sm90.cuh"
#include "ptx/registers.cuh"
#include "ptx/stmatrix.cuh"

namespace rtk {

// Tiles of the lower triangles, in squares of COLS x COLS, which have COLS / 128 tiles each. Squares are numbered in
// bands of kBand rows of squares, down the columns of a band first, so that blocks that run at the same time read both
// operands from L2.
template <int COLS>
struct TriangleTiles {
    static constexpr u32 kBand = 2048 / COLS, kEach = COLS / 128;
    u32 squares, of_matrix, count;  // rows of squares; tiles of a matrix; tiles of all

    RTK_DEVICE TriangleTiles(i64 n, i64 batch)
        : squares(static_cast<u32>(ceil_div(n, COLS))), of_matrix(squares * (squares + 1) / 2 * kEach),
          count(of_matrix * static_cast<u32>(batch)) {}

    RTK_DEVICE void find(u32 index, i32& row, i32& column, i32& matrix) const {
        const u32 which = index / of_matrix, inside = index - which * of_matrix;
        u32 square = inside / kEach, first = 0, height = min(squares, kBand);
        for (;;) {  // bands
            const u32 here = first * height + height * (height + 1) / 2;
            if (square < here) break;
            square -= here;
            first += height;
            height = min(squares - first, kBand);
        }
        u32 i, j;
        if (square < first * height) {
            j = square / height;
            i = first + square - j * height;
        } else {
            square -= first * height;
            j = first;
            for (u32 column_height = height; square >= column_height; --column_height) {
                square -= column_height;
                ++j;
            }
            i = j + square;
        }
        row = static_cast<i32>(i * COLS + inside % kEach * 128);
        column = static_cast<i32>(j * COLS);
        matrix = static_cast<i32>(which);
    }
};

template <typename T, bool ACROSS, int COLS, int STAGES, int SLOTS>
__global__ void __launch_bounds__(384, 1)
    symmetric_mm(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map,
                 const __grid_constant__ ptx::TensorMap out_map, const T* add, i64 n, i64 k, i64 batch, i64 add_pitch,
                 i64 add_matrix, double alpha, double beta, double gamma) {
    using Operands = TypedOperands<T, T, ACROSS, ACROSS, 2, 1, COLS>;
    constexpr int kConsumerWarps = 8, kDepth = Operands::kDepth, kBlocks = COLS / 64;
    constexpr u32 kBoxBytes = 64 * 128;
    static_assert(SLOTS % 2 == 0, "a box and its transpose");
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress boxes = stages + STAGES * Operands::kStageBytes;
    const Pipeline<STAGES> pipeline{boxes + 2 * SLOTS * kBoxBytes};
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (threadIdx.x == kConsumerWarps * kWarp) {
        ptx::tma_prefetch_map(a_map);
        ptx::tma_prefetch_map(b_map);
        ptx::tma_prefetch_map(out_map);
        pipeline.init(1, kConsumerWarps);
    }
    __syncthreads();
    const TriangleTiles<COLS> tiles(n, batch);
    const int depth_blocks = static_cast<int>(ceil_div(k, kDepth));
    PipelineState<STAGES> state;

    if (warp >= kConsumerWarps) {
        ptx::registers_give<40>();
        if (threadIdx.x != kConsumerWarps * kWarp) return;
        for (u32 index = blockIdx.x; index < tiles.count; index += gridDim.x) {
            i32 row, column, matrix;
            tiles.find(index, row, column, matrix);
            if (row >= n) continue;
#pragma unroll 1
            for (int i = 0; i < depth_blocks; ++i, state.advance()) {
                pipeline.acquire(state);
                const ptx::SharedAddress full = pipeline.expect(state, Operands::kStageBytes);
                Operands::fetch(a_map, b_map, stages + state.stage * Operands::kStageBytes, full, i * kDepth, row, matrix,
                                column, matrix, 0);
            }
        }
        return;
    }

    ptx::registers_take<232>();
    const int consumer = warp / 4, barrier = 1 + consumer;
    const int own_row = warp % 4 * 16 + lane / 4, own_column = lane % 4 * 2;  // of a box; + 8 is the other row
    const bool speaks = lane == 0;
    const float times = static_cast<float>(alpha), plus = static_cast<float>(beta), diagonal = static_cast<float>(gamma);
    int slot = 0;
    for (u32 index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        i32 tile_row, column, matrix;
        tiles.find(index, tile_row, column, matrix);
        if (tile_row >= n) continue;
        const i32 first_row = tile_row + 64 * consumer;
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

        // Two neighbours of each of this thread's rows in block b of 64 columns.
        u32 added[2][8][2] = {};
        const T* const from = add + matrix * add_matrix + own_column;
        auto load_added = [&](int b) {
            const bool wanted = add != nullptr && column + 64 * b <= first_row;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const i64 m = first_row + own_row + 8 * r, at = column + 64 * b + 8 * j;
                    added[b % 2][j][r] = 0u;
                    ptx::ld_keep_if<4>(wanted && m < n && at < n, added[b % 2][j][r], from + m * add_pitch + at);
                }
        };
        load_added(0);
        ptx::wgmma_wait<0>();
        if (speaks) pipeline.release(last);
        if (first_row >= n) continue;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            if (b + 1 < kBlocks) load_added(b + 1);
            const i32 block_column = column + 64 * b;
            if (block_column > first_row) continue;  // above the diagonal: the transpose of another block
            const bool below = block_column < first_row;
            u32 packed[8][2];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float more[2], v[2];
                    unpack<T, 2>(Raw<4>{{added[b % 2][j][r]}}, more);
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const bool on_diagonal = !below && own_row + 8 * r == 8 * j + own_column + c;
                        v[c] = fmaf(times, sums[32 * b + 4 * j + 2 * r + c], fmaf(plus, more[c], on_diagonal ? diagonal : 0.0f));
                    }
                    packed[j][r] = pack<T, 2>(v).w[0];
                }
            // The boxes that are overwritten have been read by TMA.
            if (speaks) ptx::bulk_store_wait_read_but<SLOTS / 2 - 1>();
            ptx::named_barrier_sync(barrier, 128);
            const ptx::SharedAddress box = boxes + (consumer * SLOTS + slot) * kBoxBytes, other = box + kBoxBytes;
            slot = slot + 2 == SLOTS ? 0 : slot + 2;
            const int named_row = warp % 4 * 16 + lane % 16, named_vector = lane / 16;
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                ptx::stmatrix_x4(box + named_row * 128 + (((j + named_vector) ^ (lane & 7)) << 4), packed[j][0], packed[j][1],
                                 packed[j + 1][0], packed[j + 1][1]);
            if (below) {
                const int vector = warp % 4 * 2 + lane / 8 % 2;
#pragma unroll
                for (int j = 0; j < 8; j += 2)
                    ptx::stmatrix_x4_trans(other + (8 * (j + lane / 16) + lane % 8) * 128 + ((vector ^ (lane & 7)) << 4),
                                           packed[j][0], packed[j][1], packed[j + 1][0], packed[j + 1][1]);
            }
            ptx::fence_async_shared();
            ptx::named_barrier_sync(barrier, 128);
            if (speaks) {
                if (warp % 4 == 0) ptx::tma_store_3d(out_map, box, block_column, first_row, matrix);
                if (warp % 4 == 1 && below) ptx::tma_store_3d(out_map, other, first_row, block_column, matrix);
                ptx::bulk_store_commit();
            }
        }
    }
    if (speaks) ptx::bulk_store_wait_read();
}

}  // namespace rtk
