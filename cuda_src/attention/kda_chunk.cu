// What chunks of the gated delta rule with a decay per channel (KDA; attention/gated_delta_rule.cuh) need of their own tokens:
// T and P as T-typed [chunks][heads][64][64], the numbers of rows, and E K, E Q, F K as T, [chunks][heads][64][d_k].
//
// A block owns a chunk and a value head. Blocks of 16 x 16 rows on the diagonal of M and P are sums over channels in fp32,
// with the decay of each pair of tokens: four by four pairs and a quarter of the channels per thread. Below the diagonal both factors of
// the decay are relative to the first token of the block's rows, so neither is more than 1, and products use mma.
// Grid: chunks, heads.
#include "attention/gated_delta_rule_solve.cuh"

namespace rtk {

// First row, in a tile of right operands, of those for 16 rows from 16 `block` on: all rows before these.
RTK_DEVICE constexpr int rows_before(int block) { return 8 * block * (block - 1); }

template <typename T, int DK>
__global__ void __launch_bounds__(256, 2)
    kda_chunk(const T* q, const T* k, const float* g, const float* beta, const i32* cu, T* solve, T* inner, float* rows,
              T* keys_before, T* queries_before, T* keys_after, i64 sequences, i64 length, i64 heads, i64 key_heads, i64 d_k,
              i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 l2norm, double scale) {
    using Tile = MmaTile<DK>;
    constexpr u32 kBytes = kDelta * Tile::kPitch, kSolveBytes = 4 * kDelta * kSolvePitch;
    constexpr int kPitch = DK + 2;  // of cumulative decays
    extern __shared__ __align__(128) u8 shared[];
    u8 *const key_tile = shared, *const query_tile = key_tile + kBytes, *const right_tile = query_tile + kBytes;
    float* const c = reinterpret_cast<float*>(right_tile + 96 * Tile::kPitch);
    float* const m = c;  // in place of c, later
    float* const p = m + kDelta * kSolvePitch;
    float* const x = reinterpret_cast<float*>(shared);  // in place of tiles, later
    static_assert(kSolveBytes <= 2 * kBytes + 96 * Tile::kPitch, "the inverse fits");
    __shared__ float norms[2][kDelta], betas[kDelta];

    const i64 number = blockIdx.x;
    const int head = static_cast<int>(blockIdx.y), key_head = head / static_cast<int>(heads / key_heads);
    const DeltaChunk chunk = delta_chunk(number, length, cu, static_cast<int>(sequences));
    if (chunk.rows <= 0) return;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const i64 at = number * heads + head, dense = (chunk.batch * length + chunk.first) * heads + head;
    q += chunk.batch * q_batch + chunk.first * q_row + key_head * q_head;
    k += chunk.batch * k_batch + chunk.first * k_row + key_head * k_head;
    const int vectors = static_cast<int>(d_k) / 8;
    Tile::template fetch<kDelta, 256>(key_tile, k, k_row, chunk.rows, vectors);
    Tile::template fetch<kDelta, 256>(query_tile, q, q_row, chunk.rows, vectors);
    ptx::cp_async_commit();
    // Sums of decays over the rows of 256 / DK parts, then those of the parts before.
    constexpr int kParts = 256 / DK, kPartRows = kDelta / kParts;
    const int channel = thread % DK, part = thread / DK;
    {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < kPartRows; ++i) {
            const int row = part * kPartRows + i;
            float value = row < chunk.rows && channel < d_k ? g[(dense + row * heads) * d_k + channel] : 0.0f;
            sum += (value < kMinDecay ? kMinDecay : value) * kLog2e;
            c[row * kPitch + channel] = sum;
        }
    }
    if (thread < kDelta) betas[thread] = thread < chunk.rows ? beta[dense + thread * heads] : 0.0f;
    ptx::cp_async_wait<0>();
    __syncthreads();
    float before = 0.0f;
#pragma unroll
    for (int earlier = 0; earlier + 1 < kParts; ++earlier)
        if (earlier < part) before += c[((earlier + 1) * kPartRows - 1) * kPitch + channel];
    {
        // Four threads a row: half of the channels of k, then of q.
        const int row = thread / 4;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float square = l2norm ? row_square<T, Tile, 4>(which ? query_tile : key_tile, row, thread % 4) : 0.0f;
            const float sum = quad_sum(square);
            if (thread % 4 == 0) norms[which][row] = l2norm ? inverse_norm(sum) : 1.0f;
        }
    }
    __syncthreads();  // sums of the first parts were read
    if (part > 0) {
#pragma unroll 8
        for (int i = 0; i < kPartRows; ++i) c[(part * kPartRows + i) * kPitch + channel] += before;
    }
    __syncthreads();
    if (thread < kDelta) rows[(at * kRowKinds + kBetas) * kDelta + thread] = betas[thread];
    if (thread < DK) rows[(at * kRowKinds + kWholes) * kDelta + thread] = c[(kDelta - 1) * kPitch + thread];
    for (int i = thread; i < kDelta * Tile::kVectors; i += 256) {
        const int row = i / Tile::kVectors, vector = i % Tile::kVectors;
        if (vector >= vectors) continue;
        float key[8], query[8], later[8];
        unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(key_tile + Tile::offset(row, vector)), key);
        unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(query_tile + Tile::offset(row, vector)), query);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float own = c[row * kPitch + 8 * vector + e], end = c[(kDelta - 1) * kPitch + 8 * vector + e];
            const float factor = ptx::ex2(own);
            later[e] = key[e] * norms[0][row] * decay_between(end, own);
            key[e] *= norms[0][row] * factor, query[e] *= norms[1][row] * factor;
        }
        const i64 to = (at * kDelta + row) * d_k + 8 * vector;
        store<T, 8>(keys_before + to, key);
        store<T, 8>(queries_before + to, query);
        store<T, 8>(keys_after + to, later);
    }
    // Blocks on the diagonal: four threads have 4 x 4 pairs of tokens. `own`: of M and of P, a row of them for each thread.
    const int item = thread / 4, quarter = thread % 4, block = item / 10, tile = item % 10;
    const int upper = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, left = tile - upper * (upper + 1) / 2;
    float own[2][4];
    {
        float sums[2][4][4];
#pragma unroll
        for (int which = 0; which < 2; ++which) clear_sums(sums[which]);
        if (block < 4) {
            const int i0 = 16 * block + 4 * upper, j0 = 16 * block + 4 * left;
#pragma unroll 1
            for (int pair = quarter; pair < DK / 2; pair += 4) {
                auto read = [&](const u8* from, int row) {
                    float f[2];
                    unpack<T, 2>(Raw<4>{{*reinterpret_cast<const u32*>(from + Tile::offset(row, pair / 4) + pair % 4 * 4)}}, f);
                    return make_float2(f[0], f[1]);
                };
                float2 keys[4], decays[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    keys[j] = read(key_tile, j0 + j);
                    decays[j] = *reinterpret_cast<const float2*>(c + (j0 + j) * kPitch + 2 * pair);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 key = read(key_tile, i0 + i), query = read(query_tile, i0 + i);
                    const float2 decay = *reinterpret_cast<const float2*>(c + (i0 + i) * kPitch + 2 * pair);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        // Pairs above the diagonal are not used.
                        const float x0 = keys[j].x * ptx::ex2(fminf(decay.x - decays[j].x, 0.0f));
                        const float x1 = keys[j].y * ptx::ex2(fminf(decay.y - decays[j].y, 0.0f));
                        sums[0][i][j] += key.x * x0 + key.y * x1;
                        sums[1][i][j] += query.x * x0 + query.y * x1;
                    }
                }
            }
        }
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float sum = quad_sum(sums[which][i][j]);
                    if (i == quarter) own[which][j] = sum;
                }
    }
    // Right operands of rows of three blocks, then left operands in place of keys and queries.
    for (int i = thread; i < 96 * Tile::kVectors; i += 256) {
        const int place = i / Tile::kVectors, vector = i % Tile::kVectors, of = place < 16 ? 1 : place < 48 ? 2 : 3;
        const int row = place - rows_before(of);
        float key[8];
        unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(key_tile + Tile::offset(row, vector)), key);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            key[e] *= decay_between(c[16 * of * kPitch + 8 * vector + e], c[row * kPitch + 8 * vector + e]);
        *reinterpret_cast<Raw<16>*>(right_tile + Tile::offset(place, vector)) = pack<T, 8>(key);
    }
    __syncthreads();
    for (int i = thread; i < kDelta * Tile::kVectors; i += 256) {
        const int row = i / Tile::kVectors, vector = i % Tile::kVectors;
        Raw<16>* const keys = reinterpret_cast<Raw<16>*>(key_tile + Tile::offset(row, vector));
        Raw<16>* const queries = reinterpret_cast<Raw<16>*>(query_tile + Tile::offset(row, vector));
        float key[8], query[8];
        unpack<T, 8>(*keys, key), unpack<T, 8>(*queries, query);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float by = decay_between(c[row * kPitch + 8 * vector + e], c[(row & ~15) * kPitch + 8 * vector + e]);
            key[e] *= by, query[e] *= by;
        }
        *keys = pack<T, 8>(key), *queries = pack<T, 8>(query);
    }
    __syncthreads();
    for (int i = thread; i < 2 * kDelta * kSolvePitch; i += 256) m[i] = 0.0f;
    __syncthreads();
    if (block < 4) {
        const int i = 16 * block + 4 * upper + quarter, j0 = 16 * block + 4 * left;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = j0 + e;
            if (j < i) m[i * kSolvePitch + j] = own[0][e] * (betas[i] * norms[0][i] * norms[0][j]);
            if (j <= i) p[i * kSolvePitch + j] = own[1][e] * (static_cast<float>(scale) * norms[1][i] * norms[0][j]);
        }
    }
    // Blocks below the diagonal: six of M and six of P.
    for (int task = warp; task < 12; task += 8) {
        const int which = task / 6, of = task % 6, down = of < 1 ? 1 : of < 3 ? 2 : 3, across = of - down * (down - 1) / 2;
        float sums[2][4];
        clear_sums(sums);
        rows_by_rows<T, Tile, DK / 16>(sums, which ? query_tile : key_tile, 16 * down, right_tile,
                                       rows_before(down) + 16 * across, lane);
        float* const to = which ? p : m;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = 16 * down + lane / 4 + 8 * r;
            const float by = which ? static_cast<float>(scale) * norms[1][i] : betas[i] * norms[0][i];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = 16 * across + 8 * n + lane % 4 * 2 + e;
                    to[i * kSolvePitch + j] = sums[n][2 * r + e] * (by * norms[0][j]);
                }
        }
    }
    __syncthreads();
    if (thread < 128) {
        invert_unit_lower(x, m, thread, 1);
        store_square(solve + at * (kDelta * kDelta), x, thread);
    } else {
        store_square(inner + at * (kDelta * kDelta), p, thread - 128);
    }
}

}  // namespace rtk
