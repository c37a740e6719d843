// e4m3 codes of an RMS normalisation in both layouts, reading x once (sm_90): v = x * rstd * gain with gain = offset +
// weight, by rows with one scale per 128 columns, and transposed with one scale per 128 rows of a column, quantised from
// fp32 (recipe: common/fp8_scale.cuh). x [rows, cols] has any row stride; q [rows, cols] and q_t [cols, rows] are dense.
//
// Persistent, one block per SM: it takes pairs of tiles of 128 x 128 from a ring in shared memory, as in
// norm/norm_fp8_ring.cu. A strip of 128 rows is spread over neighbouring blocks, which work on it at about the same
// time. While the two groups quantise, two warps sum the squares of pairs that have arrived, and one waits for the sums
// of all blocks and computes 1/rms (norm/norm_fp8_single_read.cuh).
//
// Why this cannot deadlock:
// 1. Blocks wait for each other, so all of them must be resident: the launch is cooperative.
// 2. A strip is complete when all blocks that have pairs of it have added their sums. A block adds those of a pair as
//    soon as it has arrived in shared memory, and waits for no other block before it does.
// 3. The slot of a pair previously held a pair of the same block from at least three rounds before, hence of an earlier
//    strip, because strips are no wider than two rounds.
// 4. So all pairs of the first incomplete strip get their slots, and it becomes complete.
#include "norm/norm_fp8_single_read.cuh"
#include "norm/norm_fp8_ring_codes.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// The first tiles are issued after others have arrived, so that all blocks get their first pair soon.
inline constexpr int kFirstTiles = 7;
inline constexpr int kOnTheirWay = 2;

// One thread; the first tile has already been issued.
RTK_DEVICE void fetch_tiles(SingleReadShared& shared, const ptx::TensorMap& x, const SingleReadWalk& walk) {
    int down, across;
    RingStage<SingleReadShared::kSlots> ring_stage;
    ring_stage.next();
#pragma unroll 1
    for (int tile = 1; tile < kGroups || walk.find(tile - kGroups, down, across); ++tile, ring_stage.next()) {
        if (tile >= SingleReadShared::kSlots)
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring_stage.slot]), ring_stage.phase ^ 1);
        if (tile >= kOnTheirWay && tile < kFirstTiles)
            ptx::mbarrier_wait(ptx::shared_address(&shared.full[tile - kOnTheirWay]), 0);
        fetch_tile(shared, x, walk, tile, ring_stage.slot);
    }
}

// Two warps, four of every eight rows each: sums of squares of pairs.
template <typename T>
RTK_DEVICE void publish_sums(SingleReadShared& shared, const SingleReadWalk& walk, const SingleReadExchange& exchange,
                             int adder) {
    int down, across;
    RingStage<SingleReadShared::kSlots> ring_stage;
#pragma unroll 1
    for (int pair = 0; walk.find(2 * pair, down, across); ++pair) {
#pragma unroll 1
        for (int tile = 0; tile < 2; ++tile, ring_stage.next()) {
            ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring_stage.slot]), ring_stage.phase);
            add_squares<T>(shared.x[ring_stage.slot][0] + adder * 64 * 128, shared.sums + adder * 4, tile != 0);
            __syncwarp();
            if (this_thread() % kWarp == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[ring_stage.slot]));
        }
        const int first = adder * 64 + static_cast<int>(this_thread()) % kWarp;
#pragma unroll 1
        for (int place = first; place < first + 64; place += kWarp)
            exchange.add(down, place, shared.sums[exchange.row_at(place)]);
        __syncwarp();
        if (this_thread() % kWarp == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.published[pair % kPairsInFlight]));
    }
}

// One warp: writes 1/rms and gains of tiles to shared memory; the first block of a strip also writes 1/rms to global
// memory.
template <typename T>
struct SingleReadNumbers {
    SingleReadShared& shared;
    const SingleReadWalk& walk;
    SingleReadExchange exchange;
    RingGains<T> gains;
    const T* x;
    i64 x_stride;
    float* rstd;
    int rows, cols;
    float eps;
    int lane = static_cast<int>(threadIdx.x) % kWarp;

