// Gradients of the gated delta rule with a decay per channel (KDA; attention/gated_delta_rule.cuh) inside chunks, from U, dR and
// the states and their gradients around each chunk. With e_ijd = exp(c_id - c_jd) for i >= j,
//     X = scale lower(dO U^T),  N = -strictly lower(dR U^T),
//     dQ_id = sum_j X_ij e_ijd k_jd + scale E dO S^T,  Y_id = sum_j N_ij e_ijd k_jd - E dR S^T,
//     Z_jd = sum_i e_ijd (X_ij q_id + beta_i N_ij k_id) + F U dS^T,  dK = beta Y + Z,
//     dbeta = rowsum(dR * V) + rowsum(K * Y),  dc = Q * dQ + beta K * Y - K * Z,
//     dc of the last row also + colsum(K * F U dS^T) + exp(c_end) rowsum(S * dS),  dg = sums of dc to the end of the chunk.
// What does not decay, the diagonal of X and the last row of F U dS^T, counts as 0 in dc, as in gated_delta_rule_grads.cu.
//
// A block owns a chunk and a head, and takes 64 channels at a time. Sums over tokens of other blocks of 16 rows are products with both
// factors of e relative to the first row of the later block, as in kda_chunk.cu. Within such a block a thread has one
// channel and multiplies decays from row to row. Warps 0 to 3 have 16 rows of dQ each, warps 4 to 7 those of Y; both
// have half of the channels of Z. Grid: chunks, heads.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

template <typename T>
struct KdaGradArguments {
    const T *q, *k, *v, *dout;
    const float *g, *rows;
    const i32* cu;
    const T *states, *dstates, *updates, *drest;
    T *dq, *dk;
    float *dg, *dbeta;
    float* kept;  // [chunks][heads][2][64][64]
    i64 sequences, length, heads, d_k, d_v, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch,
        dout_row, dout_head, l2norm;
    double scale;
};

// Where a block's rows begin: in its arguments, in dense tensors (`dense`: times the width), and in those of chunks.
template <typename T>
struct KdaRows {
    const T *q, *k, *v, *dout;
    i64 dense, at;
    int rows;
};

