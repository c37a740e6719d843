// The gated delta rule from chunk to chunk (attention/gated_delta_rule.cuh), forward.
//
// A block owns one sequence, one value head and VT columns of v; columns of the state do not meet. It loops over chunks
// with the state in fp32 registers, 16 of its rows per warp, and as T in shared memory for products. Warps 0 to 3
// compute K S, R and U, 16 rows each. Meanwhile warps 4 to 7 add P U of the chunk before and write its result, load tiles
// of the chunk after the next, and compute Q S. Then all of them update the state. Tiles of chunks have one to three
// `stages`; with one of them, warps 4 to 7 work on the chunk before, and load, while the others wait. With a decay per head,
// right operands of T and of K^T are in two parts: where keys are alike and beta is near 2, sums of these products are
// small beside their terms. The remainder of each is where the other one is not yet, or not any more.
//
// `states`, if not null, gets the state before each chunk as T, [chunks][heads][d_k][d_v], and `updates` U as T,
// [chunks][heads][64][d_v]; `out`, `final`, `initial` may be null. Without `out` and `updates` it is the first pass over
// segments. With CHANNELS, q, k and `after` are E Q, E K and F K of
// kda_chunk.cu, and strides are not used. Grid: tiles of VT columns, heads, segments.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

template <typename T, int DK, int VT, bool CHANNELS>
__global__ void __launch_bounds__(256, 1)
    gated_delta_rule_scan(const T* q, const T* k, const T* after, const T* v, const T* solve, const T* inner, const float* rows,
                          const float* initial, float* final, float* ends, const i32* cu, T* out, T* states, T* updates,
                          i64 segment, i64 length, i64 heads, i64 key_heads, i64 d_k, i64 d_v, i64 q_batch, i64 q_row, i64 q_head, i64 k_batch,
                          i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 stages, double scale) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<VT>;
    using CTile = MmaTile<kDelta>;
    constexpr int kTiles = VT / 8;
    constexpr u32 kKBytes = kDelta * KTile::kPitch, kVBytes = kDelta * VTile::kPitch, kCBytes = kDelta * CTile::kPitch;
    constexpr u32 kRowBytes = kRowKinds * kDelta * 4;
    constexpr u32 kAfter = 2 * kKBytes + kVBytes + 2 * kCBytes + kRowBytes;
    constexpr u32 kStageBytes = kAfter + (CHANNELS ? kKBytes : 0);
    extern __shared__ __align__(128) u8 shared[];
    const int count = static_cast<int>(stages);
    u8* const state_tile = shared + count * kStageBytes;
    u8* const rest_tile = state_tile + DK * VTile::kPitch;  // R, later the remainder of the next one
    u8* const decayed_tile = rest_tile + kVBytes;           // the remainder of R, later U with the decay to the end of the chunk
    u8* const update_tiles = decayed_tile + kVBytes;        // U of this chunk and the one before

    const int column0 = static_cast<int>(blockIdx.x) * VT, head = static_cast<int>(blockIdx.y);
    const DeltaSegment own = delta_segment(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), segment, length, cu);
    const bool writes = out != nullptr, passes_on = segment != 0 && !writes && updates == nullptr;
    const bool of_transition = passes_on && column0 >= d_v;
    if (passes_on ? own.ends || !own.exists() || (own.begins && of_transition) : !own.exists()) return;
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int k_vectors = static_cast<int>(d_k) / 8, v_columns = min(static_cast<int>(d_v) - column0, VT);
    const i64 batch = own.batch;
    if constexpr (!CHANNELS) {
        q += batch * q_batch + own.first * q_row + key_head * q_head;
        k += batch * k_batch + own.first * k_row + key_head * k_head;
    }
    v += batch * v_batch + own.first * v_row + head * v_head + column0;
    if (writes) out += (((cu != nullptr ? 0 : batch * length) + own.first) * heads + head) * d_v + column0;
    const int helper = static_cast<int>(threadIdx.x) - 128;  // threads that load and store
    auto stage = [&](int chunk) { return shared + chunk % count * kStageBytes; };
    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            u8* const to = stage(chunk);
            const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
            const int here = own.rows - chunk * kDelta;
            if constexpr (CHANNELS) {
                fetch_by<KTile, kDelta>(helper, to, k + at * kDelta * d_k, d_k, kDelta, k_vectors);
                fetch_by<KTile, kDelta>(helper, to + kAfter, after + at * kDelta * d_k, d_k, kDelta, k_vectors);
                if (writes) fetch_by<KTile, kDelta>(helper, to + kKBytes, q + at * kDelta * d_k, d_k, kDelta, k_vectors);
            } else {
                fetch_by<KTile, kDelta>(helper, to, k + i0 * k_row, k_row, here, k_vectors);
            }
            fetch_by<VTile, kDelta>(helper, to + 2 * kKBytes, v + i0 * v_row, v_row, here, v_columns / 8);
            u8* const matrices = to + 2 * kKBytes + kVBytes;
            if constexpr (CHANNELS) fetch_by<CTile, kDelta>(helper, matrices, solve + at * (kDelta * kDelta), kDelta, kDelta, 8);
            else fetch_lower<CTile, true>(helper, matrices, solve + at * (2 * kDelta * kDelta));
            if (writes) {
                const T* const pairs = inner + at * (kDelta * kDelta);
                if constexpr (!CHANNELS)
                    fetch_by<KTile, kDelta>(helper, to + kKBytes, q + i0 * q_row, q_row, here, k_vectors);
                if constexpr (CHANNELS) fetch_by<CTile, kDelta>(helper, matrices + kCBytes, pairs, kDelta, kDelta, 8);
                else fetch_lower<CTile, false>(helper, matrices + kCBytes, pairs);
            }
            if (helper < static_cast<int>(kRowBytes / 16))
                ptx::cp_async_16(ptx::shared_address(matrices + 2 * kCBytes + helper * 16),
                                 rows + at * (kRowKinds * kDelta) + helper * 4);
        }
        ptx::cp_async_commit();
    };
    if (helper >= 0 && count > 1) fetch(0);
    if (helper >= 0 && count > 2) fetch(1);

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 state_head = batch * heads + head, segment_head = static_cast<i64>(blockIdx.z) * heads + head;
    const int skipped = of_transition ? (static_cast<int>(d_v) + VT - 1) / VT * VT : 0;
    const int width = static_cast<int>(of_transition ? d_k : d_v);
    ScannedState<T, VTile, DK> state(d_k, width, column0 - skipped, min(width - column0 + skipped, VT), warp, lane);
    if (of_transition) state.load_identity();
    else state.load(own.begins ? initial : passes_on ? nullptr : ends, own.begins ? state_head : segment_head - heads);
    state.show(state_tile);

    const int own_row = 16 * (warp % 4);
    float sums[kTiles][4];
    auto finish = [&](int chunk) {  // out, and U for gradients, of a chunk whose Q S is in `sums`
        const u8* const update_tile = update_tiles + (chunk & 1) * kVBytes;
        const int here = min(own.rows - chunk * kDelta, kDelta);
        if (updates != nullptr)
            store_by<VTile, kDelta>(helper, updates + ((own.chunk + chunk) * heads + head) * kDelta * d_v + column0, d_v,
                                    update_tile, kDelta, v_columns / 8);
        if (!writes) return;
        const u8* const inner_tile = stage(chunk) + 2 * kKBytes + kVBytes + kCBytes;
#pragma unroll
        for (int step = 0; step < kDelta / 16; ++step) {
            if (step > warp - 4) continue;
            u32 a[4];
            CTile::left(a, inner_tile, own_row, step, lane);
            by_columns<T, VTile>(sums, a, update_tile, 16 * step, lane);
        }
        store_rows<T>(out + static_cast<i64>(chunk) * kDelta * heads * d_v, heads * d_v, sums, 1.0f, own_row, here, v_columns,
                      lane);
    };
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (count == 1) {
            __syncthreads();
            if (helper >= 0) {
                if (chunk > 0) finish(chunk - 1);
                ptx::named_barrier_sync(2, 128);
                fetch(chunk);
            }
        }
        if (helper >= 0) count > 2 ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
        __syncthreads();
        const u8* const key_tile = stage(chunk);
        const u8* const query_tile = key_tile + kKBytes;
        const u8* const value_tile = query_tile + kKBytes;
        const u8* const solve_tile = value_tile + kVBytes;
        const float* const numbers = reinterpret_cast<const float*>(solve_tile + 2 * kCBytes);
        const float* const decays = numbers + kDecays * kDelta;
        const float end = decays[kDelta - 1];
        if (warp < 4) {
            u8* const update_tile = update_tiles + (chunk & 1) * kVBytes;
            clear_sums(sums);
            rows_by_columns<T, KTile, VTile, DK / 16>(sums, key_tile, own_row, state_tile, lane);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float before = CHANNELS ? 1.0f : numbers[kKeyNorms * kDelta + i] * ptx::ex2(decays[i]), beta = numbers[kBetas * kDelta + i];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    float value[2];
                    read_pair<T, VTile>(value_tile, i, n, lane, value);
                    const float lo = beta * (value[0] - before * sums[n][2 * r]), hi = beta * (value[1] - before * sums[n][2 * r + 1]);
                    if constexpr (CHANNELS) write_pair<T, VTile>(rest_tile, i, n, lane, lo, hi);
                    else write_parts<T, VTile>(rest_tile, decayed_tile, i, n, lane, lo, hi);
                }
            }
            ptx::named_barrier_sync(1, 128);
            clear_sums(sums);
