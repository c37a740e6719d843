// Gradients of the gated delta rule inside chunks with wgmma (sm_90a): gated_delta_rule_grads.cu has the formulas and the same
// arguments and results; always with a correction by the state.
//
// A block owns a chunk and a key head, and adds up its value heads in order, 64 columns of v at a time. One consumer warpgroup
// has dQ, the other dK, 64 rows each in registers; a third warpgroup copies dO, U, dR, S and dS of later columns to shared
// memory. Products by a state are multiplied by factors of rows and added to dQ or dK, so one set of accumulators serves them
// all. X and N meet the other warpgroup in shared memory. Grid: chunks, key heads.
#include "attention/gated_delta_rule_sm90.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

// Tiles of a stage, and those that a block keeps, in bytes from their begin.
template <int DK>
struct DeltaGradTiles {
    static constexpr u32 kBox = kDelta * kTileRow, kState = DK * kTileRow, kKeys = Boxed<kDelta, DK>::kBytes;
    static constexpr u32 kUpdates = kBox, kRest = 2 * kBox, kStates = 3 * kBox, kDstates = kStates + kState;
    static constexpr u32 kNumbers = kDstates + kState, kStage = kNumbers + kRowKinds * kDelta * 4;
    static constexpr u32 kQueries = kKeys, kX = 2 * kKeys, kN = kX + kBox, kStages = kN + kBox;  // keys first
};

// Of a value head, between the warpgroups.
struct DeltaGradSums {
    float numbers[2][kRowKinds][kDelta];  // of this head and the one before
    float columns[8][kDelta], rows[3][kDelta], betas[2][kDelta], states[4];
};

// d += columns of a box of 64 x 64 as rows, by the columns of a tile, summed over their 64 rows.
template <typename T, int N>
RTK_DEVICE void columns_by_columns(float (&d)[N], ptx::SharedAddress left, ptx::SharedAddress right) {
    const u64 a = ptx::matrix_descriptor(left, kDelta * kTileRow), b = ptx::matrix_descriptor(right, kDelta * kTileRow);
#pragma unroll
    for (int k = 0; k < kDelta / 16; ++k) ptx::wgmma_ss<T, true, true>(d, a + k * kNextColumnMajor, b + k * kNextColumnMajor, 1);
}

// A lane's pairs of rows `row` and `row` + 8 of boxes: columns 8n + 2 (lane % 4).
struct LanePairs {
    u32 row, swizzle, inside;

    RTK_DEVICE LanePairs(int row, int lane) : row(row * kTileRow), swizzle(row & 7), inside(lane % 4 * 4) {}
    RTK_DEVICE u32 at(int n, int r) const {
        return n / 8 * (kDelta * kTileRow) + row + r * (8 * kTileRow) + ((n % 8 ^ swizzle) << 4) + inside;
    }
    template <typename T>
    RTK_DEVICE float2 read(const u8* tile, int n, int r) const {
        float f[2];
        unpack<T, 2>(Raw<4>{{*reinterpret_cast<const u32*>(tile + at(n, r))}}, f);
        return make_float2(f[0], f[1]);
    }
    // Rows of accumulators by the same rows of a tile: this lane's part of the dot products.
    template <typename T, int N>
    RTK_DEVICE void add_dots(float (&dots)[2], const float (&sums)[N], const u8* tile) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < N / 4; ++n) {
                const float2 pair = read<T>(tile, n, r);
                dots[r] += sums[4 * n + 2 * r] * pair.x + sums[4 * n + 2 * r + 1] * pair.y;
            }
    }
};

// Sums of dc of a head from each row to the end, and dbeta, by a warp; lane l has rows 63 - l and 31 - l.
template <typename T>
RTK_DEVICE void write_gate_gradients(const DeltaGradArguments<T>& args, const DeltaGradSums& of, float last_decay, i64 first, int head,
                                     int rows, int lane) {
    float before = 0.0f, all_s = of.rows[2][lane] + of.rows[2][lane + 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) all_s += __shfl_xor_sync(0xffffffffu, all_s, offset);
    const float of_states = of.states[0] + of.states[1] + of.states[2] + of.states[3];
    const float at_end = all_s + ptx::ex2(last_decay) * of_states;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = kDelta - 1 - lane - 32 * half;
        float value = of.rows[0][row] + of.rows[1][row] - of.rows[2][row];
#pragma unroll
        for (int w = 0; w < 8; ++w) value -= of.columns[w][row];
        if (row == kDelta - 1) value += at_end;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const float lower = __shfl_up_sync(0xffffffffu, value, offset);
            if (lane >= offset) value += lower;
        }
        value += before;
        before = __shfl_sync(0xffffffffu, value, 31);
        if (row < rows) {
            args.dg[(first + row) * args.heads + head] = value;
            args.dbeta[(first + row) * args.heads + head] = of.betas[0][row] + of.betas[1][row];
        }
    }
}

