// Gradients of the gated delta rule inside chunks (attention/gated_delta_rule.cuh), from U, dR and the states and their
// gradients around each chunk. With A1 = dO S^T, A2 = dR S^T, A3 = U dS^T,
//     dP = lower(dO U^T),  dM = -strictly lower(dR U^T),  X = scale dP * G,  N = beta_i dM * G,
//     dQ = X K + scale E A1,  dK = (N + N^T) K + X^T Q - beta E A2 + F A3,
//     dbeta = rowsum(dR * V) - exp(c) K . A2 + rowsum(dM * K K^T * G),
//     dc = rowsum(W) - colsum(W) - beta exp(c) K . A2 + scale exp(c) Q . A1 - s,  W = dM * M + dP * P,  s = F K . A3,
//     dc of the last row also + sum(s) + exp(c_end) <S, dS>,  dg = sums of dc from a row to the end of its chunk.
// What does not decay, the diagonal of P and the last row of s, counts as 0 in dc. It would cancel, and in fp32 hide what
// strong decays leave of the rest.
//
// A block owns a chunk and a key head, and adds up its value heads in order. Of each value head, v comes in tiles of 64
// columns, in one or two `stages`. With kUncorrected, dM and A2 count as 0. Warps 0 to 3 have 16 rows of dQ each, warps 4 to 7 those of dK. Grid: chunks, key heads.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

// Rows of a 16 x COLS accumulator by the same rows of a tile: the dot products, for both rows of this lane.
template <typename T, typename Tile, int N>
RTK_DEVICE void row_dots(const float (&sums)[N][4], const u8* tile, int row, int lane, float (&dots)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float pair[2];
            read_pair<T, Tile>(tile, row + lane / 4 + 8 * r, n, lane, pair);
            dot += sums[n][2 * r] * pair[0] + sums[n][2 * r + 1] * pair[1];
        }
        dots[r] = quad_sum(dot);
    }
}

template <typename T, int DK>
__global__ void __launch_bounds__(256) gated_delta_rule_grads(const __grid_constant__ DeltaGradArguments<T> args) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<64>;
    constexpr int kTiles = DK / 8;
    constexpr u32 kKBytes = kDelta * KTile::kPitch, kVBytes = kDelta * VTile::kPitch, kSBytes = DK * VTile::kPitch;
    extern __shared__ __align__(128) u8 shared[];
    u8 *const key_tile = shared, *const query_tile = key_tile + kKBytes;
    constexpr u32 kStageBytes = 3 * kVBytes + 2 * kSBytes;
    u8* const tiles = query_tile + kKBytes;
    __shared__ float numbers[kRowKinds][kDelta];
    __shared__ float column_sums[8][kDelta], row_sums[3][kDelta], betas[2][kDelta], state_sums[8];

    const i64 number = blockIdx.x;
    const int key_head = static_cast<int>(blockIdx.y), each = static_cast<int>(args.heads / args.key_heads);
    const DeltaChunk chunk = delta_chunk(number, args.length, args.cu, static_cast<int>(args.sequences));
    if (chunk.rows <= 0) return;
    const float factor = static_cast<float>(args.scale);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const bool of_queries = warp < 4, meets = of_queries || !(args.flags & kUncorrected);  // the state, and other rows
    const int own_row = 16 * (warp % 4);
    const i64 batch = chunk.batch, dense_row = batch * args.length + chunk.first;
    KTile::template fetch<kDelta, 256>(
        key_tile, args.k + batch * args.k_batch + chunk.first * args.k_row + key_head * args.k_head, args.k_row,
        chunk.rows, static_cast<int>(args.d_k) / 8);
    KTile::template fetch<kDelta, 256>(
        query_tile, args.q + batch * args.q_batch + chunk.first * args.q_row + key_head * args.q_head, args.q_row,
        chunk.rows, static_cast<int>(args.d_k) / 8);
    const int count = static_cast<int>(args.stages), across = (static_cast<int>(args.d_v) + 63) / 64;
    auto fetch = [&](int item) {  // value head and tile of columns
        if (item < each * across) {
            const int head = key_head * each + item / across, column0 = item % across * 64;
            const int vectors = min(static_cast<int>(args.d_v) - column0, 64) / 8;
            const i64 at = number * args.heads + head;
            u8* const to = tiles + item % count * kStageBytes;
            VTile::template fetch<kDelta, 256>(
                to, args.dout + batch * args.dout_batch + chunk.first * args.dout_row + head * args.dout_head + column0,
                args.dout_row, chunk.rows, vectors);
            VTile::template fetch<kDelta, 256>(to + kVBytes, args.updates + at * kDelta * args.d_v + column0, args.d_v,
                                               kDelta, vectors);
            VTile::template fetch<kDelta, 256>(to + 2 * kVBytes, args.drest + at * kDelta * args.d_v + column0,
                                               args.d_v, kDelta, vectors);
            u8* const both = to + 3 * kVBytes;
            VTile::template fetch<DK, 256>(both, args.states + at * args.d_k * args.d_v + column0, args.d_v,
                                           static_cast<int>(args.d_k), vectors);
            VTile::template fetch<DK, 256>(both + kSBytes, args.dstates + at * args.d_k * args.d_v + column0, args.d_v,
                                           static_cast<int>(args.d_k), vectors);
        }
        ptx::cp_async_commit();
    };
    fetch(0);
    float total[kTiles][4];  // dQ or dK
    clear_sums(total);

