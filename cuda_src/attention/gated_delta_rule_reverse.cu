// Gradients of the gated delta rule from the last chunk to the first (attention/gated_delta_rule.cuh): with the gradient
// dS of the state behind a chunk,
//     dU = P^T dO + F K dS,  dR = T^T dU,  dV = beta dR,
//     dS before it = exp(c_end) dS + scale (E Q)^T dO - (beta E K)^T dR.
// Owners as in gated_delta_rule_scan.cu; warps 0 to 3 compute dU and dR, warps 4 to 7 scale dO meanwhile. `dstates` gets
// dS behind each chunk as T, [chunks][heads][d_k][d_v], and `drest` dR as T, [chunks][heads][64][d_v].
// Grid: tiles of VT columns, heads, sequences.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

template <typename T, int DK, int VT>
__global__ void __launch_bounds__(256)
    gated_delta_rule_reverse(const T* q, const T* k, const T* dout, const T* solve, const T* inner, const float* rows,
                             const float* dfinal, float* dinitial, const i32* cu, T* dv, T* dstates, T* drest, i64 length,
                             i64 heads, i64 key_heads, i64 d_k, i64 d_v, i64 q_batch, i64 q_row, i64 q_head, i64 k_batch,
                             i64 k_row, i64 k_head, i64 dout_batch, i64 dout_row, i64 dout_head, double scale) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<VT>;
    using CTile = MmaTile<kDelta>;
    constexpr int kTiles = VT / 8;
    constexpr u32 kKBytes = kDelta * KTile::kPitch, kVBytes = kDelta * VTile::kPitch, kCBytes = kDelta * CTile::kPitch;
    constexpr u32 kRowBytes = kRowKinds * kDelta * 4;
    constexpr u32 kStageBytes = 2 * kKBytes + kVBytes + 2 * kCBytes + kRowBytes;
    extern __shared__ __align__(128) u8 shared[];
    u8* const state_tile = shared + 2 * kStageBytes;
    u8* const rest_tile = state_tile + DK * VTile::kPitch;  // dU, later dR times its factors
    u8* const scaled_tile = rest_tile + kVBytes;            // dO times its factors

    const int column0 = static_cast<int>(blockIdx.x) * VT, head = static_cast<int>(blockIdx.y);
    const DeltaRows own = delta_rows(static_cast<int>(blockIdx.z), length, cu);
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int k_vectors = static_cast<int>(d_k) / 8, v_columns = min(static_cast<int>(d_v) - column0, VT);
    const i64 batch = own.batch;
    q += batch * q_batch + own.first * q_row + key_head * q_head;
    k += batch * k_batch + own.first * k_row + key_head * k_head;
    dout += batch * dout_batch + own.first * dout_row + head * dout_head + column0;
    dv += ((cu != nullptr ? own.first : batch * length) * heads + head) * d_v + column0;
    auto fetch = [&](int chunk) {
        u8* const to = shared + (chunk & 1) * kStageBytes;
        const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
        const int here = own.rows - chunk * kDelta;
        KTile::template fetch<kDelta, 256>(to, k + i0 * k_row, k_row, here, k_vectors);
        KTile::template fetch<kDelta, 256>(to + kKBytes, q + i0 * q_row, q_row, here, k_vectors);
        VTile::template fetch<kDelta, 256>(to + 2 * kKBytes, dout + i0 * dout_row, dout_row, here, v_columns / 8);
        CTile::template fetch<kDelta, 256>(to + 2 * kKBytes + kVBytes, solve + at * (kDelta * kDelta), kDelta, kDelta, 8);
        CTile::template fetch<kDelta, 256>(to + 2 * kKBytes + kVBytes + kCBytes, inner + at * (kDelta * kDelta), kDelta, kDelta,
                                           8);
        if (threadIdx.x < kRowBytes / 16)
            ptx::cp_async_16(ptx::shared_address(to + 2 * kKBytes + kVBytes + 2 * kCBytes + threadIdx.x * 16),
                             rows + at * (kRowKinds * kDelta) + threadIdx.x * 4);
        ptx::cp_async_commit();
    };
    if (chunks > 0) fetch(chunks - 1);

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const bool keeps = 16 * warp < DK;  // rows of the state
    const int state_row = 16 * warp + lane / 4;
    float state[kTiles][4];
    auto at_state = [&](i64 base, int n, int r) {
        return (base * d_k + state_row + 8 * r) * d_v + column0 + 8 * n + lane % 4 * 2;
    };
    auto has = [&](int n, int r) { return keeps && state_row + 8 * r < d_k && 8 * n + lane % 4 * 2 < v_columns; };
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float pair[2] = {0.0f, 0.0f};
            if (dfinal != nullptr && has(n, r)) load_keep<float, 2>(dfinal + at_state(batch * heads + head, n, r), pair);
            state[n][2 * r] = pair[0], state[n][2 * r + 1] = pair[1];
        }
    auto show_state = [&] {
        if (!keeps) return;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                write_pair<T, VTile>(state_tile, state_row + 8 * r, n, lane, state[n][2 * r], state[n][2 * r + 1]);
    };
    show_state();

    const int own_row = 16 * (warp % 4);