#pragma unroll
            for (int step = 0; step < kDelta / 16; ++step) {
                if (step > warp) continue;
                u32 a[4];
                CTile::left(a, solve_tile, own_row, step, lane);
                by_columns<T, VTile>(sums, a, rest_tile, 16 * step, lane);
                if constexpr (!CHANNELS) {
                    by_columns<T, VTile>(sums, a, decayed_tile, 16 * step, lane);
                    const RemainderBlock at(warp, step);
                    CTile::left(a, solve_tile, at.row, at.column, lane);
                    by_columns<T, VTile>(sums, a, rest_tile, 16 * step, lane);
                }
            }
            if constexpr (!CHANNELS) ptx::named_barrier_sync(1, 128);  // all of them have read both parts of R
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                const float later = CHANNELS ? 1.0f : numbers[kKeyNorms * kDelta + i] * decay_between(end, decays[i]);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const float lo = sums[n][2 * r], hi = sums[n][2 * r + 1];
                    write_pair<T, VTile>(update_tile, i, n, lane, lo, hi);
                    if constexpr (!CHANNELS) write_parts<T, VTile>(decayed_tile, rest_tile, i, n, lane, lo * later, hi * later);
                }
            }
        } else {
            if (chunk > 0 && count > 1) finish(chunk - 1);
            if (states != nullptr)
                store_by<VTile, DK>(helper, states + ((own.chunk + chunk) * heads + head) * d_k * d_v + column0, d_v, state_tile,
                                    static_cast<int>(d_k), v_columns / 8);
            if (count > 1) {
                ptx::named_barrier_sync(2, 128);  // all of them are done with the tiles of the chunk before
                fetch(chunk + count - 1);
            }
            if (writes) {
                clear_sums(sums);
                rows_by_columns<T, KTile, VTile, DK / 16>(sums, query_tile, own_row, state_tile, lane);
                float before[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own_row + lane / 4 + 8 * r;
                    before[r] = static_cast<float>(scale);
                    if constexpr (!CHANNELS) before[r] = before[r] * numbers[kQueryNorms * kDelta + i] * ptx::ex2(decays[i]);
                }
                scale_rows(sums, before);
            }
        }
        __syncthreads();
        if (state.keeps) {
            if constexpr (CHANNELS) {
                state.decay(numbers);
                columns_by_columns<T, KTile, VTile>(state.sums, key_tile + kAfter, 16 * warp, update_tiles + (chunk & 1) * kVBytes,
                                                    0, kDelta / 16, lane);
            } else {
                const float by = ptx::ex2(end), both[2] = {by, by};
                scale_rows(state.sums, both);
                columns_by_parts<T, KTile, VTile>(state.sums, key_tile, 16 * warp, decayed_tile, rest_tile, lane);
            }
            state.show(state_tile);
        }
    }
    if (helper >= 0 && chunks > 0) finish(chunks - 1);
    if (of_transition) state.store_to(ends + gridDim.z * heads * d_k * d_v, segment_head);
    else if (passes_on || (own.ends && final != nullptr))
        state.store_to(passes_on ? ends : final, passes_on ? segment_head : state_head);
}

}  // namespace rtk