template <typename T, int DK>
__global__ void __launch_bounds__(256, DK > 64 ? 2 : 1) kda_grads(const __grid_constant__ KdaGradArguments<T> args) {
    using Tile = MmaTile<64>;
    constexpr u32 kBytes = kDelta * Tile::kPitch;
    constexpr int kPitch = 65, kHalves = DK / 64;
    extern __shared__ __align__(128) u8 shared[];
    u8 *const key_tile = shared, *const query_tile = key_tile + kBytes;  // 64 channels
    u8 *const x_tile = query_tile + kBytes, *const n_tile = x_tile + kBytes;
    float* const diagonal = reinterpret_cast<float*>(n_tile + kBytes);  // of X and N: [2][64][16]
    u8* const stage = n_tile + 2 * kBytes;                              // then c and operands, then sums
    float* const c = reinterpret_cast<float*>(stage);                   // [64][kPitch]
    u8* const right_tile = stage + (4 * kDelta * kPitch + 127) / 128 * 128;
    u8 *const left_tile = right_tile + 96 * Tile::kPitch, *const keys_tile = left_tile + kBytes;
    float* const sums = reinterpret_cast<float*>(stage);  // dQ, Y, Z: [3][64][kPitch]
    __shared__ float norms[2][kDelta], betas[kDelta], at_end[4][64], whole[64], totals[4][64];

    const i64 number = blockIdx.x;
    const int head = static_cast<int>(blockIdx.y);
    const DeltaChunk chunk = delta_chunk(number, args.length, args.cu, static_cast<int>(args.sequences));
    if (chunk.rows <= 0) return;
    const float factor = static_cast<float>(args.scale);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const bool of_queries = warp < 4;
    const int down = warp % 4, own_row = 16 * down;
    // Addresses in shared memory: the loop over channels reads them again, instead of keeping them in registers.
    __shared__ KdaRows<T> own;
    if (thread == 0) {
        const i64 batch = chunk.batch;
        own.k = args.k + batch * args.k_batch + chunk.first * args.k_row + head * args.k_head;
        own.q = args.q + batch * args.q_batch + chunk.first * args.q_row + head * args.q_head;
        own.v = args.v + batch * args.v_batch + chunk.first * args.v_row + head * args.v_head;
        own.dout = args.dout + batch * args.dout_batch + chunk.first * args.dout_row + head * args.dout_head;
        own.dense = (batch * args.length + chunk.first) * args.heads + head;
        own.at = number * args.heads + head;
        own.rows = chunk.rows;
    }
    __syncthreads();
    const int row = thread / 4, part = thread % 4;  // where four threads have a row
    if (thread < kDelta) betas[thread] = args.rows[(own.at * kRowKinds + kBetas) * kDelta + thread];
    {
        float square[2] = {0.0f, 0.0f};
        if (args.l2norm && row < own.rows) {
            for (int vector = part; vector < args.d_k / 8; vector += 4) {
                float a[8], b[8];
                load_keep<T, 8>(own.k + row * args.k_row + 8 * vector, a), load_keep<T, 8>(own.q + row * args.q_row + 8 * vector, b);
#pragma unroll
                for (int e = 0; e < 8; ++e) square[0] += a[e] * a[e], square[1] += b[e] * b[e];
            }
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float sum = quad_sum(square[which]);
            if (part == 0) norms[which][row] = args.l2norm ? rsqrtf(sum + 1e-6f) : 1.0f;
        }
    }
    u8 *const dout_tile = stage, *const update_tile = dout_tile + kBytes, *const rest_tile = update_tile + kBytes;
    u8 *const state_tile = rest_tile + kBytes, *const dstate_tile = state_tile + kBytes;
    auto fetch_rows = [&](int column0, int across) {
        Tile::template fetch<kDelta, 256>(
            dout_tile, own.dout + column0, args.dout_row, own.rows, across);
        Tile::template fetch<kDelta, 256>(update_tile, args.updates + own.at * kDelta * args.d_v + column0, args.d_v, kDelta, across);
        Tile::template fetch<kDelta, 256>(rest_tile, args.drest + own.at * kDelta * args.d_v + column0, args.d_v, kDelta, across);
    };
    __shared__ float of_rows[3][kDelta];  // dbeta, Q . dQ, K . dK
    auto kept = [&] {  // dQ and dK of the first 64 channels
        const int thread = static_cast<int>(this_thread());
        return args.kept + own.at * (2 * kDelta * 64) + thread * 16;
    };

    {  // X and N
        float inner[8][4], of_beta = 0.0f;  // dO U^T or dR U^T
        clear_sums(inner);
#pragma unroll 1
        for (int column0 = 0; column0 < static_cast<int>(args.d_v); column0 += 64) {
            const int across = min(static_cast<int>(args.d_v) - column0, 64) / 8;
            fetch_rows(column0, across);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            rows_by_rows_rolled<T, Tile, 4>(inner, of_queries ? dout_tile : rest_tile, own_row, update_tile, 0, lane);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int vector = 2 * part + e;
                if (row >= own.rows || vector >= across) continue;
                float a[8], b[8];
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(rest_tile + Tile::offset(row, vector)), a);
                load_keep<T, 8>(own.v + row * args.v_row + column0 + 8 * vector, b);
#pragma unroll
                for (int i = 0; i < 8; ++i) of_beta += a[i] * b[i];
            }
            __syncthreads();
        }
        of_beta = quad_sum(of_beta);
        if (part == 0) of_rows[0][row] = of_beta, of_rows[1][row] = 0.0f, of_rows[2][row] = 0.0f;
        u8* const to = of_queries ? x_tile : n_tile;
        float* const block_of = diagonal + (of_queries ? 0 : kDelta * 16);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = 8 * n + lane % 4 * 2 + e;
                    const float sum = inner[n][2 * r + e];
                    pair[e] = of_queries ? (j <= i ? factor * sum : 0.0f) : (j < i ? -sum : 0.0f);
                    if (j / 16 == down) block_of[i * 16 + j % 16] = pair[e];
                }
                write_pair<T, Tile>(to, i, n, lane, pair[0], pair[1]);
            }
        }
    }

