// The scan of lightning_scan.cu with wgmma and TMA (sm_90a), for bf16 heads of up to 128 elements that are not packed.
//
// A block owns one segment of a sequence and one head, and loops over chunks of 64 rows. Two warpgroups own 64 columns
// of value each, and hold the state's part for these as fp32 accumulators S^T [64 of d_v, d_k], so everything is
// transposed: a chunk's result is out^T = S^T left^T + value^T scores^T, where S^T is read from its registers (rounded
// to bf16); then S^T grows by value^T (decayed) right. A third warpgroup computes the scores of later chunks, which do
// not depend on the state, and leaves them decayed and masked in shared memory; a warp of a fourth one issues TMA
// loads. TMA moves rows in memory order, so with `reverse` row r of a tile is row 63 - r of the scan. TMA fills rows
// outside of the tensor with 0. The rows of a partial chunk are stored by threads, because a TMA store that begins
// before the tensor is an illegal instruction.
//
// Numerics: as lightning_scan.cu, except that value carries the decay of the state and of its update, and that scores
// and decay factors include `scale`. Powers of the decay never exceed 1.
//
// Grid: heads, segments of sequences.
#include "attention/lightning_segment.cuh"
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/stmatrix.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(512, 1)
    lightning_sm90(const __grid_constant__ ptx::TensorMap left_map, const __grid_constant__ ptx::TensorMap right_map,
                   const __grid_constant__ ptx::TensorMap value_map, const __grid_constant__ ptx::TensorMap out_map,
                   const float* decay, const float* initial, float* final, T* out, i64 segments, i64 heads, i64 length,
                   i64 d_k, i64 d_v, i64 state_row, i64 state_column, i64 lead, i64 reverse, double scale,
                   double initial_factor, double final_factor) {
    static_assert(is_same<T, bf16>::value, "the state meets left as bf16");
    constexpr int kWidth = 128, kStages = 3, kScoreWarps = 4, kStateWarps = 8;
    using Tile = Boxed<kScanRows, kWidth>;
    using Scores = Boxed<kScanRows, kScanRows>;
    constexpr u32 kStageBytes = 3 * Tile::kBytes;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress score_tiles = stages + kStages * kStageBytes;
    const ptx::SharedAddress out_tiles = score_tiles + 2 * Scores::kBytes;  // one box per warpgroup
    const Pipeline<kStages> pipe{out_tiles + Tile::kBytes};
    const Pipeline<2> score_pipe{pipe.barriers + Pipeline<kStages>::kBytes};
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int head = static_cast<int>(blockIdx.x), batch = static_cast<int>(blockIdx.y / static_cast<u32>(segments));
    const int segment = static_cast<int>(blockIdx.y) - batch * static_cast<int>(segments), all = static_cast<int>(length);
    const Segment own(segment, segments, all);
    const int chunks = (own.rows + kScanRows - 1) / kScanRows;
    const bool writes = out != nullptr;
    // The tensor's first row in a tile.
    auto row_of = [&](int chunk) {
        const int first = own.first + chunk * kScanRows;
        return reverse ? all - first - kScanRows : first;
    };
    const float rate = decay[head] * kLog2e;

    if (threadIdx.x == 0) {
        pipe.init(1, kStateWarps + (writes ? kScoreWarps : 0));
        score_pipe.init(kScoreWarps, kStateWarps);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kStateWarps + kScoreWarps) {
        ptx::registers_give<24>();
        if (warp != kStateWarps + kScoreWarps) return;
        PipelineState<kStages> state;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            pipe.acquire(state);
            if (lane == 0) {
                const ptx::SharedAddress to = stages + state.stage * kStageBytes;
                const ptx::SharedAddress full = pipe.expect(state, writes ? kStageBytes : 2 * Tile::kBytes);
                if (writes) Tile::fetch(to, left_map, full, row_of(chunk), head, batch);
                Tile::fetch(to + Tile::kBytes, right_map, full, row_of(chunk), head, batch);
                Tile::fetch(to + 2 * Tile::kBytes, value_map, full, row_of(chunk), head, batch);
            }
            __syncwarp();
            state.advance();
        }
        return;
    }

    const int t = lane % 4, own_row = warp % 4 * 16 + lane / 4;
    if (warp >= kStateWarps) {
        ptx::registers_give<88>();
        if (!writes) return;
        // Factors of this thread's products, the same in all chunks; -1: masked.
        float factor[kScanRows / 2];
#pragma unroll
        for (int i = 0; i < kScanRows / 2; ++i) {
            const int apart = own_row + i / 2 % 2 * 8 - (i / 4 * 8 + 2 * t + i % 2), rows = reverse ? -apart : apart;
            factor[i] = rows < 0 ? -1.0f : ptx::ex2(-rate * static_cast<float>(rows)) * static_cast<float>(scale);
        }
        // Lane 8m + r addresses row r of matrix m of four: 16 rows by 16 columns.
        const int named_row = warp % 4 * 16 + lane % 16, named_vector = lane / 16;
        PipelineState<kStages> state;
        PipelineState<2> score_state;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const ptx::SharedAddress left = stages + state.stage * kStageBytes;
            float s[kScanRows / 2];
            pipe.wait(state);
            ptx::wgmma_fence();
            multiply_rows<T, kScanRows, kScanRows, kWidth>(s, left, left + Tile::kBytes);
            ptx::wgmma_commit();
            score_pipe.acquire(score_state);
            ptx::wgmma_wait<0>();
            if (lane == 0) pipe.release(state);
            state.advance();
#pragma unroll
            for (int i = 0; i < kScanRows / 2; ++i) s[i] = factor[i] < 0.0f ? 0.0f : s[i] * factor[i];
            u32 packed[kScanRows / 16][4];
            pack_rows<T>(packed, s);
            const ptx::SharedAddress row = score_tiles + score_state.stage * Scores::kBytes + named_row * kTileRow;
#pragma unroll
            for (int k = 0; k < kScanRows / 16; ++k)
                ptx::stmatrix_x4(row + (((2 * k + named_vector) ^ (named_row & 7)) << 4), packed[k][0], packed[k][1], packed[k][2],
                                 packed[k][3]);
            ptx::fence_async_shared();
            score_pipe.commit_warp(score_state);
            score_state.advance();
        }
        return;
    }

    ptx::registers_take<200>();
    const int group = warp / 4, column = group * 64 + own_row;  // the first of this thread's two columns of value
    const i64 state_base = (static_cast<i64>(blockIdx.y) * heads + head) * d_k * d_v;
    auto state_at = [&](int i) {  // -1: there is no such element
        const int k = i / 4 * 8 + 2 * t + i % 2, v = column + i / 2 % 2 * 8;
        return k < d_k && v < d_v ? state_base + k * state_row + v * state_column : i64{-1};
    };
    float sums[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
        const i64 at = initial == nullptr ? -1 : state_at(i);
        sums[i] = at < 0 ? 0.0f : initial[at] * static_cast<float>(initial_factor);
    }
    // Decay factors of rows 8m + 2t + c of a tile: one for each m, 8 rows apart, times one for each c. `since`: for the
    // state before the chunk, including the scale; `until`: for the state after it.
    float eights[8], since[2], until[2];
    int pending = segment == 0 ? static_cast<int>(lead) : 0;
    auto in_eight = [&](int c) { return reverse ? 7 - 2 * t - c : 2 * t + c; };  // in the order of the scan
    auto set_since = [&] {
#pragma unroll
        for (int c = 0; c < 2; ++c)
            since[c] = ptx::ex2(-rate * static_cast<float>(in_eight(c) + 1 - pending)) * static_cast<float>(scale);
    };
