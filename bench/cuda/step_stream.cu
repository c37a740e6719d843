// Prototype of one persistent kernel for a decoding step: the products of all layers and the waits between them, and
// nothing else. It measures how much of memory's speed is left if blocks wait for each other five times a layer.
//
// A layer has five stages: q, k, v (2560 results); a stand-in for attention, which copies the first 1536 of these; the
// output projection (1536); gate and up (4608 sums of two products each, times sqrt(1/2)); down (1536, k = 4608). Results
// are rounded to bf16. Weights come in units of 1536 elements: a row, or a third of a row of `down`. A block owns pairs of
// results of every stage; `weights` holds the units of a block one behind the other in the order in which it needs them.
//
// One warp loads pages of four units into a ring, without ever waiting for activations: only the ring limits how far it
// runs ahead. Sixteen warps multiply, a unit at a time; their sums meet in shared memory. Activations travel through global memory as words of 8 bytes: two bf16 and the number
// of the launch. `mode`: 0 nobody waits (results are wrong: the speed of the stream alone), 1 a counter for each stage,
// 2 readers poll the words themselves until they have the number of this launch.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/words.cuh"

namespace rtk {

inline constexpr int kUnit = 1536, kUnitBytes = 2 * kUnit, kPageUnits = 4, kPageBytes = kPageUnits * kUnitBytes;
inline constexpr int kStages = 5, kConsumers = 16, kConsumerThreads = 32 * kConsumers;
inline constexpr int kLargest = 4608;   // activations of a stage
inline constexpr int kWords = kLargest / 2;
inline constexpr int kPatience = 1 << 24;  // polls; then the launch fails instead of hanging

struct StreamStage {
    int results, units, thirds;  // units of a result, and parts of k that follow each other

