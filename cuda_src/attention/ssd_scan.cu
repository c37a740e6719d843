// Mamba-2's SSD from chunk to chunk, forward: the gated delta rule without a correction by the state
// (attention/gated_delta_rule.cuh), so U = beta V, and only the state goes from chunk to chunk.
//
// A block owns one sequence, one head and VT columns of v. It loops over chunks with the state in fp32 registers, 16 of its
// rows per warp, and as T in shared memory for products. Of a chunk's result a warp has 16 rows and half of the columns. Tiles
// of chunks have two or three `stages`.
//
// `states`, if not null, gets the state before each chunk as T, [chunks][heads][d_k][d_v], and `updates` U as T,
// [chunks][heads][64][d_v]; `out`, `final`, `initial` may be null. `skip`, if not null, has a factor of v for each head that
// is added to out. Grid: tiles of VT columns, heads, sequences.
#include "attention/gated_delta_rule.cuh"

namespace rtk {

template <typename T, int DK, int VT>
__global__ void __launch_bounds__(256, 1)
    ssd_scan(const T* q, const T* k, const T* v, const T* inner, const float* rows, const float* skip, const float* initial,
             float* final, const i32* cu, T* out, T* states, T* updates, i64 length, i64 heads, i64 key_heads, i64 d_k, i64 d_v,
             i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head,
             i64 stages) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<VT>;
    using CTile = MmaTile<kDelta>;
    constexpr int kTiles = VT / 8, kOwn = kTiles / 2;  // columns of the state and of results that a warp has
    constexpr u32 kKBytes = kDelta * KTile::kPitch, kVBytes = kDelta * VTile::kPitch, kCBytes = kDelta * CTile::kPitch;
    constexpr u32 kRowBytes = kRowKinds * kDelta * 4, kStageBytes = 2 * kKBytes + kVBytes + kCBytes + kRowBytes;
    extern __shared__ __align__(128) u8 shared[];
    const int count = static_cast<int>(stages);
    u8* const state_tile = shared + count * kStageBytes;
    u8* const update_tile = state_tile + DK * VTile::kPitch;  // U
    u8* const decayed_tile = update_tile + kVBytes;           // U with the decay to the end of the chunk

