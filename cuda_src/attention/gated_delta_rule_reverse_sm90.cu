// Gradients of the gated delta rule from the last chunk to the first, with wgmma (sm_90a): gated_delta_rule_reverse.cu has the
// formulas and the same arguments and results.
//
// A block owns one sequence, one value head and 64 columns of v for each of its one or two consumer warpgroups
// (attention/gated_delta_rule_sm90.cuh), which hold dS^T in registers and compute
//     dU^T = dO^T P + F (dS^T K^T),  dR^T = dU^T T,
//     dS^T before the chunk = exp(c_end) dS^T + scale (E dO)^T Q - (beta E dR)^T K,
// where factors of tokens multiply columns. dR of a chunk is left in the place of its dO, dV in a box of the warpgroup's; both
// are stored while the first products of the chunk before it run. Without a correction (kUncorrected) dR is dU.
// Without `dv` it is the first pass over segments, which writes `starts` only. Grid: tiles of columns, heads, segments.
#include "attention/gated_delta_rule_sm90.cuh"

namespace rtk {

template <typename T, int DK, int KIND>
__global__ void __launch_bounds__(384, 1)
    gated_delta_rule_reverse_sm90(const T* q, const T* k, const T* after, const T* dout, const T* solve, const T* inner,
                                  const float* rows, const float* skip, const float* dfinal, float* dinitial, float* starts,
                                  const i32* cu, T* dv, T* dstates, T* drest, i64 segment, i64 length, i64 heads, i64 key_heads,
                                  i64 d_k, i64 d_v, i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head,
                                  i64 dout_batch, i64 dout_row, i64 dout_head, i64 stages, double scale) {
    constexpr bool kChannels = KIND == static_cast<int>(DeltaKind::kChannels);
    constexpr bool kCorrected = KIND != static_cast<int>(DeltaKind::kUncorrected);
    constexpr u32 kKeyBytes = Boxed<kDelta, DK>::kBytes, kBoxBytes = kDelta * kTileRow;
    constexpr int kParts = solve_parts(KIND);
    constexpr int kFactors = 4;  // of a token: beta, that of dS^T K^T, that of dR, that of dO
    extern __shared__ u8 memory[];
    const ptx::SharedAddress tiles = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const tile_bytes = memory + (tiles - ptx::shared_address(memory));
    const int groups = static_cast<int>(blockDim.x) / 128 - 1, count = static_cast<int>(stages);
    const DeltaStage stage(kKeyBytes, groups, true, kParts, true, kChannels);
    const u32 states_at = count * stage.bytes, dv_at = states_at + groups * (DK * kTileRow), factors_at = dv_at + groups * kBoxBytes;
    TileRing ring(tiles + factors_at + groups * (4 * kFactors * kDelta * 4), count);

    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int group = warp / 4, head = static_cast<int>(blockIdx.y);
    const DeltaSegment own = delta_segment(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), segment, length, cu);
    const bool passes_on = segment != 0 && dv == nullptr;
    if (!own.exists() || (passes_on && own.begins)) return;
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int first_column = static_cast<int>(blockIdx.x) * groups * 64;
    const i64 batch = own.batch;
    if (threadIdx.x == 0) ring.init(4 * groups);
    __syncthreads();