#pragma unroll
    for (int m = 0; m < 8; ++m) eights[m] = ptx::ex2(-rate * static_cast<float>(8 * (reverse ? 7 - m : m)));
#pragma unroll
    for (int c = 0; c < 2; ++c) until[c] = ptx::ex2(-rate * static_cast<float>(7 - in_eight(c)));
    set_since();

    // Addresses at which lanes read rows of value for its transposed fragments and write rows of the result (8 rows by
    // 8 columns per matrix).
    const u8* const boxes = memory + (stages - ptx::shared_address(memory)) + 2 * Tile::kBytes + group * Tile::kBoxBytes;
    const int value_row = lane / 16 * 8 + lane % 8, value_vector = warp % 4 * 2 + lane / 8 % 2;
    const u32 value_at = value_row * kTileRow + ((value_vector ^ (value_row & 7)) << 4);
    const int out_row = lane / 16 * 8 + lane % 8;
    const ptx::SharedAddress out_tile = out_tiles + group * Tile::kBoxBytes;
    const ptx::SharedAddress out_at = out_tile + out_row * kTileRow + ((value_vector ^ (out_row & 7)) << 4);
    const bool speaks = threadIdx.x % 128 == 0;
    PipelineState<kStages> state;
    PipelineState<2> score_state;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const ptx::SharedAddress left = stages + state.stage * kStageBytes, right = left + Tile::kBytes;
        const int here = min(own.rows - chunk * kScanRows, kScanRows);
        float o[kScanRows / 2];
        u32 before[kWidth / 16][4], added[kScanRows / 16][4];
        pipe.wait(state);
        pack_rows<T>(before, sums);
        const float by = ptx::ex2(-rate * static_cast<float>(here - pending));
