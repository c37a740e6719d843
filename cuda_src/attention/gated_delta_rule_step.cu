// One token of the gated delta rule for each sequence (attention/gated_delta_rule.cuh), the state in place:
//     u = beta (v - a S^T k),  S = a S + k u^T,  o = scale (a S^T q + (k . q) u).
// A block owns 32 columns of the state of a sequence and head. A thread holds four neighbouring columns of up to four
// rows in registers, so that the state is read once; sums over rows are added over lanes, then over warps, in order.
// With CHANNELS, a is one of each row. Gates of raw g and beta (attention/gates.cuh) are computed here, in all blocks alike.
// Sequence b has state slots[b] of `places`, or state b; without one its result is 0. `flags`: bit 1 says that q and k are
// divided by their norms. Grid: tiles of 32 columns, heads, sequences.
#include "attention/gated_delta_rule.cuh"
#include "attention/gates.cuh"
#include "common/reduce.cuh"

namespace rtk {

template <typename T, typename S, bool CHANNELS>
__global__ void __launch_bounds__(256, 3)
    gated_delta_rule_step(const T* q, const T* k, const T* v, const void* g, const void* beta, const void* a_log,
                          const void* dt_bias, const i32* slots, S* state, T* out, i64 places, i64 heads, i64 key_heads,
                          i64 d_k, i64 d_v, i64 q_batch, i64 q_head, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head,
                          i64 g_batch, i64 g_head, i64 g_channel, i64 beta_batch, i64 beta_head, i64 flags, double scale,
                          double bound, double factor) {
    constexpr int kColumns = 32, kWarps = 8, kRows = 4;
    __shared__ __align__(16) float sums[kWarps][2][kColumns];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 head = blockIdx.y, batch = blockIdx.z, key_head = head / (heads / key_heads);
    const i64 column = static_cast<i64>(blockIdx.x) * kColumns + lane % 8 * 4;
    const i64 place = slots == nullptr ? batch : slots[batch];
    if (place < 0 || place >= places) {
        const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (threadIdx.x < 8 && column < d_v) store<T, 4>(out + (batch * heads + head) * d_v + column, zeros);
        return;
    }
    q += batch * q_batch + key_head * q_head;
    k += batch * k_batch + key_head * k_head;
    const int row0 = static_cast<int>(threadIdx.x) / 8, width = static_cast<int>(d_k);
    S* const own = state + ((place * heads + head) * d_k + row0) * d_v + column;
    float s[kRows][4], key[kRows], query[kRows];
    const bool inside = column < d_v;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = row0 + 32 * r;
        key[r] = query[r] = s[r][0] = s[r][1] = s[r][2] = s[r][3] = 0.0f;
        if (row < width && inside) load_stream<S, 4>(own + 32 * r * d_v, s[r]);
    }
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (inside) load_keep<T, 4>(v + batch * v_batch + head * v_head + column, values);
    const float rate = a_log == nullptr ? 0.0f : expf(load_any(a_log, gate_type(flags, kGateRate), head));
    auto decay = [&](i64 at, i64 column) {
        float log = load_any(g, gate_type(flags, kGateG), batch * g_batch + head * g_head + at);
        if (a_log != nullptr) {
            if (dt_bias != nullptr) log += load_any(dt_bias, gate_type(flags, kGateBias), column);
            log = log_decay(log, rate, static_cast<float>(bound));
        }
        return ptx::ex2((log < kMinDecay ? -200.0f : log) * kLog2e);
    };
    float a = 1.0f;
    if constexpr (CHANNELS) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + 32 * r;
            if (row >= width) continue;
            const float by = decay(row * g_channel, head * d_k + row);
#pragma unroll
            for (int c = 0; c < 4; ++c) s[r][c] *= by;
        }
    } else if (g != nullptr) {
        a = decay(0, head);
    }
    const float logit = load_any(beta, gate_type(flags, kGateBeta), batch * beta_batch + head * beta_head);
    const float strength = strength_of(logit, flags & 1, static_cast<float>(factor));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = row0 + 32 * r;
        float one[1];
        if (row < width) load_keep<T, 1>(k + row, one), key[r] = one[0], load_keep<T, 1>(q + row, one), query[r] = one[0];
    }
    // Each warp needs all of q and k for k . q and norms.
    float dot = 0.0f, of_k = 0.0f, of_q = 0.0f;
#pragma unroll 1
    for (int row = lane; row < width; row += kWarp) {
        float x[1], y[1];
        load_keep<T, 1>(k + row, x), load_keep<T, 1>(q + row, y);
        dot += x[0] * y[0], of_k += x[0] * x[0], of_q += y[0] * y[0];
    }
    dot = warp_reduce<Sum>(dot), of_k = warp_reduce<Sum>(of_k), of_q = warp_reduce<Sum>(of_q);
    const bool l2norm = flags & 2;
    const float key_norm = l2norm ? rsqrtf(of_k + 1e-6f) : 1.0f, query_norm = l2norm ? rsqrtf(of_q + 1e-6f) : 1.0f;
    float by_key[4], by_query[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        by_key[c] = by_query[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) by_key[c] += s[r][c] * key[r], by_query[c] += s[r][c] * query[r];
#pragma unroll
        for (int offset = 8; offset < kWarp; offset *= 2) {
            by_key[c] += __shfl_xor_sync(0xffffffffu, by_key[c], offset);
            by_query[c] += __shfl_xor_sync(0xffffffffu, by_query[c], offset);
        }
        if (lane < 8) sums[warp][0][lane * 4 + c] = by_key[c], sums[warp][1][lane * 4 + c] = by_query[c];
    }
    __syncthreads();
    if (!inside) return;
    float total[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 2
    for (int w = 0; w < kWarps; ++w)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float4 four = *reinterpret_cast<const float4*>(&sums[w][which][lane % 8 * 4]);
            total[which][0] += four.x, total[which][1] += four.y, total[which][2] += four.z, total[which][3] += four.w;
        }
    float update[4], result[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        update[c] = strength * (values[c] - a * key_norm * total[0][c]);
        result[c] = static_cast<float>(scale) * query_norm * (a * total[1][c] + key_norm * dot * update[c]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (row0 + 32 * r >= width) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) s[r][c] = a * s[r][c] + key_norm * key[r] * update[c];
        store<S, 4>(own + 32 * r * d_v, s[r]);
    }
    if (threadIdx.x < 8) store<T, 4>(out + (batch * heads + head) * d_v + column, result);
}

}  // namespace rtk