    const int column0 = static_cast<int>(blockIdx.x) * VT, head = static_cast<int>(blockIdx.y);
    const DeltaRows own = delta_rows(static_cast<int>(blockIdx.z), length, cu);
    const int chunks = (own.rows + kDelta - 1) / kDelta, key_head = head / static_cast<int>(heads / key_heads);
    const int k_vectors = static_cast<int>(d_k) / 8, v_columns = min(static_cast<int>(d_v) - column0, VT);
    const i64 batch = own.batch;
    q += batch * q_batch + own.first * q_row + key_head * q_head;
    k += batch * k_batch + own.first * k_row + key_head * k_head;
    v += batch * v_batch + own.first * v_row + head * v_head + column0;
    const bool writes = out != nullptr;
    if (writes) out += ((cu != nullptr ? own.first : batch * length) * heads + head) * d_v + column0;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    auto stage = [&](int chunk) { return shared + chunk % count * kStageBytes; };
    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            u8* const to = stage(chunk);
            const i64 i0 = static_cast<i64>(chunk) * kDelta, at = (own.chunk + chunk) * heads + head;
            const int here = own.rows - chunk * kDelta;
            KTile::template fetch<kDelta, 256>(to, k + i0 * k_row, k_row, here, k_vectors);
            VTile::template fetch<kDelta, 256>(to + 2 * kKBytes, v + i0 * v_row, v_row, here, v_columns / 8);
            u8* const matrix = to + 2 * kKBytes + kVBytes;
            if (writes) {
                KTile::template fetch<kDelta, 256>(to + kKBytes, q + i0 * q_row, q_row, here, k_vectors);
                CTile::template fetch<kDelta, 256>(matrix, inner + at * (kDelta * kDelta), kDelta, kDelta, 8);
            }
            if (thread < static_cast<int>(kRowBytes / 16))
                ptx::cp_async_16(ptx::shared_address(matrix + kCBytes + thread * 16), rows + at * (kRowKinds * kDelta) + thread * 4);
        }
        ptx::cp_async_commit();
    };
    fetch(0);
    if (count > 2) fetch(1);

    ScannedState<T, VTile, DK> state(d_k, d_v, column0, v_columns, warp, lane);
    state.load(initial, batch * heads + head);
    state.show(state_tile);

    const int own_row = 16 * (warp % 4), first = warp / 4 * kOwn;
    const float by_value = skip != nullptr ? skip[head] : 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        count > 2 ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
        __syncthreads();  // the tiles and the state are there, and those of the chunk before are free
        fetch(chunk + count - 1);
        const u8* const key_tile = stage(chunk);
        const u8* const query_tile = key_tile + kKBytes;
        const u8* const value_tile = query_tile + kKBytes;
        const u8* const inner_tile = value_tile + kVBytes;
        const float* const numbers = reinterpret_cast<const float*>(inner_tile + kCBytes);
        const float* const decays = numbers + kDecays * kDelta;
        const float end = decays[kDelta - 1];
        float sums[kOwn][4];
        clear_sums(sums);
        if (writes) {
#pragma unroll 4
            for (int step = 0; step < DK / 16; ++step) {
                u32 a[4];
                KTile::left(a, query_tile, own_row, step, lane);
                by_some_columns<T, VTile>(sums, a, state_tile, 16 * step, first, lane);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own_row + lane / 4 + 8 * r;
            const float beta = numbers[kBetas * kDelta + i], before = ptx::ex2(decays[i]), after = decay_between(end, decays[i]);
#pragma unroll
            for (int n = 0; n < kOwn; ++n) {
                float value[2];
                read_pair<T, VTile>(value_tile, i, first + n, lane, value);
                const float lo = beta * value[0], hi = beta * value[1];
                write_pair<T, VTile>(update_tile, i, first + n, lane, lo, hi);
                write_pair<T, VTile>(decayed_tile, i, first + n, lane, lo * after, hi * after);
                sums[n][2 * r] = before * sums[n][2 * r] + by_value * value[0];
                sums[n][2 * r + 1] = before * sums[n][2 * r + 1] + by_value * value[1];
            }
        }
        if (states != nullptr) {
            T* const to = states + ((own.chunk + chunk) * heads + head) * d_k * d_v + column0;
            for (int i = thread; i < DK * VTile::kVectors; i += 256) {
                const int row = i / VTile::kVectors, vector = i % VTile::kVectors;
                if (row < d_k && vector < v_columns / 8)
                    ptx::st<16>(to + row * d_v + vector * 8,
                                *reinterpret_cast<const Raw<16>*>(state_tile + VTile::offset(row, vector)));
            }
        }
        __syncthreads();  // U is there, and the state was read
        if (updates != nullptr) {
            T* const to = updates + ((own.chunk + chunk) * heads + head) * kDelta * d_v + column0;
            for (int i = thread; i < kDelta * VTile::kVectors; i += 256) {
                const int row = i / VTile::kVectors, vector = i % VTile::kVectors;
                if (vector < v_columns / 8)
                    ptx::st<16>(to + row * d_v + vector * 8,
                                *reinterpret_cast<const Raw<16>*>(update_tile + VTile::offset(row, vector)));
            }
        }
        if (state.keeps) {
            const float by = ptx::ex2(end), both[2] = {by, by};
            scale_rows(state.sums, both);
            columns_by_columns<T, KTile, VTile>(state.sums, key_tile, 16 * warp, decayed_tile, 0, kDelta / 16, lane);
            state.show(state_tile);
        }
        if (writes) {
#pragma unroll
            for (int step = 0; step < kDelta / 16; ++step) {
                if (step > warp % 4) continue;
                u32 a[4];
                CTile::left(a, inner_tile, own_row, step, lane);
                by_some_columns<T, VTile>(sums, a, update_tile, 16 * step, first, lane);
            }
            store_rows<T>(out + static_cast<i64>(chunk) * kDelta * heads * d_v + 8 * first, heads * d_v, sums, 1.0f, own_row,
                          min(own.rows - chunk * kDelta, kDelta), v_columns - 8 * first, lane);
        }
    }
    if (final != nullptr) state.store_to(final, batch * heads + head);
}

}  // namespace rtk
