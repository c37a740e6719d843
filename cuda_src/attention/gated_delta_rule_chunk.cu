// What chunks of the gated delta rule need of their own tokens (attention/gated_delta_rule.cuh): T and P as T-typed
// [chunks][heads][64][64], and the numbers of rows as fp32 [chunks][heads][kRowKinds][64].
//
// A block owns a chunk and a key head; its two halves of four warps, 16 rows each, share the value heads of the key head, and
// compute P, M and T of theirs. Of a single value head one half computes P, the other one M and T. If `solve` is null, only P is
// computed. Grid: chunks, key heads.
#include "attention/gated_delta_rule_solve.cuh"

namespace rtk {

template <typename T, int DK>
__global__ void __launch_bounds__(256, 2)
    gated_delta_rule_chunk(const T* q, const T* k, const float* g, const float* beta, const i32* cu, T* solve, T* inner,
                           float* rows, i64 sequences, i64 length, i64 heads, i64 key_heads, i64 d_k, i64 q_batch, i64 q_row,
                           i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 l2norm, double scale) {
    using Tile = MmaTile<DK>;
    constexpr u32 kBytes = kDelta * Tile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8 *const key_tile = shared, *const query_tile = shared + kBytes;
    float* const m = reinterpret_cast<float*>(shared) + (threadIdx.x < 128 ? 0 : 2 * kDelta * kSolvePitch);  // in place of the tiles, later
    float* const x = m + kDelta * kSolvePitch;
    // Behind the tiles or what takes their place: q_i . k_j for j <= i in row i, and k_i . k_j for j < i in column i.
    float* const products = reinterpret_cast<float*>(shared + (solve != nullptr ? 16 * kDelta * kSolvePitch : 2 * kBytes));
    __shared__ __align__(16) float halves[2][kRowKinds][kDelta];

    const i64 number = blockIdx.x;
    const int key_head = static_cast<int>(blockIdx.y), each = static_cast<int>(heads / key_heads);
    const DeltaChunk chunk = delta_chunk(number, length, cu, static_cast<int>(sequences));
    if (chunk.rows <= 0) return;
    const bool first_half = threadIdx.x < 128, parted = solve != nullptr && each == 1;  // P and T by a half each
    const bool solves = solve != nullptr && (!parted || first_half), scores = !parted || !first_half;
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % kWarp, warp = thread / kWarp, own_row = 16 * warp;
    float(*const own)[kDelta] = halves[first_half ? 0 : 1];
    q += chunk.batch * q_batch + chunk.first * q_row + key_head * q_head;
    k += chunk.batch * k_batch + chunk.first * k_row + key_head * k_head;
    const int vectors = static_cast<int>(d_k) / 8;
    Tile::template fetch<kDelta, 256>(key_tile, k, k_row, chunk.rows, vectors);
    Tile::template fetch<kDelta, 256>(query_tile, q, q_row, chunk.rows, vectors);
    ptx::cp_async_commit();
    const int begin = first_half || parted ? 0 : 1;
    const i64 first_row = (chunk.batch * length + chunk.first) * heads + key_head * each;
    float decays[2] = {0.0f, 0.0f}, betas[2] = {0.0f, 0.0f};  // of rows lane and lane + 32
    auto load_numbers = [&](int e) {
        if (warp != 0 || e >= each) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane + 32 * half;
            if (row < chunk.rows) decays[half] = g[first_row + row * heads + e], betas[half] = beta[first_row + row * heads + e];
        }
    };
    load_numbers(begin);
    ptx::cp_async_wait<0>();
    __syncthreads();
    {
        // The first half has the norms of keys, the other one those of queries.
        float square = 0.0f;
        const int row = thread / 2;
        if (l2norm) {
#pragma unroll
            for (int v = 0; v < Tile::kVectors / 2; ++v) {
                float f[8];
                const u8* const at = (first_half ? key_tile : query_tile) + Tile::offset(row, thread % 2 * (Tile::kVectors / 2) + v);
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(at), f);
#pragma unroll
                for (int i = 0; i < 8; ++i) square += f[i] * f[i];
            }
        }
        square += __shfl_xor_sync(0xffffffffu, square, 1);
        const float norm = l2norm ? rsqrtf(square + 1e-6f) : 1.0f;
        if (thread % 2 == 0) halves[0][first_half ? kKeyNorms : kQueryNorms][row] = halves[1][first_half ? kKeyNorms : kQueryNorms][row] = norm;
    }
    if (!first_half || solve != nullptr) {
        float sums[8][4];
        clear_sums(sums);
        rows_by_rows_rolled<T, Tile, DK / 16>(sums, first_half ? key_tile : query_tile, own_row, key_tile, 0, lane);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = own_row + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
                if (first_half ? j < i : j <= i) products[first_half ? j * kSolvePitch + i : i * kSolvePitch + j] = sums[n][e];
            }
    }
    __syncthreads();
    const int barrier = first_half ? 1 : 2;

