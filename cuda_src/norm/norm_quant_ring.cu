// e4m3 codes of an RMS normalisation whose 1/rms is known (sm_90): v = x * rstd * gain with gain = offset + weight,
// transposed with one scale per 128 rows of a column, and with ROWS also by rows with one scale per 128 columns, quantised
// from fp32 (recipe: common/fp8_scale.cuh). x [rows, cols] has any row stride; q [rows, cols] and q_t [cols, rows] are
// dense.
//
// One block per multiprocessor stays and takes tiles of 128 x 128, with ROWS two neighbours at a time. One thread asks the
// copy engine for them, into a ring in shared memory; a warp adds the numbers of their rows and columns. Two groups of
// 256 threads quantise a tile each: values stay in registers, so the tile's place is free for the next one as soon as it
// is read, and transposed codes leave through shared memory by the copy engine while the next tile is worked on.
#include "common/fp8_scale.cuh"
#include "common/pressure.cuh"
#include "common/vec.cuh"
#include "norm/norm_quant_ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace rtk {

// ---- which tiles ----------------------------------------------------------------------------------------------------

// The block's tiles in their order, BESIDE neighbours at a time, one for each group. `backwards`: from the last strip of
// 128 rows to the first.
template <int BESIDE>
struct RingWalk {
    u32 strips, wide;  // and sets of neighbours in a strip
    bool backwards;

    RTK_DEVICE RingWalk(i64 rows, i64 cols, bool from_the_end)
        : strips(static_cast<u32>(ceil_div(rows, kSide))),
          wide(static_cast<u32>(ceil_div(cols, BESIDE * kSide))),
          backwards(from_the_end) {}

    // Finds the tile of a turn; false if there is none.
    RTK_DEVICE bool find(int turn, int& down, int& across) const {
        const u32 place = blockIdx.x + static_cast<u32>(turn / BESIDE) * gridDim.x, above = place / wide;
        across = static_cast<int>((place - above * wide) * BESIDE) + turn % BESIDE;
        down = static_cast<int>(backwards ? strips - 1 - above : above);
        return above < strips;
    }
};

// ---- one thread: tiles into the ring --------------------------------------------------------------------------------

// Asks for the tile of a turn, whose slot is free; a group sees one that does not exist as its end.
template <typename Walk>
RTK_DEVICE void fetch_tile(RingShared& shared, const ptx::TensorMap& x, const Walk& walk, int turn, int slot) {
    const ptx::SharedAddress full = ptx::shared_address(&shared.full[slot]);
    int down, across;
    const bool exists = walk.find(turn, down, across);
    shared.down[slot] = exists ? down : -1, shared.across[slot] = across;
    if (exists) {
        const u64 policy = ptx::l2_last();
        ptx::mbarrier_arrive_expect(full, 2 * kBoxBytes);
#pragma unroll
        for (int box = 0; box < 2; ++box)
            ptx::tma_load_2d(ptx::shared_address(shared.x[slot][box]), x, full, across * kSide + box * 64, down * kSide,
                             policy);
    } else {
        ptx::mbarrier_arrive(full);
    }
}

// All of them from a turn on; the last turns are one end for each group.
template <typename Walk>
RTK_DEVICE void fetch_tiles(RingShared& shared, const ptx::TensorMap& x, const Walk& walk, int first_turn) {
    int down, across;
    RingTurn turn;
    turn.next(first_turn);
#pragma unroll 1
    for (int i = first_turn; i < kGroups || walk.find(i - kGroups, down, across); ++i, turn.next()) {
        if (i >= kSlots) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[turn.slot]), turn.phase ^ 1);
        fetch_tile(shared, x, walk, i, turn.slot);
    }
}

// ---- one warp: numbers of rows and columns --------------------------------------------------------------------------

// Those of one tile at a time, four in a lane, as they come from memory. They are asked for long before they are needed:
// behind all copies that the multiprocessor waits for, they would be the last to come.
template <typename T, typename Walk>
struct RingNumbers {
    const Walk& walk;
    const void* weight;
    bool wide;
    const float* rstd;
    int rows, cols;
    float offset;
    int turn = 0;
    bool exist = false;
    float by[4];
    Raw<16> gains;

