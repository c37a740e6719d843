// Reductions in a fixed order, so that equal inputs give equal bits.
#pragma once
#include "common/abi.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"

namespace rtk {

struct Sum {
    static constexpr float kIdentity = 0.0f;
    RTK_DEVICE static float apply(float a, float b) { return a + b; }
};

// Maximum of magnitudes. Keeps NaN, unlike fmaxf: a set with a NaN has maximum NaN.
struct MaxMagnitude {
    static constexpr float kIdentity = 0.0f;
    RTK_DEVICE static float apply(float a, float b) { return (a > b || a != a) ? a : b; }
};

// Each of `lanes` (a power of two, at most 32) neighbouring lanes gets their result. The whole warp must call it.
// Both partners of an exchange compute the same pair, so all lanes end with the same bits.
template <typename Op>
RTK_DEVICE float warp_reduce(float v, int lanes = kWarp) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        if (offset < lanes) v = Op::apply(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// The same for two numbers over groups of threads, which are narrower than a warp or consist of whole warps. In 6
// instead of 10 exchanges: after the first one even lanes carry `a` and odd lanes `b`.
template <typename Op>
RTK_DEVICE void warp_reduce_pair(float& a, float& b, int threads) {
    if (threads < kWarp) {
        a = warp_reduce<Op>(a, threads);
        b = warp_reduce<Op>(b, threads);
        return;
    }
    constexpr u32 kAll = 0xffffffffu;
    const bool odd = threadIdx.x & 1;
    float mine = Op::apply(odd ? b : a, __shfl_xor_sync(kAll, odd ? a : b, 1));
#pragma unroll
    for (int offset = 2; offset < kWarp; offset *= 2) mine = Op::apply(mine, __shfl_xor_sync(kAll, mine, offset));
    const float other = __shfl_xor_sync(kAll, mine, 1);
    a = odd ? other : mine;
    b = odd ? mine : other;
}

// COUNT results (a power of two) over LANES neighbouring lanes, scattered: each lane gets that of number lane % COUNT.
// Takes half as many exchanges as numbers, instead of log2(LANES) for each. The whole warp must call this; v is
// clobbered.
template <int COUNT, int LANES, typename Combine>
RTK_DEVICE float scattered(float (&v)[COUNT], int lane, const Combine& combine) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2) {
        const bool upper = (lane & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
            v[i] = combine(kept, __shfl_xor_sync(0xffffffffu, given, half));
        }
    }
#pragma unroll
    for (int offset = COUNT; offset < LANES; offset *= 2)
        v[0] = combine(v[0], __shfl_xor_sync(0xffffffffu, v[0], offset));
    return v[0];
}

// The threads of a block, split into groups of equal size that each work on one row at a time. A group is a power of
// two of at most 32 lanes, or whole warps; with whole warps a block holds at most 15 groups (one named barrier each).
struct RowGroup {
    int threads;  // in the group
    int count;    // groups in the block
    int index;    // of this thread's group
    int thread;   // of this thread in its group
    int meeting;  // threads at the group's barrier

    RTK_DEVICE explicit RowGroup(i64 threads_per_row)
        : threads(static_cast<int>(threads_per_row)), meeting(threads) {
        const float inverse = ptx::rcp(static_cast<float>(threads));
        count = quotient(blockDim.x, inverse);
        index = quotient(threadIdx.x, inverse);
        thread = static_cast<int>(threadIdx.x) - index * threads;
    }

    // `groups` of them; if the block has more threads, each group also gets a helper warp, after all groups. Helpers
    // use the barrier of their group, and have thread numbers from `threads` on.
    RTK_DEVICE RowGroup(i64 threads_per_row, i64 groups)
        : threads(static_cast<int>(threads_per_row)), count(static_cast<int>(groups)) {
        const int behind = static_cast<int>(threadIdx.x) - threads * count;
        index = quotient(threadIdx.x, ptx::rcp(static_cast<float>(threads)));
        thread = static_cast<int>(threadIdx.x) - index * threads;
        if (behind >= 0) index = behind / kWarp, thread = threads + behind % kWarp;
        meeting = static_cast<int>(blockDim.x) > threads * count ? threads + kWarp : threads;
    }

    // The whole block as one group.
    RTK_DEVICE static RowGroup block() {
        RowGroup all;
        all.threads = all.meeting = static_cast<int>(blockDim.x);
        all.count = 1, all.index = 0, all.thread = static_cast<int>(threadIdx.x);
        return all;
    }