#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
        // Recomputed, so that addresses do not stay in registers.
        const int thread = static_cast<int>(this_thread()), lane = thread % kWarp, warp = thread / kWarp;
        const bool of_queries = warp < 4;
        const int down = warp % 4, own_row = 16 * down, first = warp / 4 * 4, row = thread / 4, part = thread % 4;
        const int channel = thread % 64, block = thread / 64;  // where a thread has a channel of 16 rows
        auto decay_at = [&](int half, int i) {
            const int d = 64 * half + channel;
            if (i >= own.rows || d >= args.d_k) return 0.0f;
            const float value = args.g[(own.dense + i * args.heads) * args.d_k + d];
            return (value < kMinDecay ? kMinDecay : value) * kLog2e;
        };
        const int vectors = min(static_cast<int>(args.d_k) - 64 * half, 64) / 8;
        __syncthreads();
        Tile::template fetch<kDelta, 256>(key_tile, own.k + 64 * half, args.k_row, own.rows, max(vectors, 0));
        Tile::template fetch<kDelta, 256>(query_tile, own.q + 64 * half, args.q_row, own.rows, max(vectors, 0));
        float by_state[8][4], later[4][4];  // dO S^T or dR S^T, U dS^T
        clear_sums(by_state), clear_sums(later);
        float both_states = 0.0f;
#pragma unroll 1
        for (int column0 = 0; column0 < static_cast<int>(args.d_v); column0 += 64) {
            const int across = min(static_cast<int>(args.d_v) - column0, 64) / 8, channels = 8 * max(vectors, 0);
            fetch_rows(column0, across);
            const i64 states = (own.at * args.d_k + 64 * half) * args.d_v + column0;
            Tile::template fetch<64, 256>(state_tile, args.states + states, args.d_v, channels, across);
            Tile::template fetch<64, 256>(dstate_tile, args.dstates + states, args.d_v, channels, across);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            const u8* const left = of_queries ? dout_tile : rest_tile;
            rows_by_rows_rolled<T, Tile, 4>(by_state, left, own_row, state_tile, 0, lane);
            rows_by_rows_rolled<T, Tile, 4>(later, update_tile, own_row, dstate_tile, 8 * first, lane);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int vector = 2 * part + e;
                float a[8], b[8];
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(state_tile + Tile::offset(row, vector)), a);
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(dstate_tile + Tile::offset(row, vector)), b);
#pragma unroll
                for (int i = 0; i < 8; ++i) both_states += a[i] * b[i];
            }
            __syncthreads();
        }
        both_states = quad_sum(both_states);
        if (part == 0) whole[row] = both_states;  // of a channel
        {  // c
            float sum = 0.0f;
#pragma unroll 4
            for (int i = 0; i < 16; ++i) sum += decay_at(half, 16 * block + i);
            totals[block][channel] = sum;
            __syncthreads();
            sum = 0.0f;
#pragma unroll
            for (int b = 0; b < 3; ++b)
                if (b < block) sum += totals[b][channel];
#pragma unroll 4
            for (int i = 0; i < 16; ++i) {
                sum += decay_at(half, 16 * block + i);
                c[(16 * block + i) * kPitch + channel] = sum;
            }
        }
        __syncthreads();
        for (int i = thread; i < (96 + kDelta) * Tile::kVectors; i += 256) {
            const bool is_left = i >= 96 * Tile::kVectors;
            const int place = i / Tile::kVectors - (is_left ? 96 : 0), vector = i % Tile::kVectors;
            const int of = is_left ? place / 16 : place < 16 ? 1 : place < 48 ? 2 : 3;
            const int from = is_left ? place : place - 8 * of * (of - 1);
            float key[8], query[8];
            unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(key_tile + Tile::offset(from, vector)), key);
            unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(query_tile + Tile::offset(from, vector)), query);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float own = c[from * kPitch + 8 * vector + e], start = c[16 * of * kPitch + 8 * vector + e];
                const float by = is_left ? decay_between(own, start) : decay_between(start, own);
                query[e] *= by * norms[1][from];
                key[e] *= by * norms[0][from] * (is_left ? betas[from] : 1.0f);
            }
            if (is_left) *reinterpret_cast<Raw<16>*>(left_tile + Tile::offset(place, vector)) = pack<T, 8>(query);
            *reinterpret_cast<Raw<16>*>((is_left ? keys_tile : right_tile) + Tile::offset(place, vector)) = pack<T, 8>(key);
        }
        __syncthreads();
        {  // dQ or Y of other blocks, then of the state
            const float by = of_queries ? factor : -1.0f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // half of the channels at a time: registers
                float others[4][4];
                clear_sums(others);
#pragma unroll
                for (int step = 0; step < 3; ++step) {
                    if (step >= down) continue;
                    u32 a[4];
                    Tile::left(a, of_queries ? x_tile : n_tile, own_row, step, lane);
                    by_some_columns<T, Tile>(others, a, right_tile, 8 * down * (down - 1) + 16 * step, 4 * h, lane);
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    __syncwarp();  // loads stay here: registers
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int d = 32 * h + 8 * n + lane % 4 * 2 + e % 2;
                        const float here = c[(own_row + lane / 4 + e / 2 * 8) * kPitch + d];
                        float& sum = by_state[4 * h + n][e];
                        sum = by * ptx::ex2(here) * sum + decay_between(here, c[own_row * kPitch + d]) * others[n][e];
                    }
                }
            }
        }
        // Z of the state, with its part of dc at the end of the chunk, then of other blocks.
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 8 * (first + n) + lane % 4 * 2 + e;
                float sum = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + lane / 4 + 8 * r;
                    float pair[2];
                    read_pair<T, Tile>(key_tile, i, first + n, lane, pair);
                    float& value = later[n][2 * r + e];
                    value *= decay_between(c[(kDelta - 1) * kPitch + d], c[i * kPitch + d]);
                    if (i + 1 < own.rows) sum += value * pair[e] * norms[0][i];
                }