// What one consumer warpgroup does.
template <typename T, int DK, bool OF_QUERIES>
RTK_DEVICE void delta_gradients(const DeltaGradArguments<T>& args, const DeltaChunk& chunk, DeltaGradSums& of, TileRing ring,
                                ptx::SharedAddress tiles, u8* tile_bytes) {
    using Tiles = DeltaGradTiles<DK>;
    constexpr u32 kOwn = OF_QUERIES ? Tiles::kQueries : 0;
    const int key_head = static_cast<int>(blockIdx.y);
    const int each = static_cast<int>(args.heads / args.key_heads), d_v = static_cast<int>(args.d_v);
    const i64 first = chunk.batch * args.length + chunk.first;
    const float factor = static_cast<float>(args.scale);
    float total[DK / 2];  // dQ or dK, without the norms
#pragma unroll
    for (float& sum : total) sum = 0.0f;

#pragma unroll 1
    for (int e = 0; e < each; ++e) {
        const int head = key_head * each + e;
        float inner[kDelta / 2];        // dO U^T or dR U^T
        float dots[2] = {0.0f, 0.0f};   // Q . A1, or K . A2
        float later[2] = {0.0f, 0.0f};  // K . A3
        float of_values = 0.0f, both_states = 0.0f;
#pragma unroll
        for (float& sum : inner) sum = 0.0f;
#pragma unroll 1
        for (int column0 = 0; column0 < d_v; column0 += 64) {
            // Recomputed, so that addresses do not stay in registers.
            const int thread = static_cast<int>(this_thread()) % 128, lane = thread % kWarp, warp = thread / kWarp;
            const int own_row = 16 * warp + lane / 4;
            const LanePairs pairs_of(own_row, lane);
            ring.wait();
            const u32 at = Tiles::kStages + ring.stage * Tiles::kStage;
            const ptx::SharedAddress stage = tiles + at, left = OF_QUERIES ? stage : stage + Tiles::kRest;
            const u8* const bytes = tile_bytes + at;
            const float* const numbers = reinterpret_cast<const float*>(bytes + Tiles::kNumbers);
            float sums[DK / 2];
            ptx::wgmma_fence();
            multiply_rows<T, kDelta, kDelta, 64>(inner, left, stage + Tiles::kUpdates, true);
            multiply_rows<T, kDelta, DK, 64>(sums, left, stage + Tiles::kStates);
            ptx::wgmma_commit();
            if constexpr (OF_QUERIES) {
                if (column0 == 0) {
#pragma unroll
                    for (int i = thread; i < kRowKinds * kDelta; i += 128) (&of.numbers[e & 1][0][0])[i] = numbers[i];
                }
                // dR . V, two threads a row; <S, dS>, wherever an element is.
                const int row = thread / 2;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int vector = thread % 2 * 4 + i;
                    if (row >= chunk.rows || column0 + 8 * vector >= d_v) continue;
                    float a[8], b[8];
                    unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(bytes + Tiles::kRest + row * kTileRow + ((vector ^ (row & 7)) << 4)), a);
                    load_keep<T, 8>(args.v + chunk.batch * args.v_batch + (chunk.first + row) * args.v_row + head * args.v_head +
                                        column0 + 8 * vector,
                                    b);
#pragma unroll
                    for (int c = 0; c < 8; ++c) of_values += a[c] * b[c];
                }
#pragma unroll 2
                for (u32 i = thread * 16; i < Tiles::kState; i += 128 * 16) {
                    float a[8], b[8];
                    unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(bytes + Tiles::kStates + i), a);
                    unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(bytes + Tiles::kDstates + i), b);
#pragma unroll
                    for (int c = 0; c < 8; ++c) both_states += a[c] * b[c];
                }
            }
            const float* const decays = numbers + kDecays * kDelta;
            float factors[2], after[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + 8 * r;
                factors[r] = ptx::ex2(decays[i]) * (OF_QUERIES ? factor : -numbers[kBetas * kDelta + i]);
                after[r] = decay_between(decays[kDelta - 1], decays[i]);
            }
            ptx::wgmma_wait<0>();
            pairs_of.template add_dots<T>(dots, sums, tile_bytes + kOwn);
