// How the blocks of norm/norm_fp8_ring.cu and norm/norm_fp8_single_read.cu quantise the tiles of their ring: two groups
// of 256 threads, one tile each at a time. A tile's slot is free as soon as the group has it in registers, with ROWS
// before its 1/rms is known; transposed codes are staged in shared memory and stored by TMA while the next tile is
// processed.
#pragma once
#include "common/fp8_scale.cuh"
#include "common/pressure.cuh"
#include "norm/norm_fp8_ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

RTK_DEVICE void load_shared_8(const float* low, const float* high, float (&v)[8]) {
    const Raw<16> a = *reinterpret_cast<const Raw<16>*>(low), b = *reinterpret_cast<const Raw<16>*>(high);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(a.w[i]), v[i + 4] = __uint_as_float(b.w[i]);
}

// Destination of the row codes; the scale of row m, group j goes to scale[m * scale_row + j * scale_group].
struct RingRows {
    e4m3* q;
    float* scale;
    i64 scale_row, scale_group;
    int rows;
};

// Scales of the thread's rows from their maxima, then codes. Where the scales of neighbouring tiles are adjacent, the
// first group passes its own to the second one, which writes both: separately they would be 6 % of all requests to L2.
template <typename Shared>
RTK_DEVICE void quantize_rows(Shared& shared, const RingThread& thread, const float (&v)[8][8], float (&max_abs)[8],
                              const RingRows& out, int group, u32 round, int down, int across, int cols, bool pow2) {
    const float own = fp8_scale<e4m3>(thread.lane_team_max(max_abs), pow2), own_inverse = inverse_scale(own);
    const int own_row = thread.owned_row(), column = across * kSide + thread.column;
    const int row = down * kSide + thread.row;
    const bool exist = row < out.rows;  // all eight: rows are multiples of 16
    const bool owns = thread.lane % 2 == 0, stores = owns && exist && across * kSide < cols;
    float* place = out.scale + static_cast<i64>(row + own_row) * out.scale_row + across * out.scale_group;
    if (out.scale_group == 1 && out.scale_row % 2 == 0) {
        float& staged = shared.scales[round & 1][thread.row + own_row];
        const ptx::SharedAddress there = ptx::shared_address(&shared.scales_there[round & 1]);
        const ptx::SharedAddress gone = ptx::shared_address(&shared.scales_gone[round & 1]);
        if (group == 0) {
            if (round >= 2) ptx::mbarrier_wait(gone, (round >> 1 & 1) ^ 1);
            if (owns) staged = own;
        } else {
            ptx::mbarrier_wait(there, round >> 1 & 1);
            const Raw<8> both = {__float_as_uint(staged), __float_as_uint(own)};
            if (stores) ptx::st_last<8>(place - 1, both);
        }
        __syncwarp();
        if (thread.lane == 0) ptx::mbarrier_arrive(group == 0 ? there : gone);
    } else if (stores) {
        *place = own;
    }
    e4m3* to = settled(out.q + static_cast<i64>(row) * cols + column);
    const bool writes = exist && column < cols;
#pragma unroll
    for (int r = 0; r < 8; ++r, to += cols) {
        const Raw<8> codes = quantized<e4m3>(v[r], __shfl_sync(0xffffffffu, own_inverse, thread.lane_of_row(r)));
        if (writes) ptx::st<8>(to, codes);
    }
}

template <typename T, bool ROWS, typename Shared>
RTK_DEVICE void quantize_tiles(Shared& shared, const ptx::TensorMap& q_t, float* scale_t, const RingRows& out,
                               int cols, bool pow2) {
    // Shuffled so that the compiler knows they are uniform.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp % kGroupWarps, 0);
    const int maxima_there = 1 + group, scales_there = 3 + group, codes_there = 5 + group;  // barriers
    const bool makes_scales = warp < kSide / kWarp;
    float(&maxima)[kGroupWarps][kMaximaPitch] = shared.maxima[group];
    constexpr bool kBoth = Shared::kStaged == 1;  // groups stage codes in the same memory
    u8* codes = shared.codes[kBoth ? 0 : group];
    RingStage<Shared::kSlots> ring_stage;
    ring_stage.next(group);

    for (u32 round = 0;; ++round, ring_stage.next(kGroups)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring_stage.slot]), ring_stage.phase);
        const int down = shared.down[ring_stage.slot];
        if (down < 0) break;
        const int across = shared.across[ring_stage.slot];
        u32 id = threadIdx.x;
        ptx::forget(id);
        const RingThread thread(id, warp);

        float v[8][8];
        {
            const ptx::SharedAddress ready = ptx::shared_address(&shared.ready[ring_stage.slot]);
            if (!ROWS) ptx::mbarrier_wait(ready, ring_stage.phase);  // the position was chosen by measurement: docs/decisions/norm_fp8.md
            Raw<16> raw[8];
            const ptx::SharedAddress own = ptx::shared_address(shared.x[ring_stage.slot][thread.part / 8]) + thread.lane_team * 128 +
                                           ((thread.part ^ thread.lane_team) % 8 << 4);
#pragma unroll
            for (int r = 0; r < 8; ++r) raw[r] = ptx::ld_shared_16(own + r * (16 * 128));
            __syncwarp();
            if (thread.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[ring_stage.slot]));
            if (ROWS) ptx::mbarrier_wait(ready, ring_stage.phase);
            float gain[8], by[8];
            const float* rstd = &shared.rstd[ring_stage.slot][thread.row];
            const float* gains = &shared.gain[ring_stage.slot][thread.column];
            load_shared_8(rstd, rstd + 4, by);
            load_shared_8(gains, gains + 4, gain);
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                unpack<T, 8>(raw[r], v[r]);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[r][i] = v[r][i] * by[r] * gain[i];
            }
        }

        // Maxima that ignore NaN but not infinities; the rare thread that met an infinity repeats this without
        // infinities.
        float columns[8], of_rows[8], max_abs = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            columns[i] = 0.0f;