#pragma unroll 1
    for (int e = begin; e < each; e += 2) {
        const int head = key_head * each + e;
        ptx::named_barrier_sync(barrier, 128);
        if (warp == 0) {
            float before = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = lane + 32 * half;
                float value = (decays[half] < kMinDecay ? kMinDecay : decays[half]) * kLog2e;
#pragma unroll
                for (int offset = 1; offset < kWarp; offset *= 2) {
                    const float lower = __shfl_up_sync(0xffffffffu, value, offset);
                    if (lane >= offset) value += lower;
                }
                own[kDecays][row] = value + before;
                before = __shfl_sync(0xffffffffu, value, 31);
                own[kBetas][row] = betas[half];
            }
        }
        load_numbers(e + 2);
        ptx::named_barrier_sync(barrier, 128);
        T* const to = inner + (number * heads + head) * (kDelta * kDelta);
        float c[2], of_key[2], of_query[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
            c[r] = own[kDecays][i];
            of_key[r] = own[kBetas][i] * own[kKeyNorms][i], of_query[r] = static_cast<float>(scale) * own[kQueryNorms][i];
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int j = 8 * n + lane % 4 * 2;
            const float2 earlier = *reinterpret_cast<const float2*>(&own[kDecays][j]);
            const float2 norm = *reinterpret_cast<const float2*>(&own[kKeyNorms][j]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float lo = j <= i ? decay_between(c[r], earlier.x) * norm.x : 0.0f;
                const float hi = j < i ? decay_between(c[r], earlier.y) * norm.y : 0.0f;
                if (solves)
                    *reinterpret_cast<float2*>(m + i * kSolvePitch + j) =
                        make_float2(j < i ? products[j * kSolvePitch + i] * (lo * of_key[r]) : 0.0f,
                                    j + 1 < i ? products[(j + 1) * kSolvePitch + i] * (hi * of_key[r]) : 0.0f);
                if (scores) {
                    const float* const from = products + i * kSolvePitch + j;
                    const float pair[2] = {j <= i ? from[0] * (lo * of_query[r]) : 0.0f, j < i ? from[1] * (hi * of_query[r]) : 0.0f};
                    store<T, 2>(to + i * kDelta + j, pair);
                }
            }
        }
        if (scores && thread < kDelta) {
#pragma unroll
            for (int kind = 0; kind < kRowKinds; ++kind)
                rows[((number * heads + head) * kRowKinds + kind) * kDelta + thread] = own[kind][thread];
        }
        if (!solves) continue;
        ptx::named_barrier_sync(barrier, 128);
        invert_unit_lower(x, m, thread, barrier);
        T* const solved = solve + (number * heads + head) * (kDelta * kDelta);
#pragma unroll
        for (int at = thread * 8; at < kDelta * kDelta; at += 128 * 8) {
            const float* const from = x + at / kDelta * kSolvePitch + at % kDelta;
            float f[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) f[i] = from[i];
            store<T, 8>(solved + at, f);
        }
    }
}

}  // namespace rtk
