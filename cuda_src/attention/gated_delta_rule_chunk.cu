// What chunks of the gated delta rule need of their own tokens (attention/gated_delta_rule.cuh): T as T-typed
// [chunks][heads][2][64][64], its value and the remainder of that, P as [chunks][heads][64][64], and the numbers of rows as fp32
// [chunks][heads][kRowKinds][64].
//
// A block owns a chunk and a key head; two halves of it loop over its value heads on their own. Warps 0 to 3 compute M and T,
// 16 rows each, warps 4 to 7 P. If `solve` is null, both halves compute P, of every other value head. Grid: chunks, key heads.
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
    float* const m = reinterpret_cast<float*>(shared);  // in place of the tiles, later
    float* const x = m + kDelta * kSolvePitch;
    __shared__ __align__(16) float halves[2][kRowKinds][kDelta];

    const i64 number = blockIdx.x;
    const int key_head = static_cast<int>(blockIdx.y), each = static_cast<int>(heads / key_heads);
    const DeltaChunk chunk = delta_chunk(number, length, cu, static_cast<int>(sequences));
    if (chunk.rows <= 0) return;
    const bool first_half = threadIdx.x < 128, solves = first_half && solve != nullptr;
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % kWarp, warp = thread / kWarp, own_row = 16 * warp;
    float(*const own)[kDelta] = halves[first_half ? 0 : 1];
    q += chunk.batch * q_batch + chunk.first * q_row + key_head * q_head;
    k += chunk.batch * k_batch + chunk.first * k_row + key_head * k_head;
    const int vectors = static_cast<int>(d_k) / 8;
    Tile::template fetch<kDelta, 256>(key_tile, k, k_row, chunk.rows, vectors);
    Tile::template fetch<kDelta, 256>(query_tile, q, q_row, chunk.rows, vectors);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    {
        // The first half has the norms of keys, the other one those of queries.
        const int row = thread / 2;
        float square = l2norm ? row_square<T, Tile, 2>(first_half ? key_tile : query_tile, row, thread % 2) : 0.0f;
        square += __shfl_xor_sync(0xffffffffu, square, 1);
        const float norm = l2norm ? inverse_norm(square) : 1.0f;
        if (thread % 2 == 0) halves[0][first_half ? kKeyNorms : kQueryNorms][row] = halves[1][first_half ? kKeyNorms : kQueryNorms][row] = norm;
    }
    float products[8][4];  // k_i . k_j, or q_i . k_j
    clear_sums(products);
    rows_by_rows_rolled<T, Tile, DK / 16>(products, solves ? key_tile : query_tile, own_row, key_tile, 0, lane);
    __syncthreads();
    const int barrier = first_half ? 1 : 2, apart = solve != nullptr ? 1 : 2;

#pragma unroll 1
    for (int e = first_half || apart == 1 ? 0 : 1; e < each; e += apart) {
        const int head = key_head * each + e;
        ptx::named_barrier_sync(barrier, 128);
        if (warp == 0) {
            float sum[2], before = 0.0f;
            const i64 at = (chunk.batch * length + chunk.first) * heads + head;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = lane + 32 * half;
                float value = row < chunk.rows ? g[at + row * heads] : 0.0f;
                value = (value < kMinDecay ? kMinDecay : value) * kLog2e;
#pragma unroll
                for (int offset = 1; offset < kWarp; offset *= 2) {
                    const float lower = __shfl_up_sync(0xffffffffu, value, offset);
                    if (lane >= offset) value += lower;
                }
                sum[half] = value + before;
                before = __shfl_sync(0xffffffffu, value, 31);
                own[kDecays][row] = sum[half];
                own[kBetas][row] = row < chunk.rows ? beta[at + row * heads] : 0.0f;
            }
        }
        ptx::named_barrier_sync(barrier, 128);
        T* const to = inner + (number * heads + head) * (kDelta * kDelta);
        float c[2], by[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
            c[r] = own[kDecays][i];
            by[r] = solves ? own[kBetas][i] * own[kKeyNorms][i] : static_cast<float>(scale) * own[kQueryNorms][i];
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int j = 8 * n + lane % 4 * 2;
            const float2 earlier = *reinterpret_cast<const float2*>(&own[kDecays][j]);
            const float2 norm = *reinterpret_cast<const float2*>(&own[kKeyNorms][j]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r, last = solves ? i - 1 : i;
                const float pair[2] = {
                    j <= last ? products[n][2 * r] * (decay_between(c[r], earlier.x) * norm.x * by[r]) : 0.0f,
                    j + 1 <= last ? products[n][2 * r + 1] * (decay_between(c[r], earlier.y) * norm.y * by[r]) : 0.0f};
                if (solves) *reinterpret_cast<float2*>(m + i * kSolvePitch + j) = make_float2(pair[0], pair[1]);
                else store<T, 2>(to + i * kDelta + j, pair);
            }
        }
        if (!solves) {
            if (thread < kDelta) {
#pragma unroll
                for (int kind = 0; kind < kRowKinds; ++kind)
                    rows[((number * heads + head) * kRowKinds + kind) * kDelta + thread] = own[kind][thread];
            }
            continue;
        }
        ptx::named_barrier_sync(1, 128);
        invert_unit_lower(x, m, thread, 1);
        store_lower_parts(solve + (number * heads + head) * (2 * kDelta * kDelta), x);
    }
}

}  // namespace rtk