#pragma unroll
            for (int i = 0; i < DK / 2; ++i) total[i] += factors[i / 2 % 2] * sums[i];
            if constexpr (!OF_QUERIES) {
                ptx::wgmma_fence();
                multiply_rows<T, kDelta, DK, 64>(sums, stage + Tiles::kUpdates, stage + Tiles::kDstates);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                pairs_of.template add_dots<T>(later, sums, tile_bytes + kOwn);
#pragma unroll
                for (int i = 0; i < DK / 2; ++i) total[i] += after[i / 2 % 2] * sums[i];
            }
            ring.release(ring.stage);
            ring.advance();
        }
        const int thread = static_cast<int>(this_thread()) % 128, lane = thread % kWarp, warp = thread / kWarp, t = lane % 4;
        const int own_row = 16 * warp + lane / 4;
        const LanePairs pairs_of(own_row, lane);
        // The matrices inside the chunk: q_i . k_j, or k_i . k_j.
        float products[kDelta / 2];
        ptx::wgmma_fence();
        multiply_rows<T, kDelta, kDelta, DK>(products, tiles + kOwn, tiles);
        ptx::wgmma_commit();
        ptx::named_barrier_sync(1, 256);  // numbers are here; sums, X and N of the head before were read
        ptx::wgmma_wait<0>();
        const auto& numbers = of.numbers[e & 1];
        const auto& norms = numbers[OF_QUERIES ? kQueryNorms : kKeyNorms];
        if constexpr (OF_QUERIES) {
            of_values += __shfl_xor_sync(0xffffffffu, of_values, 1);
            if (thread % 2 == 0) of.betas[0][thread / 2] = of_values;
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) both_states += __shfl_xor_sync(0xffffffffu, both_states, offset);
            if (lane == 0) of.states[warp] = both_states;
        }
        float row_sum[2] = {0.0f, 0.0f}, beta_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int j = 8 * n + 2 * t + c;
                float column = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + 8 * r;
                    float& value = inner[4 * n + 2 * r + c];
                    const bool counts = OF_QUERIES ? j <= i : j < i;
                    // The factor of both the product and its gradient, without the norms. The diagonal of W is 0.
                    const float decay = counts ? decay_between(numbers[kDecays][i], numbers[kDecays][j]) : 0.0f;
                    const float beta = OF_QUERIES ? factor : -numbers[kBetas][i], slope = counts ? value * decay : 0.0f;
                    const float pair = i == j ? 0.0f : products[4 * n + 2 * r + c];
                    const float by_beta = slope * pair * norms[i] * numbers[kKeyNorms][j];
                    row_sum[r] += by_beta * beta, column += by_beta * beta;
                    beta_sum[r] -= by_beta;
                    value = slope * beta;  // X or N
                }
#pragma unroll
                for (int offset = 4; offset < kWarp; offset *= 2) column += __shfl_xor_sync(0xffffffffu, column, offset);
                if (lane < 4) of.columns[(OF_QUERIES ? 0 : 4) + warp][j] = column;
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + 8 * r;
            const float norm = norms[i];
#pragma unroll
            for (int n = 0; n < 8; ++n)
                *reinterpret_cast<u32*>(tile_bytes + (OF_QUERIES ? Tiles::kX : Tiles::kN) + pairs_of.at(n, r)) =
                    packed_pair<T>(inner[4 * n + 2 * r] * norm, inner[4 * n + 2 * r + 1] * norm);
            const float dot = quad_sum(dots[r]) * norm * ptx::ex2(numbers[kDecays][i]), sum = quad_sum(row_sum[r]);
            const float s = quad_sum(later[r]) * norm * decay_between(numbers[kDecays][kDelta - 1], numbers[kDecays][i]);
            const float of_beta = quad_sum(beta_sum[r]);
            if (t == 0) {
                if constexpr (OF_QUERIES) {
                    of.rows[0][i] = sum + factor * dot;
                } else {
                    of.rows[1][i] = sum - numbers[kBetas][i] * dot;
                    of.rows[2][i] = i + 1 < chunk.rows ? s : 0.0f;
                    of.betas[1][i] = of_beta - dot;
                }
            }
        }
        u32 words[kDelta / 16][4];
        pack_tokens<T>(words, inner, numbers[kKeyNorms], t);
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1, 256);
        // X K, or N K, from registers; then N^T K and X^T Q.
