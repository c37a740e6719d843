// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to 64 rows of a, where latency
// matters more than bandwidth: the first instructions of a single wave of blocks issue the loads of all of b.
//
// A cluster of `parts` blocks owns a tile of 32 rows of b (gated: 16 and their counterparts) and all rows of a. k is
// cut into steps of 64 bytes, and ranges of steps are assigned in order to the 8 warps of each block of the cluster. A
// warp loads its operands from global memory straight into the registers of mma.sync: lane 4g + t has the 16 bytes t of
// a step of row g, of both operands. This permutes k relative to the instruction, but in the same way for both. Sums
// are fp32; those of 8-bit operands leave the tensor cores every 128 of k. The sums of a block's warps are added in
// shared memory in order, then sent to the block of the cluster that finishes the token, which adds those of the blocks
// in order: results do not depend on timing.
//
// The launch may start before the previous kernel has ended: meanwhile it prefetches its rows of b into L2, which needs
// no ordering, and waits before it reads anything.
//
// Shared memory: sums of the warps [8][16 TOKENS][kPitch], then those of the blocks [parts][tokens of a block][32].
#include "gemm/gemm_skinny_finish.cuh"
#include "gemm/rows_mma.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

inline constexpr int kClusterWarps = 8;
inline constexpr int kClusterRows = 32;   // weight rows of a tile
inline constexpr int kClusterPitch = 36;  // sums from row to row in shared memory
inline constexpr i64 kGatedProduct = 1, kAccumulate = 2, kHalfVectors = 4;  // flags; the last: rows are multiples of 8 bytes

// `types`: four bits each of bias, add, out, activation (SkinnyTypes, SkinnyActivation).
template <typename T, int TOKENS>
__global__ void __launch_bounds__(kClusterWarps * 32, TOKENS == 1 ? 2 : 1)
    gemm_cluster(const u8* a, const u8* b, const float* scale_a, const float* scale_b, const float* global_scale,
                 const void* bias, const void* add, void* out, i64 m, i64 n, i64 k_bytes, i64 a_pitch, i64 b_pitch,
                 i64 out_pitch, i64 add_pitch, i64 scale_a_step, i64 scale_b_step, i64 global_step, i64 parts_, i64 flags,
                 i64 types) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int kTiles = kClusterRows / 8;
    constexpr bool kPromoted = sizeof(T) == 1;
    constexpr int kStepsInFlight = kPromoted ? 2 : 4;  // 8-bit operands need registers for their conversion
    float* const warp_sums = reinterpret_cast<float*>(memory);
    float* const block_sums = warp_sums + kClusterWarps * 16 * TOKENS * kClusterPitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int parts = static_cast<int>(parts_), rank = parts == 1 ? 0 : ptx::cluster_rank();
    const int tile = static_cast<int>(blockIdx.x) / parts, tokens = static_cast<int>(m);
    const bool gated = flags & kGatedProduct;
    const int columns = gated ? kClusterRows / 2 : kClusterRows;
    const i64 first_column = static_cast<i64>(tile) * columns;
    const int steps = static_cast<int>((k_bytes + 63) / 64), slices = parts * kClusterWarps;
    const int slice = rank * kClusterWarps + warp;
    const int begin = steps * slice / slices, end = steps * (slice + 1) / slices;

    // The row of b of local row `i`; past the last column the last row is read again and its result dropped.
    auto row_of = [&](int i) {
        const i64 column = min(first_column + (gated ? i % 16 : i), n - 1);
        return b + (column + (gated && i >= 16 ? n : 0)) * b_pitch;
    };
    const u8* own = row_of(lane);
    for (i64 at = 64ll * begin & ~127ll; at < min(64ll * end, k_bytes); at += 128) ptx::prefetch_l2(own + at);
    ptx::wait_for_previous();
    ptx::launch_dependents();

    const u8 *rows_b[kTiles], *rows_a[2 * TOKENS];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) rows_b[j] = row_of(8 * j + g);