    // Asks for those of the turn's tile, if there is one.
    RTK_DEVICE void load() {
        int down, across;
        exist = walk.find(turn, down, across);
        if (!exist) return;
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int row = down * kSide + lane * 4, column = across * kSide + lane * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) by[i] = row + i < rows ? rstd[row + i] : 0.0f;
        clear(gains);
        if (column >= cols || weight == nullptr) return;
        if (wide) {
            gains = ptx::ld_keep<16>(static_cast<const float*>(weight) + column);
        } else {
            const Raw<8> narrow = ptx::ld_keep<8>(static_cast<const T*>(weight) + column);
            gains.w[0] = narrow.w[0], gains.w[1] = narrow.w[1];
        }
    }

    RTK_DEVICE void give(RingShared& shared, int slot) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        float gain[4];
        unpack<T, 4>(Raw<8>{gains.w[0], gains.w[1]}, gain);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (wide) gain[i] = __uint_as_float(gains.w[i]);
            shared.rstd[slot][lane * 4 + i] = by[i];
            shared.gain[slot][lane * 4 + i] = weight == nullptr ? 1.0f : gain[i] + offset;
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.ready[slot]));
    }

    // Those of the first tile have been asked for.
    RTK_DEVICE void give_all(RingShared& shared) {
        RingTurn place;
#pragma unroll 1
        for (; exist; place.next()) {
            if (turn >= kSlots) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.slot]), place.phase ^ 1);
            give(shared, place.slot);
            ++turn;
            load();
        }
    }
};

// ---- two groups: codes ----------------------------------------------------------------------------------------------

RTK_DEVICE void load_shared_8(const float* low, const float* high, float (&v)[8]) {
    const Raw<16> a = *reinterpret_cast<const Raw<16>*>(low), b = *reinterpret_cast<const Raw<16>*>(high);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(a.w[i]), v[i + 4] = __uint_as_float(b.w[i]);
}

// Where the codes of the rows go; the scale of row m, group j to scale[m * scale_row + j * scale_group].
struct RingRows {
    e4m3* q;
    float* scale;
    i64 scale_row, scale_group;
    int rows;
};

// Scales of the thread's rows from their maxima, then codes. Where the scales of neighbouring tiles lie side by side, the
// first group leaves its own to the second one, which writes both: one by one they would be 6 % of all requests to L2.
RTK_DEVICE void quantize_rows(RingShared& shared, const RingThread& thread, const float (&v)[8][8], float (&most)[8],
                              const RingRows& out, int group, u32 round, int down, int across, int cols, bool pow2) {
    const float own = fp8_scale<e4m3>(thread.team_max(most), pow2), own_inverse = inverse_scale(own);
    const int own_row = thread.owned_row(), column = across * kSide + thread.column;
    const int rows_here = out.rows - down * kSide - thread.row;
    const i64 row = static_cast<i64>(down) * kSide + thread.row;
    const bool owns = thread.lane % 2 == 0, stores = owns && own_row < rows_here && across * kSide < cols;
    float* place = out.scale + (row + own_row) * out.scale_row + across * out.scale_group;
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
    e4m3* to = settled(out.q + row * cols + column);
#pragma unroll
    for (int r = 0; r < 8; ++r, to += cols) {
        const Raw<8> codes = quantized<e4m3>(v[r], __shfl_sync(0xffffffffu, own_inverse, thread.lane_of_row(r)));
        if (r < rows_here && column < cols) ptx::st<8>(to, codes);
    }
}

template <typename T, bool ROWS>
RTK_DEVICE void quantize_tiles(RingShared& shared, const ptx::TensorMap& q_t, float* scale_t, const RingRows& out,
                               int cols, bool pow2) {
    // Shuffles make them known to be uniform.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp % kGroupWarps, 0);
    const int maxima_there = 1 + group, scales_there = 3 + group, codes_there = 5 + group;  // barriers
    const bool makes_scales = warp < kSide / kWarp;
    float(&maxima)[kGroupWarps][kMaximaPitch] = shared.maxima[group];
    u8* codes = shared.codes[group];
    RingTurn turn;
    turn.next(group);

    for (u32 round = 0;; ++round, turn.next(kGroups)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.slot]), turn.phase);
        const int down = shared.down[turn.slot];
        if (down < 0) break;
        const int across = shared.across[turn.slot];
        ptx::mbarrier_wait(ptx::shared_address(&shared.ready[turn.slot]), turn.phase);
        u32 id = threadIdx.x;
        ptx::forget(id);
        const RingThread thread(id, warp);

        float v[8][8];
        {
            float gain[8], by[8];
            const float *rstd = &shared.rstd[turn.slot][thread.row], *gains = &shared.gain[turn.slot][thread.column];
            load_shared_8(rstd, rstd + 4, by);
            load_shared_8(gains, gains + 4, gain);
            const ptx::SharedAddress own = ptx::shared_address(shared.x[turn.slot][thread.part / 8]) + thread.row * 128;
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                unpack<T, 8>(ptx::ld_shared_16(own + r * 128 + ((thread.part % 8 ^ r) << 4)), v[r]);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[r][i] = v[r][i] * by[r] * gain[i];
            }
        }

        // Maxima that ignore NaN but not infinities, and once more without those in the rare thread that met one.
        float columns[8], of_rows[8], most = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            columns[i] = 0.0f;