#pragma unroll
        for (auto& four : words) ptx::wgmma_pin(four);
        ptx::wgmma_fence();
        multiply_packed<T, kDelta>(total, words, tiles, true);
        if constexpr (!OF_QUERIES) {
            columns_by_columns<T>(total, tiles + Tiles::kN, tiles);
            columns_by_columns<T>(total, tiles + Tiles::kX, tiles + Tiles::kQueries);
        }
        ptx::wgmma_commit();
        if (OF_QUERIES && warp == 0)
            write_gate_gradients(args, of, numbers[kDecays][kDelta - 1], first, head, chunk.rows, lane);
        ptx::wgmma_wait<0>();
    }

    const int thread = static_cast<int>(this_thread()) % 128, lane = thread % kWarp, warp = thread / kWarp;
    const int own_row = 16 * warp + lane / 4;
    const LanePairs pairs_of(own_row, lane);
    const auto& norms = of.numbers[(each - 1) & 1][OF_QUERIES ? kQueryNorms : kKeyNorms];
    float times[2] = {1.0f, 1.0f};
    if (args.flags & kNormalised) {
        float dots[2] = {0.0f, 0.0f};
        pairs_of.template add_dots<T>(dots, total, tile_bytes + kOwn);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            times[r] = norms[own_row + 8 * r];
            const float by = quad_sum(dots[r]) * times[r] * times[r];
#pragma unroll
            for (int n = 0; n < DK / 8; ++n) {
                const float2 pair = pairs_of.template read<T>(tile_bytes + kOwn, n, r);
                total[4 * n + 2 * r] -= pair.x * by, total[4 * n + 2 * r + 1] -= pair.y * by;
            }
        }
    }
    T* const to = (OF_QUERIES ? args.dq : args.dk) + (first * args.key_heads + key_head) * args.d_k;
    store_rows<T>(to, args.key_heads * args.d_k, own_row, chunk.rows, static_cast<int>(args.d_k), total, times);
}

template <typename T, int DK>
__global__ void __launch_bounds__(384, 1) gated_delta_rule_grads_sm90(const __grid_constant__ DeltaGradArguments<T> args) {
    using Tiles = DeltaGradTiles<DK>;
    extern __shared__ u8 memory[];
    __shared__ __align__(16) DeltaGradSums of;
    const ptx::SharedAddress tiles = ptx::aligned_up<1024>(ptx::shared_address(memory));
    u8* const tile_bytes = memory + (tiles - ptx::shared_address(memory));
    const int count = static_cast<int>(args.stages);
    TileRing ring(tiles + Tiles::kStages + count * Tiles::kStage, count);

    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) / 4;
    const i64 number = blockIdx.x;
    const DeltaChunk chunk = delta_chunk(number, args.length, args.cu, static_cast<int>(args.sequences));
    if (chunk.rows <= 0) return;
    if (threadIdx.x == 0) ring.init(8);
    __syncthreads();

    if (group == 2) {
        ptx::registers_give<72>();
        const int thread = static_cast<int>(threadIdx.x) % 128, key_head = static_cast<int>(blockIdx.y);
        const int each = static_cast<int>(args.heads / args.key_heads), across = (static_cast<int>(args.d_v) + 63) / 64;
        const int d_k = static_cast<int>(args.d_k);
        produce_tiles(ring, each * across, [&](int item, int at_stage) {
            if (item == 0) {
                fetch_boxes<DK>(thread, tiles, args.k + chunk.batch * args.k_batch + chunk.first * args.k_row + key_head * args.k_head,
                                args.k_row, chunk.rows, d_k / 8);
                fetch_boxes<DK>(thread, tiles + Tiles::kQueries,
                                args.q + chunk.batch * args.q_batch + chunk.first * args.q_row + key_head * args.q_head, args.q_row,
                                chunk.rows, d_k / 8);
            }
            const int head = key_head * each + item / across, column0 = item % across * 64;
            const int vectors = (static_cast<int>(args.d_v) - column0) / 8;
            const i64 at = number * args.heads + head, rows = at * kDelta * args.d_v + column0;
            const ptx::SharedAddress to = tiles + Tiles::kStages + at_stage * Tiles::kStage;
            fetch_boxes<64>(thread, to,
                            args.dout + chunk.batch * args.dout_batch + chunk.first * args.dout_row + head * args.dout_head + column0,
                            args.dout_row, chunk.rows, vectors);
            fetch_boxes<64>(thread, to + Tiles::kUpdates, args.updates + rows, args.d_v, kDelta, vectors);
            fetch_boxes<64>(thread, to + Tiles::kRest, args.drest + rows, args.d_v, kDelta, vectors);
#pragma unroll
            for (int half = 0; half < DK / 64; ++half) {
                const i64 states = (at * d_k + 64 * half) * args.d_v + column0;
                fetch_boxes<64>(thread, to + Tiles::kStates + half * Tiles::kBox, args.states + states, args.d_v, d_k - 64 * half, vectors);
                fetch_boxes<64>(thread, to + Tiles::kDstates + half * Tiles::kBox, args.dstates + states, args.d_v, d_k - 64 * half,
                                vectors);
            }
            if (thread < kRowKinds * kDelta / 4)
                ptx::cp_async_16(to + Tiles::kNumbers + thread * 16, args.rows + at * (kRowKinds * kDelta) + thread * 4);
        });
        return;
    }
    ptx::registers_take<216>();
    if (group == 0) delta_gradients<T, DK, true>(args, chunk, of, ring, tiles, tile_bytes);
    else delta_gradients<T, DK, false>(args, chunk, of, ring, tiles, tile_bytes);
}

}  // namespace rtk