#pragma unroll
            for (int r = 0; r < 8; ++r) columns[i] = fmaxf(columns[i], fabsf(v[r][i]));
            max_abs = fmaxf(max_abs, columns[i]);
        }
        if constexpr (ROWS) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                of_rows[r] = fabsf(v[r][0]);
#pragma unroll
                for (int i = 1; i < 8; ++i) of_rows[r] = fmaxf(of_rows[r], fabsf(v[r][i]));
            }
        }
        if (max_abs == __uint_as_float(0x7f800000u)) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                columns[i] = 0.0f;
#pragma unroll
                for (int r = 0; r < 8; ++r) columns[i] = max_finite(columns[i], v[r][i]);
            }
#pragma unroll
            for (int r = 0; r < 8; ++r) of_rows[r] = finite_amax(v[r]);
        }
        {
            const int upper = thread.lane_team & 1;  // of the two threads in the warp with these columns, each keeps four
            Raw<16> four;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float kept = upper ? columns[i + 4] : columns[i], given = upper ? columns[i] : columns[i + 4];
                four.w[i] = __float_as_uint(fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, 24)));
            }
            *reinterpret_cast<Raw<16>*>(&maxima[warp][shared.place(thread.column + 4 * upper)]) = four;
        }
        float scale = 0.0f;
        if (makes_scales) {
            ptx::named_barrier_sync(maxima_there, kGroupThreads);
            const int own_column = warp * kWarp + thread.lane, place = shared.place(own_column);
            if (own_column == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.taken[ring_stage.slot]));
            float largest = maxima[0][place];
#pragma unroll
            for (int w = 1; w < kGroupWarps; ++w) largest = fmaxf(largest, maxima[w][place]);
            scale = fp8_scale<e4m3>(largest, pow2);
            maxima[0][place] = inverse_scale(scale);
        } else {
            ptx::named_barrier_arrive(maxima_there, kGroupThreads);
        }
        if constexpr (ROWS)
            quantize_rows(shared, thread, v, of_rows, out, group, round, down, across, cols, pow2);
        if (warp == 0) {  // the codes of the previous tile have been stored
            if (!kBoth) {
                ptx::bulk_store_wait_read();
            } else if (round + group > 0) {
                ptx::mbarrier_wait(ptx::shared_address(&shared.codes_gone), group ^ 1);
            }
        }
        ptx::named_barrier_sync(scales_there, kGroupThreads);
        float inverse[8];
        load_shared_8(&maxima[0][shared.place(thread.column)], &maxima[0][shared.place(thread.column + 4)], inverse);
        // The 16-byte vector of column i that two lane teams share is at their number ^ (part + i) % 8.
        const ptx::SharedAddress place = ptx::shared_address(codes) + thread.part * kCodesPitch + thread.lane_team % 2 * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float one[8];
#pragma unroll
            for (int r = 0; r < 8; ++r) one[r] = v[r][i];
            const u32 swizzled = (thread.part * 16 + i * 16 & 112) ^ thread.lane_team / 2 * 16;
            ptx::st_shared_8(place + swizzled + i * 128, quantized<e4m3>(one, inverse[i]));
        }
        ptx::fence_async_shared();
        if (warp == 0) {
            ptx::named_barrier_sync(codes_there, kGroupThreads);
            if (thread.lane == 0) {
                ptx::tma_store_3d(q_t, ptx::shared_address(codes), down * kSide, 0, across * (kSide / 8));
                ptx::bulk_store_commit();
                if (kBoth) {
                    ptx::bulk_store_wait_read();
                    ptx::mbarrier_arrive(ptx::shared_address(&shared.codes_gone));
                }
            }
            __syncwarp();
        } else {
            ptx::named_barrier_arrive(codes_there, kGroupThreads);
        }
        if (makes_scales) {  // last: the fence above waits for a thread's own stores
            const int column = across * kSide + warp * kWarp + thread.lane;
            if (column < cols) scale_t[static_cast<i64>(down) * cols + column] = scale;
        }
    }
    if (warp == 0) ptx::bulk_store_wait_read();
}

}  // namespace rtk
