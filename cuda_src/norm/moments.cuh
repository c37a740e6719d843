// Mean and squared differences of a row that the warps of a RowGroup share, with one barrier: every warp uses
// differences from the mean of its own columns, then these are merged. No sums of squares cancel, so a mean far from
// zero costs no precision. Squares that overflow may give NaN, which finite_rstd turns into 0.
#pragma once
#include "common/reduce.cuh"
#include "norm/common.cuh"

namespace rtk {

// 1/sqrt(variance) of a row with this mean; 0 if squares overflowed though all numbers are finite.
RTK_DEVICE float finite_rstd(float variance, float mean) { return variance == variance ? rsqrtf(variance) : mean * 0.0f; }

// Number of columns of a row, and of a warp of its group. Threads own CHUNKS vectors of VEC columns, strided by the
// number of threads.
template <int VEC, int CHUNKS>
struct WarpColumns {
    int threads, warp, cols;

    RTK_DEVICE WarpColumns(const RowGroup& group, i64 cols_)
        : threads(group.threads), warp(group.thread / kWarp), cols(static_cast<int>(cols_)) {}

    RTK_DEVICE float all() const { return static_cast<float>(cols); }
    RTK_DEVICE float of(int w) const {
        int count = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            count += min(max(cols - (c * threads + w * kWarp) * VEC, 0), kWarp * VEC);
        return static_cast<float>(count);
    }
    RTK_DEVICE float own() const { return threads <= kWarp ? all() : of(warp); }
};

// `v` of a warp becomes that of its group: mean, sum of (h - mean)^2 and, of four values, sum of g, sum of g * (h - mean).
// Groups of at most 16 warps; `phase` alternates between 0 and 1 from call to call on the same scratch.
//
// All warps' means are taken as differences from that of the first, so the final subtraction cancels at most a factor
// of the number of warps.
template <bool kManyGroups, int VALUES, int VEC, int CHUNKS>
RTK_DEVICE void merge_warps(float (&v)[VALUES], const WarpColumns<VEC, CHUNKS>& columns, const RowGroup& group,
                            GroupScratch<VALUES>& scratch, int phase) {
    static_assert(VALUES == 2 || VALUES == 4);
    if (group.threads <= kWarp) return;
    constexpr u32 kAll = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = group.threads / kWarp;
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) scratch.slot[phase][threadIdx.x / kWarp][i] = v[i];
    }
    group_barrier<kManyGroups>(group);
    const auto* slots = &scratch.slot[phase][group.index * warps];
    const float centre = slots[0][0];
    float part[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) part[i] = 0.0f;
    const int from = lane % 16;
    if (from < warps) {
        const float away = slots[from][0] - centre, moved = columns.of(from) * away;
        part[0] = moved;
        part[1] = slots[from][1] + moved * away;
        if constexpr (VALUES == 4) {
            part[2] = slots[from][2];
            part[3] = slots[from][3] + part[2] * away;
        }
    }
    const float mine = scattered<VALUES, 16>(part, lane, [](float a, float b) { return a + b; });
    const float moved = __shfl_sync(kAll, mine, 0);
    const float away = mean_of(moved, columns.all());
    v[0] = centre + away;
    v[1] = __shfl_sync(kAll, mine, 1) - away * moved;
    if constexpr (VALUES == 4) {
        v[2] = __shfl_sync(kAll, mine, 2);
        v[3] = __shfl_sync(kAll, mine, 3) - away * v[2];
    }
}

// The same for four values in one pass, for groups of whole warps: `v` are sums over a warp's columns of h - shift, of
// (h - shift)^2, g and g * (h - shift), where `shift` is the mean of VEC of these columns. These squares exceed those
// of differences from the mean by at most the number of VEC-column vectors of the warp, which bounds the cancellation.
// Every warp has stored its number of columns (count_columns) before the group's first barrier.
struct ShiftedSums {
    float sums[4], shift, columns, per_column, unused;
};
struct ShiftedScratch {
    ShiftedSums of[2][kWarp];
};

template <int VEC, int CHUNKS>
RTK_DEVICE void count_columns(const WarpColumns<VEC, CHUNKS>& columns, ShiftedScratch& scratch) {
    const u32 phase = threadIdx.x % kWarp;
    if (phase >= 2) return;
    ShiftedSums& own = scratch.of[phase][threadIdx.x / kWarp];
    own.columns = columns.own();
    own.per_column = own.columns > 0.0f ? reciprocal(own.columns) : 0.0f;
    own.unused = 0.0f;  // it is read with the others
}

RTK_DEVICE void merge_shifted(float (&v)[4], float shift, float per_column, const RowGroup& group, ShiftedScratch& scratch,
                              int phase) {
    constexpr u32 kAll = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = group.threads / kWarp;
    const auto add = [](float a, float b) { return a + b; };
    const float sum = scattered<4, kWarp>(v, lane, add);
    ShiftedSums& own = scratch.of[phase][threadIdx.x / kWarp];
    if (lane < 4) own.sums[lane] = sum;
    if (lane == 4) own.shift = shift;
    if (warps == 1) {
        __syncwarp();  // there may be more such groups than named barriers
    } else {
        group_barrier<true>(group);
    }
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f}, mean = 0.0f, columns = 0.0f;
    const bool has_warp = lane % 16 < warps;
    if (has_warp) {
        const ShiftedSums& from = scratch.of[phase][group.index * warps + lane % 16];
        const float4 sums = *reinterpret_cast<const float4*>(from.sums);
        const float4 rest = *reinterpret_cast<const float4*>(&from.shift);
        const float off = sums.x * rest.z;
        mean = rest.x + off, columns = rest.y;
        part[1] = sums.y - sums.x * off;
        part[2] = sums.z;
        part[3] = sums.w - sums.z * off;
    }
    const float centre = __shfl_sync(kAll, mean, 0), away = has_warp ? mean - centre : 0.0f;
    part[0] = columns * away;
    part[1] += part[0] * away;
    part[3] += part[2] * away;
    const float mine = scattered<4, 16>(part, lane, add);
    const float moved = __shfl_sync(kAll, mine, 0), more = moved * per_column;
    v[0] = centre + more;
    v[1] = __shfl_sync(kAll, mine, 1) - more * moved;
    v[2] = __shfl_sync(kAll, mine, 2);
    v[3] = __shfl_sync(kAll, mine, 3) - more * v[2];
}

}  // namespace rtk
