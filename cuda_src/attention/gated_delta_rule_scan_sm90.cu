// The gated delta rule from chunk to chunk, forward, with wgmma (sm_90a): gated_delta_rule_scan.cu and ssd_scan.cu have the
// same arguments and results.
//
// A block owns one sequence, one value head and 64 columns of v for each of its one or two consumer warpgroups
// (attention/gated_delta_rule_sm90.cuh). With the state S^T in registers, a consumer computes
//     R^T = beta (V^T - S^T (E K)^T),  U^T = R^T T^T,  out^T = scale S^T (E Q)^T + U^T P^T,
//     S^T = exp(c_end) S^T + (F U)^T K,
// where factors of tokens multiply columns. A chunk's result is left in the place of its values, and stored while
// the next chunk's first products run; the stage is released then. Without a correction (kUncorrected) U = beta V.
//
// With WRITES, `out` is given, otherwise `states` and `updates`, or neither in the first pass over segments; other pointers may
// be null as there. (ptxas serialises products whose number in flight depends on anything at run time.) Factors of tokens are
// computed by each warp for itself. Grid: tiles of columns, heads, segments.
#include "attention/gated_delta_rule_sm90.cuh"

namespace rtk {

template <typename T, int DK, int KIND, bool WRITES>
__global__ void __launch_bounds__(384, 1)
    gated_delta_rule_scan_sm90(const T* q, const T* k, const T* after, const T* v, const T* solve, const T* inner,
                               const float* rows, const float* skip, const float* initial, float* final, float* ends, const i32* cu,
                               T* out, T* states, T* updates, i64 segment, i64 length, i64 heads, i64 key_heads, i64 d_k, i64 d_v,
                               i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row,
                               i64 v_head, i64 stages, double scale) {
    constexpr bool kChannels = KIND == static_cast<int>(DeltaKind::kChannels);
    constexpr bool kCorrected = KIND != static_cast<int>(DeltaKind::kUncorrected);
    constexpr u32 kKeyBytes = Boxed<kDelta, DK>::kBytes, kBoxBytes = kDelta * kTileRow;
    constexpr int kParts = solve_parts(KIND);
    // Of a token: beta, before, later, and that of the query. With T in two parts betas are read where they are: three stages fit.
    constexpr bool kOwnBetas = kParts != 2;
    constexpr int kFactors = kOwnBetas ? 4 : 3;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress tiles = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const tile_bytes = memory + (tiles - ptx::shared_address(memory));
    const int groups = static_cast<int>(blockDim.x) / 128 - 1, count = static_cast<int>(stages);
    const DeltaStage stage(kKeyBytes, groups, WRITES, kParts, WRITES, kChannels);
    const u32 states_at = count * stage.bytes, factors_at = states_at + (states != nullptr ? groups * DK * kTileRow : 0);
    const u32 ring_at = factors_at + groups * (4 * kFactors * kDelta * 4);
    TileRing ring(tiles + ring_at, count);

    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int group = warp / 4, head = static_cast<int>(blockIdx.y);
    const DeltaSegment own = delta_segment(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), segment, length, cu);
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int first_column = static_cast<int>(blockIdx.x) * groups * 64;
    const bool passes_on = !WRITES && segment != 0 && updates == nullptr;  // the first pass over segments
    if (passes_on ? own.ends || !own.exists() || (own.begins && first_column >= d_v) : !own.exists()) return;
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
        v += batch * v_batch + own.first * v_row + head * v_head + first_column;
        produce_tiles(ring, chunks, [&](int chunk, int at_stage) {
            const ptx::SharedAddress to = tiles + at_stage * stage.bytes;
            const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
            const int here = own.rows - chunk * kDelta;
            if constexpr (kChannels) {
                fetch_boxes<DK>(thread, to, k + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_boxes<DK>(thread, to + stage.after, after + at * kDelta * d_k, d_k, kDelta, k_vectors);
                if constexpr (WRITES) fetch_boxes<DK>(thread, to + stage.queries, q + at * kDelta * d_k, d_k, kDelta, k_vectors);
            } else {
                fetch_boxes<DK>(thread, to, k + i0 * k_row, k_row, here, k_vectors);
                if constexpr (WRITES) fetch_boxes<DK>(thread, to + stage.queries, q + i0 * q_row, q_row, here, k_vectors);
            }
            if (thread < kRowKinds * kDelta / 4)
                ptx::cp_async_16(to + stage.numbers + thread * 16, rows + at * (kRowKinds * kDelta) + thread * 4);
            for (int i = 0; i < groups; ++i)
                fetch_boxes<64>(thread, to + stage.values + i * kBoxBytes, v + i0 * v_row + 64 * i, v_row, here,
                                (static_cast<int>(d_v) - first_column) / 8 - 8 * i);
            fetch_solve<kParts>(thread, to + stage.solve, solve, at);
            if constexpr (WRITES) fetch_boxes<64>(thread, to + stage.inner, inner + at * (kDelta * kDelta), kDelta, kDelta, 8);
        });
        return;
    }