    if (group == groups) {
        ptx::registers_give<72>();
        const int thread = static_cast<int>(threadIdx.x) % 128, k_vectors = static_cast<int>(d_k) / 8;
        if constexpr (!kChannels) {
            q += batch * q_batch + own.first * q_row + key_head * q_head;
            k += batch * k_batch + own.first * k_row + key_head * k_head;
        }
        dout += batch * dout_batch + own.first * dout_row + head * dout_head + first_column;
        produce_tiles(ring, chunks, [&](int use, int at_stage) {
            const int chunk = chunks - 1 - use, here = own.rows - chunk * kDelta;
            const ptx::SharedAddress to = tiles + at_stage * stage.bytes;
            const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
            if constexpr (kChannels) {
                fetch_boxes<DK>(thread, to, k + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_boxes<DK>(thread, to + stage.after, after + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_boxes<DK>(thread, to + stage.queries, q + at * kDelta * d_k, d_k, kDelta, k_vectors);
            } else {
                fetch_boxes<DK>(thread, to, k + i0 * k_row, k_row, here, k_vectors);
                fetch_boxes<DK>(thread, to + stage.queries, q + i0 * q_row, q_row, here, k_vectors);
            }
            if (thread < kRowKinds * kDelta / 4)
                ptx::cp_async_16(to + stage.numbers + thread * 16, rows + at * (kRowKinds * kDelta) + thread * 4);
            for (int i = 0; i < groups; ++i)
                fetch_boxes<64>(thread, to + stage.values + i * kBoxBytes, dout + i0 * dout_row + 64 * i, dout_row, here,
                                (static_cast<int>(d_v) - first_column) / 8 - 8 * i);
            fetch_solve<kParts>(thread, to + stage.solve, solve, at);
            fetch_boxes<64>(thread, to + stage.inner, inner + at * (kDelta * kDelta), kDelta, kDelta, 8);
        });
        return;
    }

    ptx::registers_take<216>();
    const int t = lane % 4, column0 = first_column + group * 64, columns = passes_on ? 0 : static_cast<int>(d_v) - column0;
    const int own_column = column0 + warp % 4 * 16 + lane / 4;
    const i64 state_head = batch * heads + head, segment_head = static_cast<i64>(blockIdx.z) * heads + head;
    const WarpColumns place(warp, lane);
    const ptx::SharedAddress state_box = tiles + states_at + group * (DK * kTileRow), dv_box = tiles + dv_at + group * kBoxBytes;
    float* const factors = reinterpret_cast<float*>(tile_bytes + factors_at) + warp * (kFactors * kDelta);
    const float *const betas = factors, *const of_state = factors + kDelta, *const of_rest = of_state + kDelta;
    const float* const of_dout = of_rest + kDelta;
    const float by_dout = skip != nullptr ? skip[head] : 0.0f;
    dv += (((cu != nullptr ? 0 : batch * length) + own.first) * heads + head) * d_v + column0;
    TransposedState<DK> state;
    state.load(own.ends ? dfinal : passes_on ? nullptr : starts, own.ends ? state_head : segment_head + heads, d_k, d_v, own_column,
               lane);
    auto finish = [&](int chunk, int at_stage) {
        __syncwarp();
        place.store<kDelta>(drest + ((own.chunk + chunk) * heads + head) * kDelta * d_v + column0, d_v, kDelta, columns,
                            tiles + at_stage * stage.bytes + stage.values + group * kBoxBytes, lane);
        place.store<kDelta>(dv + static_cast<i64>(chunk) * kDelta * heads * d_v, heads * d_v, own.rows - chunk * kDelta, columns, dv_box,
                            lane);
    };

    int last_stage = 0;
#pragma unroll 1
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        ring.wait();
        const u32 at = ring.stage * stage.bytes;
        const ptx::SharedAddress keys = tiles + at, value_box = keys + stage.values + group * kBoxBytes;
        const float* const numbers = reinterpret_cast<const float*>(tile_bytes + at + stage.numbers);
        u32 rounded[DK / 16][4], values[kDelta / 16][4], words[kDelta / 16][4];
        place.read(values, tile_bytes + at + stage.values + group * kBoxBytes);
        pack_rows<T>(rounded, state.sums);
#pragma unroll
        for (auto& four : rounded) ptx::wgmma_pin(four);
#pragma unroll
        for (auto& four : values) ptx::wgmma_pin(four);
        float product[kDelta / 2], rest[kDelta / 2];  // dS^T K^T; dO^T P, then dU^T, then dR^T
        ptx::wgmma_fence();
        packed_by_rows<T>(product, rounded, kChannels ? keys + stage.after : keys, false);
        multiply_packed<T, kDelta>(rest, values, keys + stage.inner, false);
        ptx::wgmma_commit();
        if (chunk + 1 < chunks) {
            finish(chunk + 1, last_stage);
            ring.release(last_stage);
        }
        __syncwarp();
        place.write(state_box, rounded);
        __syncwarp();
        place.store<DK>(dstates + ((own.chunk + chunk) * heads + head) * d_k * d_v + column0, d_v, static_cast<int>(d_k), columns,
                        state_box, lane);
        const float end = kChannels ? 0.0f : numbers[kDecays * kDelta + kDelta - 1];
#pragma unroll
        for (int i = lane; i < kDelta; i += kWarp) {
            const float beta = numbers[kBetas * kDelta + i];
            factors[i] = beta;
            if constexpr (kChannels) {
                factors[2 * kDelta + i] = -beta;
                factors[3 * kDelta + i] = static_cast<float>(scale);
            } else {
                const float c = numbers[kDecays * kDelta + i], norm = numbers[kKeyNorms * kDelta + i], since = ptx::ex2(c);
                factors[kDelta + i] = norm * decay_between(end, c);
                factors[2 * kDelta + i] = -beta * norm * since;
                factors[3 * kDelta + i] = static_cast<float>(scale) * numbers[kQueryNorms * kDelta + i] * since;
            }
        }
        __syncwarp();
        if constexpr (kChannels) state.decay_channels(numbers, t);
        else state.decay(ptx::ex2(end));
        ptx::wgmma_wait<0>();
        if constexpr (!kChannels) scale_columns(product, of_state, t);
#pragma unroll
        for (int i = 0; i < kDelta / 2; ++i) rest[i] += product[i];
        u32 scaled[kDelta / 16][4];
        scale_tokens<T>(scaled, values, of_dout, t);
#pragma unroll
        for (auto& four : scaled) ptx::wgmma_pin(four);
        if constexpr (kCorrected) {
            pack_rows<T>(words, rest);
#pragma unroll
            for (auto& four : words) ptx::wgmma_pin(four);
            ptx::wgmma_fence();
            multiply_packed<T, kDelta>(rest, words, keys + stage.solve, false);
            if constexpr (kParts == 2) multiply_packed<T, kDelta>(rest, words, keys + stage.solve + kBoxBytes, true);
            ptx::wgmma_commit();
            multiply_packed<T, kDelta>(state.sums, scaled, keys + stage.queries, true);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            u32 factored[kDelta / 16][4];
            pack_tokens<T>(factored, rest, of_rest, t);
#pragma unroll
            for (auto& four : factored) ptx::wgmma_pin(four);
            ptx::wgmma_fence();
            multiply_packed<T, kDelta>(state.sums, factored, keys, true);
            ptx::wgmma_commit();
            pack_rows<T>(words, rest);
        } else {
            ptx::wgmma_fence();
            multiply_packed<T, kDelta>(state.sums, scaled, keys + stage.queries, true);
            ptx::wgmma_commit();
            pack_rows<T>(words, rest);
        }
        place.write(value_box, words);  // dR
        scale_columns(rest, betas, t);
        if (skip != nullptr) {
#pragma unroll
            for (int k4 = 0; k4 < kDelta / 16; ++k4)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float pair[2];
                    unpack<T, 2>(Raw<4>{{values[k4][i]}}, pair);
                    rest[8 * k4 + 2 * i] += by_dout * pair[0], rest[8 * k4 + 2 * i + 1] += by_dout * pair[1];
                }
        }
        pack_rows<T>(words, rest);
        __syncwarp();
        place.write(dv_box, words);
        ptx::wgmma_wait<0>();
        last_stage = ring.stage;
        ring.advance();
    }
    if (chunks > 0) finish(0, last_stage);
    if (passes_on || (own.begins && dinitial != nullptr))
        state.store_to(passes_on ? starts : dinitial, passes_on ? segment_head : state_head, d_k, d_v, own_column, lane);
}

}  // namespace rtk