#pragma unroll
    for (int i = 0; i < 2 * TOKENS; ++i) rows_a[i] = a + min(8 * i + g, tokens - 1) * a_pitch;

    const bool halves = sizeof(T) == 1 && flags & kHalfVectors;
    auto in_halves = [&](const u8* p, i64 at) {
        const uint2 first = *reinterpret_cast<const uint2*>(p);
        uint2 second = make_uint2(0u, 0u);
        if (at + 8 < k_bytes) second = *reinterpret_cast<const uint2*>(p + 8);
        return Raw<16>{{first.x, first.y, second.x, second.y}};
    };
    float total[TOKENS][kTiles][4];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;

#pragma unroll 1
    for (int first = begin; first < end; first += kStepsInFlight) {
        Raw<16> of_b[kStepsInFlight][kTiles];
#pragma unroll
        for (int s = 0; s < kStepsInFlight; ++s) {
            const i64 at = 64ll * (first + s) + 16 * t;
            const bool exists = first + s < end && at < k_bytes;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                clear(of_b[s][j]);
                if (exists) of_b[s][j] = halves ? in_halves(rows_b[j] + at, at) : ptx::ld_keep<16>(rows_b[j] + at);
            }
        }
#pragma unroll
        for (int s = 0; s < kStepsInFlight; s += 2) {
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                float part[kTiles][4] = {};
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const i64 at = 64ll * (first + s + c) + 16 * t;
                    Raw<16> low, high;
                    clear(low), clear(high);
                    // No read-only loads: the previous kernel may have written a after this one started.
                    if (first + s + c < end && at < k_bytes) {
                        low = halves ? in_halves(rows_a[2 * i] + at, at) : plain_load(rows_a[2 * i] + at);
                        high = halves ? in_halves(rows_a[2 * i + 1] + at, at) : plain_load(rows_a[2 * i + 1] + at);
                    }
#pragma unroll
                    for (int j = 0; j < kTiles; ++j)
                        mma_64_bytes<T>(kPromoted ? part[j] : total[i][j], low, high, of_b[s + c][j]);
                }
                if (kPromoted) {
#pragma unroll
                    for (int j = 0; j < kTiles; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) total[i][j][e] += part[j][e];
                }
            }
        }
    }

    float* const own_sums = warp_sums + warp * (16 * TOKENS * kClusterPitch);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(own_sums + (16 * i + g + 8 * r) * kClusterPitch + 8 * j + 2 * t) =
                    make_float2(total[i][j][2 * r], total[i][j][2 * r + 1]);
    if (parts > 1) {
        ptx::cluster_barrier();  // also: every block of the cluster has started, so others may write to its memory
    } else {
        __syncthreads();
    }

    // A warp handles one token at a time, a lane one of its columns.
    auto of_warps = [&](int token) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kClusterWarps; ++w) sum += warp_sums[(w * 16 * TOKENS + token) * kClusterPitch + lane];
        return sum;
    };
    const int own_tokens = (tokens + parts - 1) / parts;  // those of block r are r, r + parts, ...
    if (parts > 1) {
        for (int token = warp; token < tokens; token += kClusterWarps) {
            const int at = (rank * own_tokens + token / parts) * kClusterRows + lane;
            ptx::st_cluster(ptx::shared_address(block_sums + at), token % parts, of_warps(token));
        }
        ptx::cluster_barrier();
    }

    const i64 column = first_column + lane % columns, row = column + (lane >= columns ? n : 0);
    const bool exists = column < n;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };
    const SkinnyStore results = {add, out, out_pitch, add_pitch, type(1), type(2), type(3), (flags & kAccumulate) != 0, gated};
    float times = 1.0f, plus = 0.0f;
    if (exists) {
        if (scale_b != nullptr) times *= scale_b[row * scale_b_step];
        if (global_scale != nullptr) times *= global_scale[lane >= columns ? global_step : 0];
        if (bias != nullptr) plus = skinny_load(bias, row, type(0));
    }
    for (int own = warp; rank + own * parts < tokens; own += kClusterWarps) {
        const int token = rank + own * parts;
        float sum = 0.0f;
        if (parts == 1) {
            sum = of_warps(token);
        } else {
            for (int p = 0; p < parts; ++p) sum += block_sums[(p * own_tokens + own) * kClusterRows + lane];
        }
        const float v = sum * times * (scale_a == nullptr ? 1.0f : scale_a[token * scale_a_step]) + plus;
        const float up = __shfl_down_sync(0xffffffffu, v, 16);
        if (exists && lane < columns) results.put(token, column, v, up);
    }
}

}  // namespace rtk