    ptx::registers_take<216>();
    const int t = lane % 4, column0 = first_column + group * 64, columns = passes_on ? 0 : static_cast<int>(d_v) - column0;
    const int own_column = column0 + warp % 4 * 16 + lane / 4;
    const WarpColumns place(warp, lane);
    const ptx::SharedAddress state_box = tiles + states_at + group * (DK * kTileRow);
    float* const factors = reinterpret_cast<float*>(tile_bytes + factors_at) + warp * (kFactors * kDelta);
    const float *const before = factors + (kFactors - 3) * kDelta, *const later = before + kDelta, *const of_query = later + kDelta;
    const float by_value = skip != nullptr ? skip[head] : 0.0f;
    const i64 result_row = WRITES ? heads * d_v : d_v;
    if constexpr (WRITES) out += (((cu != nullptr ? 0 : batch * length) + own.first) * heads + head) * d_v + column0;
    const bool of_transition = passes_on && column0 >= d_v;
    const int transition_column = own_column - (static_cast<int>(d_v) + 63) / 64 * 64;
    TransposedState<DK> state;
    if (of_transition) state.load_identity(transition_column, lane);
    else
        state.load(own.begins ? initial : passes_on ? nullptr : ends,
                   (own.begins ? batch : static_cast<i64>(blockIdx.z) - 1) * heads + head, d_k, d_v, own_column, lane);
    int result = passes_on ? static_cast<int>(blockIdx.z) : own.ends && final != nullptr ? own.batch : -1;
    int* const kept = reinterpret_cast<int*>(tile_bytes + ring_at + 16 * count) + warp;  // for want of a register
    if (WRITES && lane == 0) *kept = result;
    __syncwarp();
    auto finish = [&](int chunk, int at_stage) {
        const ptx::SharedAddress box = tiles + at_stage * stage.bytes + stage.values + group * kBoxBytes;
        const int here = own.rows - chunk * kDelta;
        T* const to = WRITES ? out + static_cast<i64>(chunk) * kDelta * heads * d_v
                             : updates + ((own.chunk + chunk) * heads + head) * kDelta * d_v + column0;
        __syncwarp();
        place.store<kDelta>(to, result_row, WRITES ? here : kDelta, columns, box, lane);
    };