#pragma unroll
                for (int offset = 4; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                if (lane < 4) at_end[down][d] = sum;
            }
#pragma unroll 1
        for (int of = down + 1; of < 4; ++of) {
            float others[4][4];
            u32 a[4];
            clear_sums(others);
            Tile::left_transposed(a, x_tile, 16 * of, down, lane);
            by_some_columns<T, Tile>(others, a, left_tile, 16 * of, first, lane);
            Tile::left_transposed(a, n_tile, 16 * of, down, lane);
            by_some_columns<T, Tile>(others, a, keys_tile, 16 * of, first, lane);
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int d = 8 * (first + n) + lane % 4 * 2 + e % 2;
                    later[n][e] += others[n][e] * decay_between(c[16 * of * kPitch + d], c[(own_row + lane / 4 + e / 2 * 8) * kPitch + d]);
                }
        }
        const float end = ptx::ex2(c[(kDelta - 1) * kPitch + channel]);
        __syncthreads();  // c and operands were read
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float* const to = sums + (own_row + lane / 4 + e / 2 * 8) * kPitch + lane % 4 * 2 + e % 2;
#pragma unroll
            for (int n = 0; n < 8; ++n) to[(of_queries ? 0 : kDelta * kPitch) + 8 * n] = by_state[n][e];