#pragma unroll 1
    for (int e = 0; e < each; ++e) {
        const int head = key_head * each + e;
        const i64 at = number * args.heads + head;
        for (int i = thread; i < kRowKinds * kDelta; i += 256)
            (&numbers[0][0])[i] = args.rows[at * (kRowKinds * kDelta) + i];
        float inner[8][4];           // dO U^T or dR U^T
        float dots[2] = {0.0f, 0.0f};  // Q . A1, or K . A2
        float later[2] = {0.0f, 0.0f};  // K . A3
        float products = 0.0f, both_states = 0.0f;
        clear_sums(inner);
        u8* dout_tile = nullptr;
#pragma unroll 1
        for (int column0 = 0; column0 < static_cast<int>(args.d_v); column0 += 64) {
            const int columns = min(static_cast<int>(args.d_v) - column0, 64), item = e * across + column0 / 64;
            dout_tile = tiles + item % count * kStageBytes;
            const u8* const update_tile = dout_tile + kVBytes;
            const u8* const rest_tile = update_tile + kVBytes;
            const u8* const state_tile = rest_tile + kVBytes;
            const u8* const dstate_tile = state_tile + kSBytes;
            if (count > 1) fetch(item + 1), ptx::cp_async_wait<1>();
            else if (item > 0) fetch(item), ptx::cp_async_wait<0>();
            else ptx::cp_async_wait<0>();
            __syncthreads();
            const u8* const left = of_queries ? dout_tile : rest_tile;
            if (meets) rows_by_rows<T, VTile, 4>(inner, left, own_row, update_tile, 0, lane);
            float factors[2], one[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                factors[r] = ptx::ex2(numbers[kDecays][i]) * (of_queries ? factor : -numbers[kBetas][i]);
            }
            // Half of the columns at a time: registers.
#pragma unroll 1
            for (int half = 0; half < kTiles / 8; ++half) {
                float sums[8][4];
                clear_sums(sums);
                if (meets) rows_by_rows_rolled<T, VTile, 4>(sums, left, own_row, state_tile, 64 * half, lane);
                const u8* const other = of_queries ? query_tile : key_tile;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    one[r] = 0.0f;
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        float pair[2];
                        read_pair<T, KTile>(other, own_row + lane / 4 + 8 * r, 8 * half + n, lane, pair);
                        one[r] += sums[n][2 * r] * pair[0] + sums[n][2 * r + 1] * pair[1];
                    }
                    dots[r] += one[r];
                }
#pragma unroll
                for (int h = 0; h < kTiles / 8; ++h) {
                    if (h != half) continue;
#pragma unroll
                    for (int n = 0; n < 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) total[8 * h + n][i] += factors[i / 2] * sums[n][i];
                }
                if (of_queries) continue;
                clear_sums(sums);
                rows_by_rows_rolled<T, VTile, 4>(sums, update_tile, own_row, dstate_tile, 64 * half, lane);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + lane / 4 + 8 * r;
                    const float after = decay_between(numbers[kDecays][kDelta - 1], numbers[kDecays][i]);
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        float pair[2];
                        read_pair<T, KTile>(key_tile, i, 8 * half + n, lane, pair);
                        later[r] += sums[n][2 * r] * pair[0] + sums[n][2 * r + 1] * pair[1];
                    }