    int last_stage = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ring.wait();
        const u32 at = ring.stage * stage.bytes;
        const ptx::SharedAddress keys = tiles + at, value_box = keys + stage.values + group * kBoxBytes;
        const float* const numbers = reinterpret_cast<const float*>(tile_bytes + at + stage.numbers);
        u32 rounded[DK / 16][4], values[kDelta / 16][4];
        pack_rows<T>(rounded, state.sums);
#pragma unroll
        for (auto& words : rounded) ptx::wgmma_pin(words);
        float product[kDelta / 2], result[kDelta / 2];  // S^T K^T, then U^T; and out^T
        ptx::wgmma_fence();
        if constexpr (kCorrected) {
            packed_by_rows<T>(product, rounded, keys, false);
            ptx::wgmma_commit();
        }
        if constexpr (WRITES) {
            packed_by_rows<T>(result, rounded, keys + stage.queries, false);
            ptx::wgmma_commit();
        }
        if (chunk > 0) {
            finish(chunk - 1, last_stage);
            ring.release(last_stage);
        }
        if (states != nullptr) {
            __syncwarp();
            place.write(state_box, rounded);
            __syncwarp();
            place.store<DK>(states + ((own.chunk + chunk) * heads + head) * d_k * d_v + column0, d_v, static_cast<int>(d_k), columns,
                            state_box, lane);
        }
        const float end = kChannels ? 0.0f : numbers[kDecays * kDelta + kDelta - 1];
        __syncwarp();
#pragma unroll
        for (int i = lane; i < kDelta; i += kWarp) {
            if constexpr (kOwnBetas) factors[i] = numbers[kBetas * kDelta + i];
            if constexpr (kChannels) continue;
            const float c = numbers[kDecays * kDelta + i], norm = numbers[kKeyNorms * kDelta + i], since = ptx::ex2(c);
            factors[(kFactors - 3) * kDelta + i] = norm * since;
            factors[(kFactors - 2) * kDelta + i] = norm * decay_between(end, c);
            factors[(kFactors - 1) * kDelta + i] = static_cast<float>(scale) * numbers[kQueryNorms * kDelta + i] * since;
        }
        __syncwarp();
        const float* const betas = kOwnBetas ? factors : numbers + kBetas * kDelta;
        place.read(values, tile_bytes + at + stage.values + group * kBoxBytes);
        u32 update[kDelta / 16][4], decayed[kDelta / 16][4];
        if constexpr (kCorrected) {
            ptx::wgmma_wait<WRITES ? 1 : 0>();
#pragma unroll
            for (int k4 = 0; k4 < kDelta / 16; ++k4)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * k4 + i / 2 * 8 + 2 * t, sum = 8 * k4 + 2 * i;
                    const float2 beta = *reinterpret_cast<const float2*>(betas + token);
                    float2 by = make_float2(1.0f, 1.0f);
                    if constexpr (!kChannels) by = *reinterpret_cast<const float2*>(before + token);
                    float pair[2];
                    unpack<T, 2>(Raw<4>{{values[k4][i]}}, pair);
                    values[k4][i] = packed_pair<T>(beta.x * (pair[0] - by.x * product[sum]), beta.y * (pair[1] - by.y * product[sum + 1]));
                }
#pragma unroll
            for (auto& words : values) ptx::wgmma_pin(words);
            ptx::wgmma_fence();
            packed_by_rows<T>(product, values, keys + stage.solve, false);
            if constexpr (kParts == 2) packed_by_rows<T>(product, values, keys + stage.solve + kBoxBytes, true);
            ptx::wgmma_commit();
            if constexpr (kChannels) state.decay_channels(numbers, t);
            else state.decay(ptx::ex2(end));
            ptx::wgmma_wait<0>();
            pack_rows<T>(update, product);
            if constexpr (!kChannels) pack_tokens<T>(decayed, product, later, t);
        } else {
            scale_tokens<T>(update, values, betas, t);
#pragma unroll
            for (int k4 = 0; k4 < kDelta / 16; ++k4)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * k4 + i / 2 * 8 + 2 * t;
                    const float2 beta = *reinterpret_cast<const float2*>(betas + token);
                    const float2 by = *reinterpret_cast<const float2*>(later + token);
                    float pair[2];
                    unpack<T, 2>(Raw<4>{{values[k4][i]}}, pair);
                    decayed[k4][i] = packed_pair<T>(beta.x * pair[0] * by.x, beta.y * pair[1] * by.y);
                }
            state.decay(ptx::ex2(end));
            ptx::wgmma_wait<0>();
        }
        if constexpr (WRITES) {
            if constexpr (kChannels) {
#pragma unroll
                for (float& sum : result) sum *= static_cast<float>(scale);
            } else {
                scale_columns(result, of_query, t);
            }
            if constexpr (!kCorrected) {
                if (skip != nullptr) {
#pragma unroll
                    for (int k4 = 0; k4 < kDelta / 16; ++k4)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float pair[2];
                            unpack<T, 2>(Raw<4>{{values[k4][i]}}, pair);
                            result[8 * k4 + 2 * i] += by_value * pair[0], result[8 * k4 + 2 * i + 1] += by_value * pair[1];
                        }
                }
            }
        }
#pragma unroll
        for (int k4 = 0; k4 < kDelta / 16; ++k4) {
            ptx::wgmma_pin(update[k4]);
            if constexpr (!kChannels) ptx::wgmma_pin(decayed[k4]);
        }
        ptx::wgmma_fence();
        if constexpr (kChannels) multiply_packed<T, kDelta>(state.sums, update, keys + stage.after, true);
        else multiply_packed<T, kDelta>(state.sums, decayed, keys, true);
        ptx::wgmma_commit();
        if constexpr (WRITES) {
            packed_by_rows<T>(result, update, keys + stage.inner, true);
            ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        if constexpr (WRITES) pack_rows<T>(update, result);
        place.write(value_box, update);
        last_stage = ring.stage;
        ring.advance();
    }
    if (chunks > 0) finish(chunks - 1, last_stage);
    if constexpr (WRITES) result = *kept;
    const i64 result_head = result * heads + head;
    if (of_transition) state.store_to(ends + gridDim.z * heads * d_k * d_v, result_head, d_k, d_k, transition_column, lane);
    else if (result_head >= 0) state.store_to(passes_on ? ends : final, result_head, d_k, d_v, own_column, lane);
}

}  // namespace rtk