    // 1/rms of the strip's rows at places lane, lane + 32, ..., once all blocks have added to them.
    RTK_DEVICE void wait(int down, float (&by)[4]) const {
        ptx::Words w[4];
        const u64* from = settled(exchange.sum(down, lane));
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = ptx::ld_words(from + i * 2 * kWarp);
        for (;;) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < 4; ++i) all = all && exchange.complete(w[i]);
            if (__all_sync(0xffffffffu, all)) break;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!exchange.complete(w[i])) w[i] = ptx::ld_words(from + i * 2 * kWarp);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = exchange.value(w[i]);
            for (u32 odd = __ballot_sync(0xffffffffu, exchange.odd(w[i])); odd != 0; odd &= odd - 1) {
                const int which = __ffs(static_cast<int>(odd)) - 1;
                const i64 row = static_cast<i64>(down) * kSide + exchange.row_at(i * kWarp + which);
                const float exact = row_squares(x + row * x_stride, cols);
                if (lane == which) sum = exact;
            }
            by[i] = rstd_of(sum, static_cast<float>(cols), eps);
        }
    }

    // raw_gains: of the first pair.
    RTK_DEVICE void give_all(Raw<16> (&raw_gains)[2]) const {
        int down, across;
        RingStage<SingleReadShared::kSlots> ring_stage;
        bool exists = walk.find(0, down, across);
        int read = 0;  // the strip before, and the blocks that had read it
        u32 readers = 0;
#pragma unroll 1
        for (int pair = 0; exists; ++pair) {
            exchange.prefetch(pair + 2);
            ptx::mbarrier_wait(ptx::shared_address(&shared.published[pair % kPairsInFlight]), pair / kPairsInFlight & 1);
            float by[4];
            wait(down, by);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile, ring_stage.next()) {
                if (2 * pair + tile >= SingleReadShared::kSlots)
                    ptx::mbarrier_wait(ptx::shared_address(&shared.taken[ring_stage.slot]), ring_stage.phase ^ 1);
#pragma unroll
                for (int i = 0; i < 4; ++i) shared.rstd[ring_stage.slot][exchange.row_at(i * kWarp + lane)] = by[i];
                gains.give(shared.gain[ring_stage.slot], raw_gains[tile]);
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.ready[ring_stage.slot]));
            }
            if (across == 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = down * kSide + exchange.row_at(i * kWarp + lane);
                    if (row < rows) rstd[row] = by[i];
                }
            }
            if (pair > 0) exchange.clear_behind(read, readers);
            read = down, readers = exchange.leave(down);
            exists = walk.find(2 * pair + 2, down, across);
            if (exists) raw_gains[0] = gains.load(across), raw_gains[1] = gains.load(across + 1);
        }
        exchange.clear_behind(read, readers);
    }
};

// scale_t is [ceil(rows/128), cols]; the scale of row m, group j goes to scale[m * scale_row + j * scale_group]. The weight
// (may be null) is of T, or of fp32 if `weight_fp32`. Boxes as in norm_fp8_ring. `words`: see SingleReadExchange.
template <typename T>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_fp8_single_read(const __grid_constant__ ptx::TensorMap boxes, const __grid_constant__ ptx::TensorMap q_t, const T* x,
                  const void* weight, float* rstd, e4m3* q, float* scale, float* scale_t, u64* words, i64 rows, i64 cols,
                  i64 x_stride, i64 scale_row, i64 scale_group, i64 weight_fp32, i64 pow2, double eps, double offset) {
    extern __shared__ __align__(1024) u8 memory[];
    SingleReadShared& shared = *reinterpret_cast<SingleReadShared*>(memory);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) - kGroups * kGroupWarps;
    const SingleReadWalk walk(rows, cols, false);
    const RingGains<T> gains = {weight, weight_fp32 != 0, static_cast<int>(cols), static_cast<float>(offset)};
    Raw<16> raw_gains[2];
    const SingleReadExchange exchange = {words, walk, eps * cols < 0x1p-17};
    if (warp == 1) {  // small loads before large ones
        exchange.prefetch(0);
        exchange.prefetch(1);
        int down, across;
        walk.find(0, down, across);
        raw_gains[0] = gains.load(across), raw_gains[1] = gains.load(across + 1);
    }
    const bool fetches = threadIdx.x == kGroups * kGroupThreads;
    if (fetches) {
        shared.init();
        ptx::mbarrier_fence_init();
        fetch_tile(shared, boxes, walk, 0, 0);
    }
    __syncthreads();
    if (warp >= 0) {
        ptx::registers_give<kOtherRegisters>();
        if (fetches) {
            fetch_tiles(shared, boxes, walk);
        } else if (warp == 1) {
            SingleReadNumbers<T>{shared, walk, exchange, gains, x, x_stride, rstd, static_cast<int>(rows),
                                 static_cast<int>(cols), static_cast<float>(eps)}
                .give_all(raw_gains);
        } else if (warp > 1) {
            publish_sums<T>(shared, walk, exchange, warp - 2);
        }
    } else {
        ptx::registers_take<kGroupRegisters>();
        const RingRows out = {q, scale, scale_row, scale_group, static_cast<int>(rows)};
        quantize_tiles<T, true>(shared, q_t, scale_t, out, static_cast<int>(cols), pow2 != 0);
    }
}

}  // namespace rtk
