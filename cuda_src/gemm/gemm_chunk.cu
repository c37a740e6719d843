// out[m, n] = factor act(sum over k of x[m, k] w[n, k], scaled, + bias[n]) (gated: times the other half) + residual[m, n] for up to
// 16 TOKENS rows of x in bf16 and weights of bf16 or e4m3, where latency matters more than bandwidth. With a norm, x is
// rms_norm(x): every x[m, k] is multiplied by offset + gain[k] and rounded, and the sums by the reciprocal of the row's root
// mean square, so that no product waits for the sum of squares.
//
// As in gemm_cluster.cu, a cluster of `parts` blocks owns a tile of 32 rows of w (gated: 16 and their counterparts) and all
// rows of x; ranges of steps (64 bytes of a row of w) are assigned in order to the 8 warps of each block of the cluster. A warp
// loads its operands straight into the registers of mma.sync: lane 4g + t has the 16 bytes t of a step of row g. The sums of
// a block's warps, and of the squares, are added in shared memory in order, then sent to the block of the cluster that
// finishes the token, which adds those of the blocks in order: results do not depend on timing.
//
// The launch may start before the previous kernel has ended. With kConstant, it has then loaded the weights of its first
// steps, usually all of them, and what belongs to rows of w.
//
// Shared memory: sums of the warps [8][16 TOKENS][kChunkPitch], of which column 32 has the squares; then those of the blocks
// [parts][tokens of a block][32] and [parts][tokens of a block].
#include "gemm/gemm_skinny_finish.cuh"
#include "gemm/gemm_skinny_weights.cuh"
#include "gemm/rows_mma.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kChunkWarps = 8;
inline constexpr int kChunkRows = 32;   // weight rows of a tile
inline constexpr int kChunkPitch = 36;  // sums from row to row in shared memory
inline constexpr i64 kChunkGated = 1, kChunkConstant = 2, kChunkNorm = 4;

// `types`: four bits each of bias, residual, activation (SkinnyTypes, SkinnyActivation).
template <typename Codes, int TOKENS>
__global__ void __launch_bounds__(kChunkWarps * 32, TOKENS == 1 ? 2 : 1)
    gemm_chunk(const u8* x, const u8* weight, const float* scale, const void* bias, const void* residual, const u8* gain,
             bf16* out, i64 m, i64 n, i64 k, i64 x_pitch, i64 weight_pitch, i64 out_pitch, i64 residual_pitch, i64 scale_step,
             i64 parts_, i64 flags, i64 types, double eps, double offset, double factor) {
    extern __shared__ __align__(128) u8 memory[];
    using Weights = WeightCodes<Codes, bf16>;
    constexpr int kTiles = kChunkRows / 8, kParts = 16 / Weights::kBits;  // of eight weights, that a lane has of a step
    constexpr int kChunkSteps = 4 / kParts;                               // in flight
    float* const warp_sums = reinterpret_cast<float*>(memory);
    float* const block_sums = warp_sums + kChunkWarps * 16 * TOKENS * kChunkPitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int parts = static_cast<int>(parts_), rank = parts == 1 ? 0 : ptx::cluster_rank();
    const int tile = static_cast<int>(blockIdx.x) / parts, tokens = static_cast<int>(m);
    const bool gated = flags & kChunkGated, normed = flags & kChunkNorm, constant = flags & kChunkConstant;
    const int columns = gated ? kChunkRows / 2 : kChunkRows;
    const i64 first_column = static_cast<i64>(tile) * columns, k_bytes = k * Weights::kBits / 8;
    const int steps = static_cast<int>((k_bytes + 63) / 64), slices = parts * kChunkWarps;
    const int slice = rank * kChunkWarps + warp;
    const int begin = steps * slice / slices, end = steps * (slice + 1) / slices;
    const i64 column = first_column + lane % columns, row = column + (lane >= columns ? n : 0);  // of results of this lane
    const bool exists = column < n;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };

    if (!constant) ptx::wait_for_previous();
    ptx::launch_dependents();
    // Rows of w; past the last column the last row is read again and its result dropped.
    auto row_of = [&](int j) {
        const int i = 8 * j + g;
        const i64 own = min(first_column + (gated ? i % 16 : i), n - 1);
        return weight + (own + (gated && i >= 16 ? n : 0)) * weight_pitch + 16 * t;
    };
    Raw<16> of_w[kChunkSteps][kTiles];
    auto load_weights = [&](int first) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const u8* const from = row_of(j) + 64ll * first;
#pragma unroll
            for (int s = 0; s < kChunkSteps; ++s) {
                clear(of_w[s][j]);
                if (first + s < end && 64ll * (first + s) + 16 * t < k_bytes) of_w[s][j] = ptx::ld_stream<16>(from + 64 * s);
            }
        }
    };
    load_weights(begin);
    float times = 1.0f, plus = 0.0f;
    if (exists) {
        if (scale != nullptr) times = scale[row * scale_step];
        if (bias != nullptr) plus = skinny_load(bias, row, type(0));
    }
    if (constant) ptx::wait_for_previous();

    // A warp finishes one token at a time, a lane one of its columns; what is added to the first one is loaded now.
    float added = 0.0f;
    if (residual != nullptr && rank + warp * parts < tokens && exists && lane < columns)
        added = skinny_load(residual, (rank + warp * parts) * residual_pitch + column, type(1));
    const u8* rows_x[2 * TOKENS];
