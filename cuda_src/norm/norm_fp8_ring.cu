// e4m3 codes of an RMS normalisation with known 1/rms (sm_90): v = x * rstd * gain with gain = offset + weight,
// transposed with one scale per 128 rows of a column, and with ROWS also by rows with one scale per 128 columns,
// quantised from fp32 (recipe: common/fp8_scale.cuh). x [rows, cols] has any row stride; q [rows, cols] and q_t [cols,
// rows] are dense.
//
// Persistent, one block per SM: it takes tiles of 128 x 128, with ROWS two neighbours at a time. One thread issues TMA
// loads into a ring in shared memory; a warp adds the row and column operands; two groups of 256 threads quantise
// (norm/norm_fp8_ring_codes.cuh).
#include "norm/norm_fp8_ring_codes.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace rtk {

using KnownShared = RingShared<4, kGroups>;

// One thread: loads all tiles from the first_tile-th on, then one end marker per group.
template <typename Walk>
RTK_DEVICE void fetch_tiles(KnownShared& shared, const ptx::TensorMap& x, const Walk& walk, int first_tile) {
    int down, across;
    RingStage<KnownShared::kSlots> ring_stage;
    ring_stage.next(first_tile);
#pragma unroll 1
    for (int i = first_tile; i < kGroups || walk.find(i - kGroups, down, across); ++i, ring_stage.next()) {
        if (i >= KnownShared::kSlots)
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring_stage.slot]), ring_stage.phase ^ 1);
        fetch_tile(shared, x, walk, i, ring_stage.slot);
    }
}

// One warp: 1/rms and gains of one tile at a time, four per lane, as stored in memory. They are loaded long before they
// are needed, because otherwise they would queue behind all copies that the SM waits for.
template <typename T, typename Walk>
struct RingNumbers {
    const Walk& walk;
    RingGains<T> gains;
    const float* rstd;
    int rows;
    int ring_stage = 0;
    bool exist = false;
    float by[4];
    Raw<16> raw_gains;

    // Loads those of the tile, if there is one.
    RTK_DEVICE void load() {
        int down, across;
        exist = walk.find(ring_stage, down, across);
        if (!exist) return;
        const int row = down * kSide + static_cast<int>(threadIdx.x) % kWarp * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) by[i] = row + i < rows ? rstd[row + i] : 0.0f;
        raw_gains = gains.load(across);
    }

    RTK_DEVICE void give(KnownShared& shared, int slot) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
        for (int i = 0; i < 4; ++i) shared.rstd[slot][lane * 4 + i] = by[i];
        gains.give(shared.gain[slot], raw_gains);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.ready[slot]));
    }

    // Those of the first tile have already been loaded.
    RTK_DEVICE void give_all(KnownShared& shared) {
        RingStage<KnownShared::kSlots> place;
#pragma unroll 1
        for (; exist; place.next()) {
            if (ring_stage >= KnownShared::kSlots)
                ptx::mbarrier_wait(ptx::shared_address(&shared.taken[place.slot]), place.phase ^ 1);
            give(shared, place.slot);
            ++ring_stage;
            load();
        }
    }
};

// scale_t is [ceil(rows/128), cols]. The weight (may be null) is of T, or of fp32 if `weight_fp32`. Boxes of x as [8,
// rows/8, cols]: 8 x 16 x 64; of q_t as [cols/8, 8, rows]: 16 x 9 x 128. `after`: x and rstd come from the previous
// kernel of the stream, which wrote the last rows last, so those may still be in L2.
template <typename T, bool ROWS>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_fp8_ring(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap q_t,
                  const void* weight, const float* rstd, e4m3* q, float* scale, float* scale_t, i64 rows, i64 cols,
                  i64 scale_row, i64 scale_group, i64 weight_fp32, i64 pow2, i64 after, double offset) {
    extern __shared__ __align__(1024) u8 memory[];
    KnownShared& shared = *reinterpret_cast<KnownShared*>(memory);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) - kGroups * kGroupWarps;
    constexpr int kNeighbours = ROWS ? kGroups : 1;
    const RingWalk<kNeighbours> walk(rows, cols, after != 0);
    const bool fetches = threadIdx.x == kGroups * kGroupThreads;
    RingNumbers<T, RingWalk<kNeighbours>> numbers = {
        walk, {weight, weight_fp32 != 0, static_cast<int>(cols), static_cast<float>(offset)}, rstd, static_cast<int>(rows)};
    if (warp == 1 && after == 0) numbers.load();
    if (fetches) {
        shared.init(0);
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