#pragma unroll
                    for (int h = 0; h < kTiles / 8; ++h) {
                        if (h != half) continue;
#pragma unroll
                        for (int n = 0; n < 8; ++n)
#pragma unroll
                            for (int c = 0; c < 2; ++c) total[8 * h + n][2 * r + c] += after * sums[n][2 * r + c];
                    }
                }
            }
            // <S, dS>, and dR . V: four threads a row.
            for (int i = thread; i < DK * 8; i += 256) {
                float a[8], b[8];
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(state_tile + VTile::offset(i / 8, i % 8)), a);
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(dstate_tile + VTile::offset(i / 8, i % 8)), b);
#pragma unroll
                for (int c = 0; c < 8; ++c) both_states += a[c] * b[c];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = thread / 4, vector = thread % 4 * 2 + half;
                if (row >= chunk.rows || vector * 8 >= columns) continue;
                float a[8], b[8];
                unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(rest_tile + VTile::offset(row, vector)), a);
                load_keep<T, 8>(args.v + batch * args.v_batch + (chunk.first + row) * args.v_row + head * args.v_head +
                                    column0 + 8 * vector,
                                b);
#pragma unroll
                for (int c = 0; c < 8; ++c) products += a[c] * b[c];
            }
            __syncthreads();
        }
        products = quad_sum(products);
        if (thread % 4 == 0) betas[0][thread / 4] = products;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) both_states += __shfl_xor_sync(0xffffffffu, both_states, offset);
        if (lane == 0) state_sums[warp] = both_states;

        // The matrices inside the chunk: q_i . k_j, or k_i . k_j.
        float pairs[8][4], columns[8][2], row_sum[2] = {0.0f, 0.0f}, beta_sum[2] = {0.0f, 0.0f};
        clear_sums(pairs);
        if (meets) rows_by_rows_rolled<T, KTile, DK / 16>(pairs, of_queries ? query_tile : key_tile, own_row, key_tile, 0, lane);
        // Where dO and U were.
        u8 *const x_tile = dout_tile, *const n_tile = dout_tile + kVBytes, *const to = of_queries ? x_tile : n_tile;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int j = 8 * n + lane % 4 * 2 + c;
                columns[n][c] = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + lane / 4 + 8 * r;
                    const float norm = numbers[of_queries ? kQueryNorms : kKeyNorms][i];
                    const bool counts = meets && j < i;
                    // The factor of both the product and its gradient, without the norms.
                    const float decay = counts ? decay_between(numbers[kDecays][i], numbers[kDecays][j]) : 0.0f;
                    const float beta = of_queries ? factor : -numbers[kBetas][i];
                    const float slope = counts ? inner[n][2 * r + c] * decay : 0.0f;
                    const float by_beta = slope * pairs[n][2 * r + c] * norm * numbers[kKeyNorms][j];
                    row_sum[r] += by_beta * beta, columns[n][c] += by_beta * beta;
                    beta_sum[r] -= by_beta;
                    inner[n][2 * r + c] = of_queries && j == i ? inner[n][2 * r + c] * factor : slope * beta;  // X or N
                }
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
            const float norm = numbers[of_queries ? kQueryNorms : kKeyNorms][i], before = ptx::ex2(numbers[kDecays][i]);