#pragma unroll
    for (int i = 0; i < 2 * TOKENS; ++i) rows_x[i] = x + min(8 * i + g, tokens - 1) * x_pitch;
    const float shift = static_cast<float>(offset);
    float total[TOKENS][kTiles][4], squares[2 * TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        squares[2 * i] = squares[2 * i + 1] = 0.0f;
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;
    }

#pragma unroll 1
    for (int first = begin; first < end; first += kChunkSteps) {
        if (first != begin) load_weights(first);
#pragma unroll
        for (int s = 0; s < kChunkSteps; ++s)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                // Elements of k: the weights of part p of lane t are 8 of (64 / kBits 8) kParts.
                const i64 at = (static_cast<i64>(first + s) * 4 + t) * (8 * kParts) + 8 * part;
                if (first + s >= end) continue;
                const bool inside = at < k;  // not for all lanes of the last step
                float gains[8];
                if (normed && inside) {
                    unpack<bf16, 8>(plain_load(gain + 2 * at), gains);
#pragma unroll
                    for (int e = 0; e < 8; ++e) gains[e] += shift;
                }
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) {
                    Raw<16> two[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        clear(two[r]);
                        if (inside) two[r] = plain_load(rows_x[2 * i + r] + 2 * at);  // no read-only load: just written
                        if (normed && inside) {
                            float value[8];
                            unpack<bf16, 8>(two[r], value);
#pragma unroll
                            for (int e = 0; e < 8; ++e) {
                                squares[2 * i + r] = fmaf(value[e], value[e], squares[2 * i + r]);
                                value[e] *= gains[e];
                            }
                            two[r] = pack<bf16, 8>(value);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        Raw<16> pairs;
                        if constexpr (kParts == 1) {
                            pairs = of_w[s][j];
                        } else {
                            Weights::pairs(Raw<8>{{of_w[s][j].w[2 * part], of_w[s][j].w[2 * part + 1]}}, 0u, CodeOptions{false}, pairs.w);
                        }
                        mma_64_bytes<bf16>(total[i][j], two[0], two[1], pairs);
                    }
                }
            }
    }

    float* const own_sums = warp_sums + warp * (16 * TOKENS * kChunkPitch);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* const to = own_sums + (16 * i + g + 8 * r) * kChunkPitch;
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
                *reinterpret_cast<float2*>(to + 8 * j + 2 * t) = make_float2(total[i][j][2 * r], total[i][j][2 * r + 1]);
            if (normed) {
                float square = squares[2 * i + r];
                square += __shfl_xor_sync(0xffffffffu, square, 1);
                square += __shfl_xor_sync(0xffffffffu, square, 2);
                if (t == 0) to[kChunkRows] = square;
            }
        }
    if (parts > 1) {
        ptx::cluster_barrier();  // also: every block of the cluster has started, so others may write to its memory
    } else {
        __syncthreads();
    }

    auto of_warps = [&](int token, int at) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kChunkWarps; ++w) sum += warp_sums[(w * 16 * TOKENS + token) * kChunkPitch + at];
        return sum;
    };
    const int own_tokens = (tokens + parts - 1) / parts;  // those of block r are r, r + parts, ...
    float* const block_squares = block_sums + parts * own_tokens * kChunkRows;
    if (parts > 1) {
        for (int token = warp; token < tokens; token += kChunkWarps) {
            const int at = rank * own_tokens + token / parts;
            ptx::st_cluster(ptx::shared_address(block_sums + at * kChunkRows + lane), token % parts, of_warps(token, lane));
            if (normed && lane == 0)
                ptx::st_cluster(ptx::shared_address(block_squares + at), token % parts, of_warps(token, kChunkRows));
        }
        ptx::cluster_barrier();
    }
    for (int own = warp; rank + own * parts < tokens; own += kChunkWarps) {
        const int token = rank + own * parts;
        float sum = 0.0f, square = 0.0f;
        if (parts == 1) {
            sum = of_warps(token, lane);
            if (normed) square = of_warps(token, kChunkRows);
        } else {
            for (int p = 0; p < parts; ++p) {
                sum += block_sums[(p * own_tokens + own) * kChunkRows + lane];
                if (normed) square += block_squares[p * own_tokens + own];
            }
        }
        if (normed) sum *= rsqrtf(square / static_cast<float>(k) + static_cast<float>(eps));
        float value = fmaf(sum, times, plus);
        const float up = __shfl_down_sync(0xffffffffu, value, 16);
        value = skinny_activation(value, type(2));
        if (gated) value *= up;
        if (exists && lane < columns) {
            if (own != warp && residual != nullptr) added = skinny_load(residual, token * residual_pitch + column, type(1));
            const float one[1] = {fmaf(value, static_cast<float>(factor), added)};
            store<bf16, 1>(out + token * out_pitch + column, one);
        }
    }
}

}  // namespace rtk
