// e4m3 codes of an RMS normalisation in both layouts, reading x once (sm_90): v = x * rstd * gain with gain = offset +
// weight, by rows with one scale per 128 columns, and transposed with one scale per 128 rows of a column, quantised from
// fp32 (recipe: common/fp8_scale.cuh). x [rows, cols] has any row stride; q [rows, cols] and q_t [cols, rows] are dense.
//
// One block per multiprocessor stays and takes pairs of tiles of 128 x 128 from a ring in shared memory, as in
// norm/norm_quant_ring.cu. A strip of 128 rows is spread over neighbouring blocks, which work on it at about the same time.
// While the two groups quantise, two warps add up the squares of pairs that have come, one adds up those of all blocks for
// some rows of a strip and makes their 1/rms (norm/norm_quant_once.cuh), and one collects 1/rms of all rows of a strip.
//
// Blocks wait for each other, so all of them must be resident: the launch is cooperative. A pair's place is taken by one of
// its block at least three rounds before, of an earlier strip if strips are no wider than two rounds; so all pairs of the
// first strip that is not complete get their place.
#include "norm/norm_quant_once.cuh"
#include "norm/norm_quant_ring_codes.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// The first tiles are asked for when others have come, so that all blocks have their first pair soon.
inline constexpr int kFirstTiles = 7, kOnTheirWay = 2;

// One warp: asks for tiles when their slots are free, and shares out 1/rms when sums are there, without waiting for either.
RTK_DEVICE void fetch_and_share_out(OnceShared& shared, const ptx::TensorMap& x, const OnceWalk& walk,
                                    const OnceExchange& exchange, float cols, float eps, float* rstd) {
    const bool leader = threadIdx.x % kWarp == 0;
    int down, across, tile = 1, pair = 0;
    RingTurn<OnceShared::kSlots> turn;
    turn.next();
    walk.find(0, down, across);
    OnceSums sums;
    bool fetches = true, shares = true, published = false, asked = false;
#pragma unroll 1
    while (fetches || shares) {
        if (fetches) {
            bool free = tile < OnceShared::kSlots ||
                        ptx::mbarrier_test(ptx::shared_address(&shared.empty[turn.slot]), turn.phase ^ 1);
            if (tile >= kOnTheirWay && tile < kFirstTiles)
                free = free && ptx::mbarrier_test(ptx::shared_address(&shared.full[tile - kOnTheirWay]), 0);
            if (__all_sync(0xffffffffu, free)) {
                if (leader) fetch_tile(shared, x, walk, tile, turn.slot);
                ++tile, turn.next();
                int end_down, end_across;
                fetches = tile < kGroups || walk.find(tile - kGroups, end_down, end_across);
            }
        }
        if (!shares) continue;
        if (!published)
            published = __all_sync(0xffffffffu, ptx::mbarrier_test(ptx::shared_address(&shared.published[pair % kAhead]),
                                                                   pair / kAhead & 1));
        if (!published) continue;
        if (exchange.shares(across / 2)) {
            sums.ask(exchange, exchange.sums_of_share(walk, down, across / 2), asked);
            asked = true;
            if (!sums.complete(exchange)) continue;
            sums.share_out(exchange, down, across / 2, cols, eps, rstd);
        }
        if (leader) ptx::mbarrier_arrive(ptx::shared_address(&shared.shared_out[pair % kAhead]));
        ++pair, published = asked = false;
        shares = walk.find(2 * pair, down, across);
    }
}

// Two warps, 64 rows each: sums of squares of a pair, to the blocks that share them out.
template <typename T>
RTK_DEVICE void publish_sums(OnceShared& shared, const OnceWalk& walk, const OnceExchange& exchange, int adder) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, row = adder * 64 + lane * 2;
    const int sharer = row / exchange.share, place = row % exchange.share;
    int down, across;
    RingTurn<OnceShared::kSlots> turn;
#pragma unroll 1
    for (int pair = 0; walk.find(2 * pair, down, across); ++pair) {
#pragma unroll 1
        for (int tile = 0; tile < 2; ++tile, turn.next()) {
            ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.slot]), turn.phase);
            add_squares<T>(shared.x[turn.slot][0] + adder * 64 * 128, shared.sums + adder * 64, tile != 0);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[turn.slot]));
        }
        ptx::st_words(exchange.sums_of_share(walk, down, sharer) + across / 2 * exchange.share + place,
                      {exchange.word(shared.sums[row]), exchange.word(shared.sums[row + 1])});
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.published[pair % kAhead]));
    }
}

