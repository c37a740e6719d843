// Gradients of the gated delta rule from the last chunk to the first (attention/gated_delta_rule.cuh): with the gradient
// dS of the state behind a chunk,
//     dU = P^T dO + F K dS,  dR = T^T dU,  dV = beta dR,
//     dS before it = exp(c_end) dS + scale (E Q)^T dO - (beta E K)^T dR.
// Owners, stages and operands in two parts as in gated_delta_rule_scan.cu; warps 0 to 3 compute dU and dR. Meanwhile warps 4 to 7 write dR and dV of
// the chunk behind, dS, load tiles, and scale dO. `dstates` gets
// dS behind each chunk as T, [chunks][heads][d_k][d_v], and `drest` dR as T, [chunks][heads][64][d_v].
// If `solve` is null, dR is dU and the state does not meet keys; `skip`, if not null, times dO is added to dV.
// With CHANNELS, q, k and `after` are E Q, E K and F K of kda_chunk.cu, and strides are not used.
// Without `dv` it is the first pass over segments, which writes `starts` only: dS before each segment.
// Grid: tiles of VT columns, heads, segments.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

template <typename T, int DK, int VT, bool CHANNELS>
__global__ void __launch_bounds__(256, 1)
    gated_delta_rule_reverse(const T* q, const T* k, const T* after, const T* dout, const T* solve, const T* inner, const float* rows,
                             const float* skip, const float* dfinal, float* dinitial, float* starts, const i32* cu, T* dv, T* dstates,
                             T* drest, i64 segment, i64 length, i64 heads, i64 key_heads, i64 d_k, i64 d_v, i64 q_batch, i64 q_row,
                             i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 dout_batch, i64 dout_row,
                             i64 dout_head, i64 stages, double scale) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<VT>;
    using CTile = MmaTile<kDelta>;
    constexpr int kTiles = VT / 8;
    constexpr u32 kKBytes = kDelta * KTile::kPitch, kVBytes = kDelta * VTile::kPitch, kCBytes = kDelta * CTile::kPitch;
    constexpr u32 kRowBytes = kRowKinds * kDelta * 4;
    constexpr u32 kAfter = 2 * kKBytes + kVBytes + 2 * kCBytes + kRowBytes;
    constexpr u32 kStageBytes = kAfter + (CHANNELS ? kKBytes : 0);
    extern __shared__ __align__(128) u8 shared[];
    const int count = static_cast<int>(stages);
    u8* const state_tile = shared + count * kStageBytes;
    u8* const rest_tile = state_tile + DK * VTile::kPitch;  // dU, later the remainder of the next one
    u8* const factor_tile = rest_tile + kVBytes;            // the remainder of dU, later dR times its factors
    u8* const scaled_tile = factor_tile + kVBytes;          // dO times its factors
    u8* const drest_tiles = scaled_tile + kVBytes;          // dR of this chunk and the one behind
    __shared__ float betas[2][kDelta];                      // of the same

    const int column0 = static_cast<int>(blockIdx.x) * VT, head = static_cast<int>(blockIdx.y);
    const DeltaSegment own = delta_segment(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), segment, length, cu);
    const bool passes_on = segment != 0 && dv == nullptr;
    if (!own.exists() || (passes_on && own.begins)) return;
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int k_vectors = static_cast<int>(d_k) / 8, v_columns = min(static_cast<int>(d_v) - column0, VT);
    const int kept_columns = passes_on ? 0 : v_columns;  // of results
    const i64 batch = own.batch;
    if constexpr (!CHANNELS) {
        q += batch * q_batch + own.first * q_row + key_head * q_head;
        k += batch * k_batch + own.first * k_row + key_head * k_head;
    }
    dout += batch * dout_batch + own.first * dout_row + head * dout_head + column0;
    dv += (((cu != nullptr ? 0 : batch * length) + own.first) * heads + head) * d_v + column0;
    const int helper = static_cast<int>(threadIdx.x) - 128;  // threads that load and store
    auto stage = [&](int chunk) { return shared + chunk % count * kStageBytes; };
    auto fetch = [&](int chunk) {
        if (chunk >= 0) {
            u8* const to = stage(chunk);
            const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
            const int here = own.rows - chunk * kDelta;
            if constexpr (CHANNELS) {
                fetch_by<KTile, kDelta>(helper, to, k + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_by<KTile, kDelta>(helper, to + kKBytes, q + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_by<KTile, kDelta>(helper, to + kAfter, after + at * kDelta * d_k, d_k, kDelta, k_vectors);
            } else {
                fetch_by<KTile, kDelta>(helper, to, k + i0 * k_row, k_row, here, k_vectors);
                fetch_by<KTile, kDelta>(helper, to + kKBytes, q + i0 * q_row, q_row, here, k_vectors);
            }
            fetch_by<VTile, kDelta>(helper, to + 2 * kKBytes, dout + i0 * dout_row, dout_row, here, v_columns / 8);
            u8* const matrices = to + 2 * kKBytes + kVBytes;
            if constexpr (CHANNELS) {
                if (solve != nullptr)
                    fetch_by<CTile, kDelta>(helper, matrices, solve + at * (kDelta * kDelta), kDelta, kDelta, 8);
                fetch_by<CTile, kDelta>(helper, matrices + kCBytes, inner + at * (kDelta * kDelta), kDelta, kDelta, 8);
            } else {
                if (solve != nullptr) fetch_lower<CTile, true>(helper, matrices, solve + at * (2 * kDelta * kDelta));
                fetch_lower<CTile, false>(helper, matrices + kCBytes, inner + at * (kDelta * kDelta));
            }
            if (helper < static_cast<int>(kRowBytes / 16))
                ptx::cp_async_16(ptx::shared_address(matrices + 2 * kCBytes + helper * 16),
                                 rows + at * (kRowKinds * kDelta) + helper * 4);
        }
        ptx::cp_async_commit();
    };
    if (helper >= 0 && count > 1) fetch(chunks - 1);
    if (helper >= 0 && count > 2) fetch(chunks - 2);
    auto finish = [&](int chunk) {  // dR and dV of a chunk
        const u8* const tile = drest_tiles + (chunk & 1) * kVBytes;
        const float* const beta = betas[chunk & 1];
        const int here = min(own.rows - chunk * kDelta, kDelta);
        T* const to = drest + ((own.chunk + chunk) * heads + head) * kDelta * d_v + column0;
        T* const to_dv = dv + static_cast<i64>(chunk) * kDelta * heads * d_v;
#pragma unroll
        for (int i = helper; i < kDelta * VTile::kVectors; i += 128) {
            const int row = i / VTile::kVectors, vector = i % VTile::kVectors;
            if (vector * 8 >= kept_columns) continue;
            const Raw<16> raw = *reinterpret_cast<const Raw<16>*>(tile + VTile::offset(row, vector));
            ptx::st<16>(to + row * d_v + vector * 8, raw);
            float f[8];
            unpack<T, 8>(raw, f);
#pragma unroll
            for (int c = 0; c < 8; ++c) f[c] *= beta[row];
            if (skip != nullptr) {
                float g[8];
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(stage(chunk) + 2 * kKBytes + VTile::offset(row, vector)), g);
#pragma unroll
                for (int c = 0; c < 8; ++c) f[c] += skip[head] * g[c];
            }
            if (row < here) store<T, 8>(to_dv + row * heads * d_v + vector * 8, f);
        }
    };

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    ScannedState<T, VTile, DK> state(d_k, d_v, column0, v_columns, warp, lane);
    const i64 state_head = batch * heads + head, segment_head = static_cast<i64>(blockIdx.z) * heads + head;
    state.load(own.ends ? dfinal : passes_on ? nullptr : starts, own.ends ? state_head : segment_head + heads);
    state.show(state_tile);

    const int own_row = 16 * (warp % 4);
#pragma unroll 1
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        if (count == 1) {
            __syncthreads();
            if (helper >= 0) {
                if (chunk + 1 < chunks) finish(chunk + 1);
                ptx::named_barrier_sync(2, 128);
                fetch(chunk);
            }
        }
        if (helper >= 0) count > 2 ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
        __syncthreads();
        const u8* const key_tile = stage(chunk);
        const u8* const query_tile = key_tile + kKBytes;
        const u8* const dout_tile = query_tile + kKBytes;
        const u8* const solve_tile = dout_tile + kVBytes;
        const u8* const inner_tile = solve_tile + kCBytes;
        const float* const numbers = reinterpret_cast<const float*>(inner_tile + kCBytes);
        const float* const decays = numbers + kDecays * kDelta;
        const float end = decays[kDelta - 1];
        if (warp < 4) {
            float sums[kTiles][4];
            clear_sums(sums);
            rows_by_columns<T, KTile, VTile, DK / 16>(sums, CHANNELS ? key_tile + kAfter : key_tile, own_row, state_tile, lane);
            if constexpr (!CHANNELS) {
                float later[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + lane / 4 + 8 * r;
                    later[r] = numbers[kKeyNorms * kDelta + i] * decay_between(end, decays[i]);
                }
                scale_rows(sums, later);
            }
            columns_by_columns<T, CTile, VTile>(sums, inner_tile, own_row, dout_tile, warp, kDelta / 16, lane);
            if (solve != nullptr) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        const int i = own_row + lane / 4 + 8 * r;
                        if constexpr (CHANNELS) write_pair<T, VTile>(rest_tile, i, n, lane, sums[n][2 * r], sums[n][2 * r + 1]);
                        else write_parts<T, VTile>(rest_tile, factor_tile, i, n, lane, sums[n][2 * r], sums[n][2 * r + 1]);
                    }
                ptx::named_barrier_sync(1, 128);
                clear_sums(sums);
                columns_by_columns<T, CTile, VTile>(sums, solve_tile, own_row, rest_tile, warp, kDelta / 16, lane);
                if constexpr (!CHANNELS) {
                    columns_by_columns<T, CTile, VTile>(sums, solve_tile, own_row, factor_tile, warp, kDelta / 16, lane);
#pragma unroll
                    for (int step = 0; step < kDelta / 16; ++step) {
                        if (step < warp) continue;
                        u32 a[4];
                        const RemainderBlock at(step, warp);
                        CTile::left_transposed(a, solve_tile, at.row, at.column, lane);
                        by_columns<T, VTile>(sums, a, rest_tile, 16 * step, lane);
                    }
                    ptx::named_barrier_sync(1, 128);  // all of them have read both parts of dU
                }
            }
            u8* const drest_tile = drest_tiles + (chunk & 1) * kVBytes;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float beta = numbers[kBetas * kDelta + i];
                const float factor = CHANNELS ? -beta : -beta * numbers[kKeyNorms * kDelta + i] * ptx::ex2(decays[i]);
                if (lane % 4 == 0) betas[chunk & 1][i] = beta;
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const float lo = sums[n][2 * r], hi = sums[n][2 * r + 1];
                    write_pair<T, VTile>(drest_tile, i, n, lane, lo, hi);
                    if constexpr (CHANNELS) write_pair<T, VTile>(factor_tile, i, n, lane, factor * lo, factor * hi);
                    else write_parts<T, VTile>(factor_tile, rest_tile, i, n, lane, factor * lo, factor * hi);
                }
            }
        } else {
            if (chunk + 1 < chunks && count > 1) finish(chunk + 1);
            store_by<VTile, DK>(helper, dstates + ((own.chunk + chunk) * heads + head) * d_k * d_v + column0, d_v, state_tile,
                                static_cast<int>(d_k), kept_columns / 8);
            if (count > 1) {
                ptx::named_barrier_sync(2, 128);  // all of them are done with the tiles of the chunk behind
                fetch(chunk - count + 1);
            }
            constexpr int kUnroll = CHANNELS ? 2 : 1;  // registers
#pragma unroll kUnroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                float factor = static_cast<float>(scale);
                if constexpr (!CHANNELS) factor = factor * numbers[kQueryNorms * kDelta + i] * ptx::ex2(decays[i]);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    float value[2];
                    read_pair<T, VTile>(dout_tile, i, n, lane, value);
                    write_pair<T, VTile>(scaled_tile, i, n, lane, factor * value[0], factor * value[1]);
                }
            }
        }
        __syncthreads();
        if (state.keeps) {
            if constexpr (CHANNELS) {
                state.decay(numbers);
            } else {
                const float by = ptx::ex2(end), both[2] = {by, by};
                scale_rows(state.sums, both);
            }
            columns_by_columns<T, KTile, VTile>(state.sums, query_tile, 16 * warp, scaled_tile, 0, kDelta / 16, lane);
            if (solve != nullptr) {
                if constexpr (CHANNELS)
                    columns_by_columns<T, KTile, VTile>(state.sums, key_tile, 16 * warp, factor_tile, 0, kDelta / 16, lane);
                else columns_by_parts<T, KTile, VTile>(state.sums, key_tile, 16 * warp, factor_tile, rest_tile, lane);
            }
            state.show(state_tile);
        }
    }
    __syncthreads();
    if (helper >= 0 && chunks > 0) finish(0);
    if (passes_on || (own.begins && dinitial != nullptr))
        state.store_to(passes_on ? starts : dinitial, passes_on ? segment_head : state_head);
}

}  // namespace rtk