#pragma unroll
            for (int n = 0; n < 8; ++n)
                write_pair<T, VTile>(to, i, n, lane, inner[n][2 * r] * norm, inner[n][2 * r + 1] * norm);
            const float dot = quad_sum(dots[r]) * norm * before, s = quad_sum(later[r]) * norm *
                decay_between(numbers[kDecays][kDelta - 1], numbers[kDecays][i]);
            const float sum = quad_sum(row_sum[r]), of_beta = quad_sum(beta_sum[r]);
            if (lane % 4 == 0) {
                if (of_queries) {
                    row_sums[0][i] = sum + factor * dot;
                } else {
                    row_sums[1][i] = sum - numbers[kBetas][i] * dot;
                    row_sums[2][i] = s;
                    betas[1][i] = of_beta - dot;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& sum = columns[n][c];
#pragma unroll
                for (int offset = 4; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                if (lane < 4) column_sums[warp][8 * n + lane * 2 + c] = sum;
            }
        __syncthreads();
        // X K, or N K, from registers; then N^T K and X^T Q.
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 a[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int j = 16 * step + 8 * h + lane % 4 * 2;
                const float by[2] = {numbers[kKeyNorms][j], numbers[kKeyNorms][j + 1]};
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    a[2 * h + r] = packed_pair<T>(inner[2 * step + h][2 * r] * by[0], inner[2 * step + h][2 * r + 1] * by[1]);
            }
            by_columns<T, KTile>(total, a, key_tile, 16 * step, lane);
        }
        if (!of_queries) {
            if (meets) columns_by_columns<T, VTile, KTile>(total, n_tile, own_row, key_tile, warp - 4, 4, lane);
            columns_by_columns<T, VTile, KTile>(total, x_tile, own_row, query_tile, warp - 4, 4, lane);
        } else if (warp == 0) {
            // Sums of dc from each row to the end; lane l has rows 63 - l and 31 - l.
            auto s_of = [&](int row) { return row + 1 < chunk.rows ? row_sums[2][row] : 0.0f; };
            float before = 0.0f, all_s = s_of(lane) + s_of(lane + 32), of_states = 0.0f;
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) all_s += __shfl_xor_sync(0xffffffffu, all_s, offset);
#pragma unroll
            for (int w = 0; w < 8; ++w) of_states += state_sums[w];
            const float at_end = all_s + ptx::ex2(numbers[kDecays][kDelta - 1]) * of_states;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = kDelta - 1 - lane - 32 * half;
                float value = row_sums[0][row] + row_sums[1][row] - s_of(row);
#pragma unroll
                for (int w = 0; w < 8; ++w) value -= column_sums[w][row];
                if (row == kDelta - 1) value += at_end;
#pragma unroll
                for (int offset = 1; offset < kWarp; offset *= 2) {
                    const float lower = __shfl_up_sync(0xffffffffu, value, offset);
                    if (lane >= offset) value += lower;
                }
                value += before;
                before = __shfl_sync(0xffffffffu, value, 31);
                if (row < chunk.rows) {
                    args.dg[(dense_row + row) * args.heads + head] = value;
                    args.dbeta[(dense_row + row) * args.heads + head] = betas[0][row] + betas[1][row];
                }
            }
        }
        __syncthreads();
    }

    T* const result = (of_queries ? args.dq : args.dk) + (dense_row * args.key_heads + key_head) * args.d_k;
    const i64 stride = args.key_heads * args.d_k;
    if (args.flags & kNormalised) {
        float dot[2], norm[2];
        row_dots<T, KTile>(total, of_queries ? query_tile : key_tile, own_row, lane, dot);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
            norm[r] = numbers[of_queries ? kQueryNorms : kKeyNorms][i];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                float pair[2];
                read_pair<T, KTile>(of_queries ? query_tile : key_tile, i, n, lane, pair);
                total[n][2 * r] -= pair[0] * norm[r] * norm[r] * dot[r];
                total[n][2 * r + 1] -= pair[1] * norm[r] * norm[r] * dot[r];
            }
        }
        store_rows<T>(result, stride, total, norm, own_row, chunk.rows, static_cast<int>(args.d_k), lane);
    } else {
        store_rows<T>(result, stride, total, 1.0f, own_row, chunk.rows, static_cast<int>(args.d_k), lane);
    }
}

}  // namespace rtk