    RTK_DEVICE explicit StreamStage(int stage) {
        results = stage == 0 ? 2560 : stage == 3 ? 4608 : 1536;
        units = stage == 1 ? 0 : stage == 3 ? 2 : 1;
        thirds = stage == 4 ? 3 : 1;
    }
    RTK_DEVICE int inputs() const { return thirds * kUnit; }
    // The first pair of results of a block.
    RTK_DEVICE int first(int block) const { return results / 2 * block / static_cast<int>(gridDim.x); }
};

RTK_DEVICE void stream_poll(u64 word, u32 tag, int& polls, bool& again) {
    again = static_cast<u32>(word >> 32) != tag;
    if (again && ++polls > kPatience) __trap();
}

template <int PAGES>
__global__ void __launch_bounds__(kConsumerThreads + 32, 1)
    step_stream(const u8* weights, u64* words, u32* counters, u32* launches, i64 block_bytes, i64 layers, i64 mode) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 full[PAGES], empty[PAGES];
    __shared__ __align__(16) u32 activations[kLargest / 2];
    __shared__ float sums[3 * kUnit];  // of the units of a stage
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = static_cast<int>(blockIdx.x);
    const ptx::SharedAddress pages = ptx::shared_address(memory);
    auto full_at = [&](u32 page) { return ptx::shared_address(full + page % PAGES); };
    auto empty_at = [&](u32 page) { return ptx::shared_address(empty + page % PAGES); };
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAGES; ++i) {
            ptx::mbarrier_init(ptx::shared_address(full + i), 1);
            ptx::mbarrier_init(ptx::shared_address(empty + i), kPageUnits);
        }
        ptx::mbarrier_fence_init();
    }
    const u32 launch = launches[block] + 1;
    __syncthreads();

    if (warp == kConsumers) {
        if (lane != 0) return;
        const u8* from = weights + block * block_bytes;
        u32 page = 0;
        for (int layer = 0; layer < layers; ++layer)
            for (int s = 0; s < kStages; ++s) {
                const StreamStage stage(s);
                const int units = 2 * stage.units * (stage.first(block + 1) - stage.first(block));
                for (int third = 0; third < stage.thirds; ++third)
                    for (int unit = 0; unit < units; unit += kPageUnits, ++page) {
                        const u32 bytes = min(units - unit, kPageUnits) * kUnitBytes;
                        ptx::mbarrier_wait(empty_at(page), (page / PAGES & 1) ^ 1);
                        ptx::mbarrier_arrive_expect(full_at(page), bytes);
                        ptx::bulk_load(pages + page % PAGES * kPageBytes, from, bytes, full_at(page));
                        from += bytes;
                    }
            }
        return;
    }

    u32 page = 0;
    for (int layer = 0; layer < layers; ++layer)
        for (int s = 0; s < kStages; ++s) {
            const StreamStage stage(s);
            const int index = layer * kStages + s;
            const u64* in = words + static_cast<i64>(index) * kWords;
            u64* out = words + static_cast<i64>(index + 1) * kWords;
            if (mode == 1 && index > 0) {
                if (threadIdx.x == 0)
                    for (int polls = 0; ptx::ld_word_acquire(counters + index - 1) != launch * gridDim.x;)
                        if (++polls > kPatience) __trap();
                ptx::named_barrier_sync(1, kConsumerThreads);
            }
            const bool tagged = mode == 2 && index > 0;
            for (int i = threadIdx.x; i < stage.inputs() / 4; i += kConsumerThreads) {
                ptx::Words two = ptx::ld_words(in + 2 * i);
                bool again = tagged;
                for (int polls = 0; again;) {
                    bool first, second;
                    stream_poll(two.first, launch, polls, first);
                    stream_poll(two.second, launch, polls, second);
                    again = first || second;
                    if (again) two = ptx::ld_words(in + 2 * i);
                }
                activations[2 * i] = static_cast<u32>(two.first), activations[2 * i + 1] = static_cast<u32>(two.second);
            }
            ptx::named_barrier_sync(1, kConsumerThreads);
            const int first = stage.first(block), pairs = stage.first(block + 1) - first;
            const int units = 2 * stage.units * pairs, all = units * stage.thirds;
            const int pages_of_third = (units + kPageUnits - 1) / kPageUnits;
            float x[kUnit / 32];
            int loaded = -1;
            for (int i = warp; i < all; i += kConsumers) {
                const int third = i / units, unit = i - third * units;
                if (third != loaded) {
                    loaded = third;
#pragma unroll
                    for (int v = 0; v < kUnit / 256; ++v) {
                        const Raw<16> raw = ptx::ld_shared_16(ptx::shared_address(activations) + third * kUnitBytes + (v * 32 + lane) * 16);
                        unpack<bf16, 8>(raw, *reinterpret_cast<float(*)[8]>(x + 8 * v));
                    }
                }
                const u32 own = page + third * pages_of_third + unit / kPageUnits;
                ptx::mbarrier_wait(full_at(own), own / PAGES & 1);
                const ptx::SharedAddress from = pages + own % PAGES * kPageBytes + unit % kPageUnits * kUnitBytes + lane * 16;
                float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int v = 0; v < kUnit / 256; ++v) {
                    float w[8];
                    unpack<bf16, 8>(ptx::ld_shared_16(from + v * 512), w);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum[e % 4] = fmaf(w[e], x[8 * v + e], sum[e % 4]);
                }
                __syncwarp();
                if (lane == 0) {
                    ptx::mbarrier_arrive(empty_at(own));
                    for (int missing = unit + 1 == units ? -units & kPageUnits - 1 : 0; missing > 0; --missing)
                        ptx::mbarrier_arrive(empty_at(own));
                }
                const float total = warp_reduce<Sum>((sum[0] + sum[1]) + (sum[2] + sum[3]));
                if (lane == 0) sums[i] = total;
            }
            page += pages_of_third * stage.thirds;
            ptx::named_barrier_sync(1, kConsumerThreads);
            for (int pair = threadIdx.x; pair < pairs; pair += kConsumerThreads) {
                float both[2];
                if (stage.units == 0) {  // the stand-in for attention
                    const u32 word = activations[first + pair];
                    both[0] = __uint_as_float(word << 16), both[1] = __uint_as_float(word & 0xffff0000u);
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int unit = (2 * pair + i) * stage.units;
                        both[i] = sums[unit];
                        if (stage.units == 2) both[i] = (both[i] + sums[unit + 1]) * 0.70710678f;
                        if (stage.thirds == 3) both[i] = both[i] + sums[units + unit] + sums[2 * units + unit];
                    }
                }
                *const_cast<volatile u64*>(out + first + pair) = static_cast<u64>(launch) << 32 | pack<bf16, 2>(both).w[0];
            }
            if (mode == 1 || stage.units == 0) ptx::named_barrier_sync(1, kConsumerThreads);  // words are written, or read
            if (mode == 1 && threadIdx.x == 0) {
                __threadfence();
                atomicAdd(counters + index, 1u);
            }
        }
    if (threadIdx.x == 0) launches[block] = launch;
}

}  // namespace rtk