#pragma unroll
            for (int n = 0; n < 4; ++n) to[2 * kDelta * kPitch + 8 * (first + n)] = later[n][e];
        }
        __syncthreads();
        {  // the rows of a block among each other
            const int block = static_cast<int>(this_thread()) / 64, channel = static_cast<int>(this_thread()) % 64;
            float decays[16], keys[16], column[16];
            auto read = [&](const u8* tile, int i) {
                T value = *reinterpret_cast<const T*>(tile + Tile::offset(i, channel / 8) + channel % 8 * 2);
                float f[1];
                unpack<T, 1>(*reinterpret_cast<const Raw<2>*>(&value), f);
                return f[0];
            };
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int here = 16 * block + i;
                const float by = ptx::ex2(decay_at(half, here)), key = read(key_tile, here) * norms[0][here];
                const float query = read(query_tile, here) * norms[1][here], beta = betas[here];
                float* const place = sums + here * kPitch + channel;
                float dquery = place[0], y = place[kDelta * kPitch];
                keys[i] = here + 1 < own.rows ? key : 0.0f, decays[i] = 1.0f, column[i] = place[2 * kDelta * kPitch];
#pragma unroll
                for (int j = 0; j < i; ++j) {
                    decays[j] *= by;
                    const float x = diagonal[here * 16 + j], n = diagonal[kDelta * 16 + here * 16 + j];
                    const float decayed = decays[j] * keys[j];
                    dquery += x * decayed, y += n * decayed;
                    column[j] += decays[j] * (x * query + n * beta * key);
                }
                place[0] = dquery, place[kDelta * kPitch] = y;
                place[2 * kDelta * kPitch] = query * dquery + beta * key * y;  // of dc
            }
            float sum = 0.0f, dc[16];
#pragma unroll
            for (int i = 15; i >= 0; --i) {
                float* const place = sums + (16 * block + i) * kPitch + channel;
                sum += place[2 * kDelta * kPitch] - keys[i] * column[i];
                dc[i] = sum;
                place[2 * kDelta * kPitch] = betas[16 * block + i] * place[kDelta * kPitch] + column[i];  // dK without the diagonal
            }
            totals[block][channel] = sum;
            __syncthreads();
            float rest = end * whole[channel];
#pragma unroll
            for (int b = 0; b < 4; ++b) rest += at_end[b][channel] + (b > block ? totals[b][channel] : 0.0f);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (16 * block + i < own.rows && 64 * half + channel < args.d_k)
                    args.dg[(own.dense + (16 * block + i) * args.heads) * args.d_k + 64 * half + channel] = dc[i] + rest;
        }
        float here[3] = {0.0f, 0.0f, 0.0f};
        const float itself = diagonal[row * 16 + row % 16];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            float key[8], query[8];
            unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(key_tile + Tile::offset(row, 2 * part + v)), key);
            unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(query_tile + Tile::offset(row, 2 * part + v)), query);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                float* const place = sums + row * kPitch + 16 * part + 8 * v + e;
                const float dquery = place[0] += itself * norms[0][row] * key[e], y = place[kDelta * kPitch];
                const float dkey = place[2 * kDelta * kPitch] += itself * norms[1][row] * query[e];
                here[0] += key[e] * y, here[1] += query[e] * dquery, here[2] += key[e] * dkey;
                query[e] = dquery, key[e] = dkey;
            }
            if (half + 1 < kHalves) store<float, 8>(kept() + 8 * v, query), store<float, 8>(kept() + kDelta * 64 + 8 * v, key);
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            here[i] = quad_sum(here[i]) * norms[i == 1 ? 1 : 0][row];
            if (part == 0) of_rows[i][row] += here[i];
        }
    }
    __syncthreads();
    if (row >= own.rows) return;
    if (part == 0) args.dbeta[own.dense + row * args.heads] = of_rows[0][row];
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            const int d = 64 * half + 16 * part + 8 * v;
            if (d >= args.d_k) continue;
            const i64 to = (own.dense + row * args.heads) * args.d_k + d;
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                float f[8];
                if (half + 1 < kHalves) {
                    load_keep<float, 8>(kept() + which * (kDelta * 64) + 8 * v, f);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e) f[e] = sums[(2 * which * kDelta + row) * kPitch + 16 * part + 8 * v + e];
                }
                if (args.l2norm) {
                    const float norm = norms[1 - which][row];
                    float x[8];
                    load_keep<T, 8>((which ? own.k + row * args.k_row : own.q + row * args.q_row) + d, x);
#pragma unroll
                    for (int e = 0; e < 8; ++e) f[e] = norm * (f[e] - norm * x[e] * of_rows[1 + which][row]);
                }
                store<T, 8>((which ? args.dk : args.dq) + to, f);
            }
        }
}

}  // namespace rtk