// One warp: 1/rms and gains of tiles to shared memory.
template <typename T>
RTK_DEVICE void collect_numbers(OnceShared& shared, const OnceWalk& walk, const OnceExchange& exchange,
                                const RingGains<T>& gains, Raw<16> (&raw_gains)[2]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int down, across;
    RingTurn<OnceShared::kSlots> turn;
    walk.find(0, down, across);
    bool exists = true;
#pragma unroll 1
    for (int pair = 0; exists; ++pair) {
        exchange.prefetch(walk, pair + 2);
        ptx::mbarrier_wait(ptx::shared_address(&shared.shared_out[pair % kAhead]), pair / kAhead & 1);
        const u64* from = exchange.rstd_of_strip(down) + lane * 2;
        ptx::Words upper = ptx::ld_words(from), lower = ptx::ld_words(from + 64);
        while (!__all_sync(0xffffffffu, exchange.there(upper) && exchange.there(lower))) {
            if (!exchange.there(upper)) upper = ptx::ld_words(from);
            if (!exchange.there(lower)) lower = ptx::ld_words(from + 64);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile, turn.next()) {
            if (2 * pair + tile >= OnceShared::kSlots)
                ptx::mbarrier_wait(ptx::shared_address(&shared.taken[turn.slot]), turn.phase ^ 1);
            float* by = shared.rstd[turn.slot] + lane * 2;
            by[0] = exchange.value(upper.first), by[1] = exchange.value(upper.second);
            by[64] = exchange.value(lower.first), by[65] = exchange.value(lower.second);
            gains.give(shared.gain[turn.slot], raw_gains[tile]);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.ready[turn.slot]));
        }
        exists = walk.find(2 * pair + 2, down, across);
        if (exists) raw_gains[0] = gains.load(across), raw_gains[1] = gains.load(across + 1);
    }
    if (lane == 0) exchange.end();  // all of the block's warps have read the tag
}

// scale_t is [ceil(rows/128), cols]; the scale of row m, group j goes to scale[m * scale_row + j * scale_group]. The weight
// (may be null) is of T, or of fp32 if `weight_wide`. Boxes as in norm_fp8_ring. `words`: see OnceExchange; zeros, or what
// the last launch has left.
template <typename T>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_fp8_once(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap q_t,
                  const void* weight, float* rstd, e4m3* q, float* scale, float* scale_t, u64* words, i64 rows, i64 cols,
                  i64 scale_row, i64 scale_group, i64 share, i64 weight_wide, i64 pow2, double eps, double offset) {
    extern __shared__ __align__(1024) u8 memory[];
    OnceShared& shared = *reinterpret_cast<OnceShared*>(memory);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) - kGroups * kGroupWarps;
    const OnceWalk walk(rows, cols, false);
    OnceExchange exchange = {words, static_cast<int>(walk.wide), static_cast<int>(share), static_cast<int>(rows)};
    if (warp >= 0) exchange.begin();
    const RingGains<T> gains = {weight, weight_wide != 0, static_cast<int>(cols), static_cast<float>(offset)};
    Raw<16> raw_gains[2];
    if (warp == 1) {  // small loads before large ones
        exchange.prefetch(walk, 0);
        exchange.prefetch(walk, 1);
        int down, across;
        walk.find(0, down, across);
        raw_gains[0] = gains.load(across), raw_gains[1] = gains.load(across + 1);
    }
    if (threadIdx.x == kGroups * kGroupThreads) {
        shared.init();
        ptx::mbarrier_fence_init();
        fetch_tile(shared, x, walk, 0, 0);
    }
    __syncthreads();
    if (warp >= 0) {
        ptx::registers_give<kOtherRegisters>();
        if (warp == 0) {
            fetch_and_share_out(shared, x, walk, exchange, static_cast<float>(cols), static_cast<float>(eps), rstd);
        } else if (warp == 1) {
            collect_numbers<T>(shared, walk, exchange, gains, raw_gains);
        } else {
            publish_sums<T>(shared, walk, exchange, warp - 2);
        }
    } else {
        ptx::registers_take<kGroupRegisters>();
        const RingRows out = {q, scale, scale_row, scale_group, static_cast<int>(rows)};
        quantize_tiles<T, true>(shared, q_t, scale_t, out, static_cast<int>(cols), pow2 != 0);
    }
}

}  // namespace rtk
