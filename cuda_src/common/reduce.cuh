// Reductions in a fixed order, so that equal inputs give equal bits.
#pragma once
#include "common/abi.cuh"
#include "ptx/barrier.cuh"

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

// The threads of a block cut into groups of equal size that each work on one row at a time. A group is a power of
// two of at most 32 lanes, or whole warps; with whole warps a block holds at most 15 groups (one named barrier each).
struct RowGroup {
    int threads;  // in the group
    int count;    // groups in the block
    int index;    // of this thread's group
    int thread;   // of this thread in its group

    RTK_DEVICE explicit RowGroup(i64 threads_per_row)
        : threads(static_cast<int>(threads_per_row)),
          count(static_cast<int>(blockDim.x) / threads),
          index(static_cast<int>(threadIdx.x) / threads),
          thread(static_cast<int>(threadIdx.x) % threads) {}
};

// Shared memory of group_reduce, two halves so that one barrier per reduction is enough.
template <int kValues>
struct GroupScratch {
    float slot[2][kWarp][kValues];
};

// Reduces kValues numbers at once over each group; every thread of the group gets the results. `phase` alternates
// between 0 and 1 from call to call on the same scratch. kManyGroups: several groups of whole warps share the block;
// without it, groups wider than a warp are the whole block, and the kernel reserves one barrier instead of 16.
template <typename Op, bool kManyGroups, int kValues>
RTK_DEVICE void group_reduce(float (&v)[kValues], const RowGroup& group, GroupScratch<kValues>& scratch, int phase) {
    if (group.threads <= kWarp) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = warp_reduce<Op>(v[i], group.threads);
        return;
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = group.threads / kWarp;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = warp_reduce<Op>(v[i]);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) scratch.slot[phase][threadIdx.x / kWarp][i] = v[i];
    }
    if constexpr (kManyGroups) {
        ptx::named_barrier_sync(group.index + 1, group.threads);
    } else {
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const float other = lane < warps ? scratch.slot[phase][group.index * warps + lane][i] : Op::kIdentity;
        v[i] = warp_reduce<Op>(other);
    }
}

}  // namespace rtk