    // Groups of 1 << lane_bits lanes, up to a warp; with 31 bits the whole block. Without divisions.
    RTK_DEVICE static RowGroup of_lanes(i64 lane_bits) {
        const int bits = static_cast<int>(lane_bits);
        RowGroup own = block();
        if (bits == 31) return own;
        own.threads = own.meeting = 1 << bits;
        own.count = static_cast<int>(blockDim.x) >> bits;
        own.index = static_cast<int>(threadIdx.x) >> bits;
        own.thread = static_cast<int>(threadIdx.x) & (own.threads - 1);
        return own;
    }

    RTK_DEVICE bool helps() const { return thread >= threads; }

  private:
    RowGroup() = default;

    // Integer division would be a third of the instructions before the first load. The dividend is half a thread away
    // from any whole quotient, so the error of the reciprocal (2^-23 relative) cannot reach the next one for blocks of
    // up to 1024.
    RTK_DEVICE static int quotient(u32 number, float inverse) {
        return static_cast<int>((static_cast<float>(number) + 0.5f) * inverse);
    }
};

// Shared memory of the group reductions, two halves so that one barrier per reduction is enough.
template <int kValues>
struct GroupScratch {
    float slot[2][kWarp][kValues];
};

// kManyGroups: several groups of whole warps share the block; without it, a group wider than a warp is the whole block,
// and the kernel reserves one barrier instead of 16.
template <bool kManyGroups>
RTK_DEVICE void group_barrier(const RowGroup& group) {
    if constexpr (kManyGroups) {
        ptx::named_barrier_sync(group.index + 1, group.meeting);
    } else {
        __syncthreads();
    }
}

// Reduces a number over each group; every thread of the group gets the result. `phase` alternates between 0 and 1 from
// call to call on the same scratch.
template <typename Op, bool kManyGroups>
RTK_DEVICE float group_reduce(float v, const RowGroup& group, GroupScratch<1>& scratch, int phase) {
    if (group.threads <= kWarp) return warp_reduce<Op>(v, group.threads);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = group.threads / kWarp;
    v = warp_reduce<Op>(v);
    if (lane == 0) scratch.slot[phase][threadIdx.x / kWarp][0] = v;
    group_barrier<kManyGroups>(group);
    return warp_reduce<Op>(lane < warps ? scratch.slot[phase][group.index * warps + lane][0] : Op::kIdentity);
}

// The same over a block of whole warps, more than one, that performs no other reduction.
template <typename Op>
RTK_DEVICE float block_reduce(float v, GroupScratch<1>& scratch) {
    const u32 lane = threadIdx.x % kWarp;
    v = warp_reduce<Op>(v);
    if (lane == 0) scratch.slot[0][threadIdx.x / kWarp][0] = v;
    __syncthreads();
    return warp_reduce<Op>(lane < blockDim.x / kWarp ? scratch.slot[0][lane][0] : Op::kIdentity);
}

// The same for two numbers at half the cost of two reductions: after the first exchange even lanes carry `a` and odd
// lanes `b`. Groups of at most 16 warps.
template <typename Op, bool kManyGroups>
RTK_DEVICE void group_reduce_pair(float& a, float& b, const RowGroup& group, GroupScratch<2>& scratch, int phase) {
    if (group.threads <= kWarp) {
        a = warp_reduce<Op>(a, group.threads);
        b = warp_reduce<Op>(b, group.threads);
        return;
    }
    constexpr u32 kAll = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = group.threads / kWarp;
    const bool odd = lane & 1;
    float mine = Op::apply(odd ? b : a, __shfl_xor_sync(kAll, odd ? a : b, 1));
#pragma unroll
    for (int offset = 2; offset < kWarp; offset *= 2) mine = Op::apply(mine, __shfl_xor_sync(kAll, mine, offset));
    if (lane < 2) scratch.slot[phase][threadIdx.x / kWarp][lane] = mine;
    group_barrier<kManyGroups>(group);
    const float* slots = &scratch.slot[phase][group.index * warps][0];
    mine = lane < 2 * warps ? slots[lane] : Op::kIdentity;
#pragma unroll
    for (int offset = 2; offset < kWarp; offset *= 2) mine = Op::apply(mine, __shfl_xor_sync(kAll, mine, offset));
    const float other = __shfl_xor_sync(kAll, mine, 1);
    a = odd ? other : mine;
    b = odd ? mine : other;
}

}  // namespace rtk