#pragma unroll
            for (int r = 0; r < 8; ++r) columns[i] = fmaxf(columns[i], fabsf(v[r][i]));
            most = fmaxf(most, columns[i]);
        }
        if constexpr (ROWS) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                of_rows[r] = fabsf(v[r][0]);
#pragma unroll
                for (int i = 1; i < 8; ++i) of_rows[r] = fmaxf(of_rows[r], fabsf(v[r][i]));
            }
        }
        if (most == __uint_as_float(0x7f800000u)) {
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
            const int upper = thread.team & 1;  // of the two threads in the warp with these columns, each keeps four
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
            if (own_column == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[turn.slot]));
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
        if (warp == 0) ptx::bulk_store_wait_read();  // the codes of the tile before have left
        ptx::named_barrier_sync(scales_there, kGroupThreads);
        float inverse[8];
        load_shared_8(&maxima[0][shared.place(thread.column)], &maxima[0][shared.place(thread.column + 4)], inverse);
        u8* place = codes + thread.part * kCodesPitch + thread.team % 2 * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float one[8];
#pragma unroll
            for (int r = 0; r < 8; ++r) one[r] = v[r][i];
            *reinterpret_cast<Raw<8>*>(place + i * 128 + ((thread.team / 2 ^ ((thread.part + i) & 7)) << 4)) =
                quantized<e4m3>(one, inverse[i]);
        }
        ptx::fence_async_shared();
        if (warp == 0) {
            ptx::named_barrier_sync(codes_there, kGroupThreads);
            if (thread.lane == 0) {
                ptx::tma_store_3d(q_t, ptx::shared_address(codes), down * kSide, 0, across * (kSide / 8));
                ptx::bulk_store_commit();
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

// scale_t is [ceil(rows/128), cols]. The weight (may be null) is of T, or of fp32 if `weight_wide`. Boxes: 128 x 64 of
// x; of q_t as [cols/8, 8, rows] 16 x 9 x 128. `after`: x and rstd come from the previous kernel of the stream, which
// wrote the last rows last, so that those may still be in L2.
template <typename T, bool ROWS>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_fp8_ring(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap q_t,
                  const void* weight, const float* rstd, e4m3* q, float* scale, float* scale_t, i64 rows, i64 cols,
                  i64 scale_row, i64 scale_group, i64 weight_wide, i64 pow2, i64 after, double offset) {
    extern __shared__ __align__(1024) u8 memory[];
    RingShared& shared = *reinterpret_cast<RingShared*>(memory);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) - kGroups * kGroupWarps;
    constexpr int kBeside = ROWS ? kGroups : 1;
    const RingWalk<kBeside> walk(rows, cols, after != 0);
    const bool fetches = threadIdx.x == kGroups * kGroupThreads;
    RingNumbers<T, RingWalk<kBeside>> numbers = {walk,
                                                 weight,
                                                 weight_wide != 0,
                                                 rstd,
                                                 static_cast<int>(rows),
                                                 static_cast<int>(cols),
                                                 static_cast<float>(offset)};
    if (warp == 1 && after == 0) numbers.load();
    if (fetches) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&shared.ready[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), 1);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&shared.scales_there[i]), kGroupWarps);
            ptx::mbarrier_init(ptx::shared_address(&shared.scales_gone[i]), kGroupWarps);
        }
        ptx::mbarrier_fence_init();
        if (after == 0) fetch_tile(shared, x, walk, 0, 0);
    }
    __syncthreads();
    if (after != 0) ptx::wait_for_previous();
    if (warp >= 0) {
        ptx::registers_give<kOtherRegisters>();
        if (fetches) {
            fetch_tiles(shared, x, walk, after == 0 ? 1 : 0);
        } else if (warp == 1) {
            if (after != 0) numbers.load();
            numbers.give_all(shared);
        }
    } else {
        ptx::registers_take<kGroupRegisters>();
        const RingRows out = {q, scale, scale_row, scale_group, static_cast<int>(rows)};
        quantize_tiles<T, ROWS>(shared, q_t, scale_t, out, static_cast<int>(cols), pow2 != 0);
    }
}

}  // namespace rtk