#pragma unroll 1
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (chunk > 0) fetch(chunk - 1);
        const u8* const key_tile = shared + (chunk & 1) * kStageBytes;
        const u8* const query_tile = key_tile + kKBytes;
        const u8* const dout_tile = query_tile + kKBytes;
        const u8* const solve_tile = dout_tile + kVBytes;
        const u8* const inner_tile = solve_tile + kCBytes;
        const float* const numbers = reinterpret_cast<const float*>(inner_tile + kCBytes);
        const float* const decays = numbers + kDecays * kDelta;
        const int here = min(own.rows - chunk * kDelta, kDelta);
        const float end = decays[kDelta - 1];
        const i64 at = (own.chunk + chunk) * heads + head;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float pair[2] = {state[n][2 * r], state[n][2 * r + 1]};
                if (has(n, r)) store<T, 2>(dstates + at_state(at, n, r), pair);
            }

        if (warp < 4) {
            float sums[kTiles][4], after[2];
            clear_sums(sums);
            rows_by_columns<T, KTile, VTile, DK / 16>(sums, key_tile, own_row, state_tile, lane);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                after[r] = numbers[kKeyNorms * kDelta + i] * decay_between(end, decays[i]);
            }
            scale_rows(sums, after);
            columns_by_columns<T, CTile, VTile>(sums, inner_tile, own_row, dout_tile, warp, kDelta / 16, lane);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    write_pair<T, VTile>(rest_tile, own_row + lane / 4 + 8 * r, n, lane, sums[n][2 * r], sums[n][2 * r + 1]);
            ptx::named_barrier_sync(1, 128);
            clear_sums(sums);
            columns_by_columns<T, CTile, VTile>(sums, solve_tile, own_row, rest_tile, warp, kDelta / 16, lane);
            ptx::named_barrier_sync(1, 128);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float beta = numbers[kBetas * kDelta + i];
                const float factor = -beta * numbers[kKeyNorms * kDelta + i] * ptx::ex2(decays[i]);
                T* const to_dv = dv + (static_cast<i64>(chunk) * kDelta + i) * heads * d_v;
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const int column = 8 * n + lane % 4 * 2;
                    const float pair[2] = {sums[n][2 * r], sums[n][2 * r + 1]};
                    const float value[2] = {beta * pair[0], beta * pair[1]};
                    write_pair<T, VTile>(rest_tile, i, n, lane, factor * pair[0], factor * pair[1]);
                    if (column >= v_columns) continue;
                    store<T, 2>(drest + (at * kDelta + i) * d_v + column0 + column, pair);
                    if (i < here) store<T, 2>(to_dv + column, value);
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float factor = static_cast<float>(scale) * numbers[kQueryNorms * kDelta + i] * ptx::ex2(decays[i]);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    float value[2];
                    read_pair<T, VTile>(dout_tile, i, n, lane, value);
                    write_pair<T, VTile>(scaled_tile, i, n, lane, factor * value[0], factor * value[1]);
                }
            }
        }
        __syncthreads();
        if (keeps) {
            const float by = ptx::ex2(end), both[2] = {by, by};
            scale_rows(state, both);
            columns_by_columns<T, KTile, VTile>(state, query_tile, 16 * warp, scaled_tile, 0, kDelta / 16, lane);
            columns_by_columns<T, KTile, VTile>(state, key_tile, 16 * warp, rest_tile, 0, kDelta / 16, lane);
            show_state();
        }
    }
    if (dinitial == nullptr) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float pair[2] = {state[n][2 * r], state[n][2 * r + 1]};
            if (has(n, r)) store<float, 2>(dinitial + at_state(batch * heads + head, n, r), pair);
        }
}

}  // namespace rtk