#pragma unroll
        for (float& x : sums) x *= by;
        auto fetch_value = [&](auto weight) {  // transposed, row 8m + 2t + c times weight(m, c)
#pragma unroll
            for (int k = 0; k < kScanRows / 16; ++k) {
                ptx::ldmatrix_x4_trans(added[k], boxes + state.stage * kStageBytes + value_at + k * (16 * kTileRow));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float pair[2];
                    unpack<T, 2>(Raw<4>{{added[k][i]}}, pair);
                    added[k][i] = packed_pair<T>(pair[0] * weight(2 * k + i / 2, 0), pair[1] * weight(2 * k + i / 2, 1));
                }
            }
        };
        if (here == kScanRows) {
            fetch_value([&](int m, int c) { return eights[7 - m] * until[c]; });
        } else {
            const int step = reverse ? -1 : 1, first = reverse ? kScanRows - 1 - 2 * t : 2 * t;
            fetch_value([&](int m, int c) {
                return ptx::ex2(-rate * static_cast<float>(max(here - 1 - first - step * (8 * m + c), 0)));
            });
        }
        if (writes) {
            ptx::wgmma_fence();
            const u64 rows = k_major_descriptor(left);
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k)
                ptx::wgmma_rs<T, false>(o, before[k], rows + k / 4 * (Tile::kBoxBytes >> 4) + k % 4 * kNextKMajor, k != 0);
            ptx::wgmma_commit();
        }
        ptx::wgmma_fence();
        multiply_packed<T, kScanRows>(sums, added, right, true);
        ptx::wgmma_commit();
        if (!writes) {
            ptx::wgmma_wait<0>();
            if (lane == 0) pipe.release(state);
            state.advance();
            pending = 0;
            continue;
        }
        ptx::wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < kScanRows / 2; ++i) o[i] *= eights[i / 4] * since[i % 2];
        if (pending != 0) pending = 0, set_since();
        score_pipe.wait(score_state);
        const u64 values = ptx::matrix_descriptor(left + 2 * Tile::kBytes + group * Tile::kBoxBytes, Tile::kBoxBytes);
        const u64 scores = k_major_descriptor(score_tiles + score_state.stage * Scores::kBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kScanRows / 16; ++k)
            ptx::wgmma_ss<T, true, false>(o, values + k * kNextColumnMajor, scores + k * kNextKMajor, 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        if (lane == 0) pipe.release(state), score_pipe.release(score_state);
        state.advance(), score_state.advance();

        if (speaks) ptx::bulk_store_wait_read();
        ptx::named_barrier_sync(1 + group, 128);  // the last chunk's rows have been stored
#pragma unroll
        for (int j = 0; j < kScanRows / 16; ++j)
            ptx::stmatrix_x4_trans(out_at + j * (16 * kTileRow), packed_pair<T>(o[8 * j], o[8 * j + 1]),
                                   packed_pair<T>(o[8 * j + 2], o[8 * j + 3]), packed_pair<T>(o[8 * j + 4], o[8 * j + 5]),
                                   packed_pair<T>(o[8 * j + 6], o[8 * j + 7]));
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + group, 128);
        if (here == kScanRows) {
            if (speaks) {
                ptx::tma_store_4d(out_map, out_tile, group * 64, row_of(chunk), head, batch);
                ptx::bulk_store_commit();
            }
            continue;
        }
        for (int i = static_cast<int>(threadIdx.x) % 128; i < kScanRows * 8; i += 128) {  // the last rows
            const int row = i / 8, vector = i % 8, at = row_of(chunk) + row;
            if (at < 0 || at >= all || group * 64 + vector * 8 >= d_v) continue;
            ptx::st<16>(out + ((batch * length + at) * heads + head) * d_v + group * 64 + vector * 8,
                        ptx::ld_shared_16(out_tile + row * kTileRow + ((vector ^ (row & 7)) << 4)));
        }
    }
    if (speaks) ptx::bulk_store_wait_read();

    if (final == nullptr) return;
    // Gradients decay the state by one more step (`lead` of the next scan), unless there were no rows and S is
    // unchanged.
    const float times =
        static_cast<float>(final_factor) * ptx::ex2(-rate * static_cast<float>(static_cast<int>(lead) - pending));
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
        const i64 at = state_at(i);
        if (at >= 0) final[at] = sums[i] * times;
    }
}

}  // namespace rtk
