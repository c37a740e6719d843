// Rows of the backward of the gated normalisation: how threads share them, and their sums.
#pragma once
#include "common/block_sums.cuh"
#include "common/reduce.cuh"
#include "norm/group_rms_norm_gate.cuh"

namespace rtk {

// How the threads of a row are arranged in warps.
enum RowForm {
    kLanes,   // a power of two of at most 32 lanes
    kQuads,  // a multiple of four lanes, some of which share their warp with other rows
    kWarps,   // whole warps
    kTwoWarps,
    kFourWarps,
};

// The RowGroup of this thread; its number of threads is a compile-time constant where the form determines it.
template <int FORM>
RTK_DEVICE RowGroup row_group(i64 threads_per_row) {
    constexpr int kThreads = FORM == kTwoWarps ? 2 * kWarp : 4 * kWarp;
    RowGroup group(threads_per_row);
    if constexpr (FORM >= kTwoWarps) {
        group.threads = group.meeting = kThreads;
        group.count = blockDim.x / kThreads, group.index = threadIdx.x / kThreads, group.thread = threadIdx.x % kThreads;
    }
    return group;
}

// How many rows a thread keeps in registers, including the current one: three where some of 512 threads are idle or a
// row has more than four warps, else two (docs/decisions/norm.md, rows in registers); three of the 384 threads of other gates.
RTK_DEVICE constexpr int rows_in_registers(int form, bool sigmoid) {
    return form == kQuads || form == kWarps || !sigmoid ? 3 : 2;
}

// Sums two numbers over a row; all of its threads get both. Blocks of at most 512 threads.
template <int FORM>
struct PairSums {
    static constexpr int kSlots = FORM == kQuads ? 128 : 16;
    float slot[3][kSlots][2];  // used alternately, so that one barrier for each pair is enough

    // `phase` changes from call to call.
    RTK_DEVICE void sum(float& a, float& b, const RowGroup& group, int phase) {
        constexpr u32 kAll = 0xffffffffu;
        if constexpr (FORM == kLanes) {
            if (group.threads == 1) return;
        }
        // Lanes that take part in the exchange.
        const int span = FORM == kLanes ? group.threads : FORM >= kWarps ? kWarp : group.threads % 8 == 0 ? 8 : 4;
        const bool odd = threadIdx.x & 1;  // even lanes carry a, odd ones b
        float mine = (odd ? b : a) + __shfl_xor_sync(kAll, odd ? a : b, 1);
#pragma unroll
        for (int offset = 2; offset < (FORM == kQuads ? 8 : kWarp); offset *= 2)
            if (offset < span) mine += __shfl_xor_sync(kAll, mine, offset);
        if constexpr (FORM == kLanes) {
            const float other = __shfl_xor_sync(kAll, mine, 1);
            a = odd ? other : mine;
            b = odd ? mine : other;
            return;
        }
        const int shift = FORM >= kWarps ? 5 : span == 8 ? 3 : 2, spans = group.threads >> shift;
        const int lane = static_cast<int>(threadIdx.x) & (span - 1);
        if (lane < 2) slot[phase][threadIdx.x >> shift][lane] = mine;
        meet(group);
        const float* const slots = &slot[phase][group.index * spans][0];
        if constexpr (FORM >= kTwoWarps) {
            float4 sums = *reinterpret_cast<const float4*>(slots);
            if constexpr (FORM == kFourWarps) {
                const float4 more = *reinterpret_cast<const float4*>(slots + 4);
                sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
            }
            a = sums.x + sums.z;
            b = sums.y + sums.w;
            return;
        }
        a = b = 0.0f;
#pragma unroll 4
        for (int i = 0; i < spans; ++i) {
            const float2 sums = *reinterpret_cast<const float2*>(slots + 2 * i);
            a += sums.x, b += sums.y;
        }
    }

  private:
    // Rows that share warps use one barrier.
    RTK_DEVICE static void meet(const RowGroup& group) {
        int shift = 0;  // of the number of them
        if constexpr (FORM == kQuads)
            for (int lanes = group.threads; lanes % kWarp != 0; lanes *= 2) ++shift;
        ptx::named_barrier_sync((group.index >> shift) + 1, group.threads << shift);
    }
};

// Destination of the weight gradients of a RowGroup.
struct GradientPlace {
    const RowGroup& group;
    u32 before, lane, g;  // RowGroups of other blocks, this one's first token, its group of channels
    int size, count;      // of a group of channels, of groups
    bool shared;          // by the groups
};

// Adds the weight gradients of the RowGroups of a block, in `sums` in shared memory, to row blockIdx.x of `partial`:
// [tokens at once, groups, cols], or [RowGroups, cols] for a shared weight. The first and the last token may lack
// groups.
template <int CHUNKS, int VEC>
RTK_DEVICE void add_row_groups(const float (&dweight)[CHUNKS][VEC], const GradientPlace& of, i64 by_groups, float* sums,
                               float* partial) {
    const RowGroup& group = of.group;
    __syncthreads();
    const u32 base = divided(of.before, by_groups);
    const int terms = of.shared ? group.count : divided(of.before + group.count - 1, by_groups) - base + 1;
    const int width = of.shared ? of.size : of.count * of.size;
    if (!of.shared && terms * of.count != group.count) {
        for (int at = static_cast<int>(threadIdx.x) * 4; at < terms * width; at += static_cast<int>(blockDim.x) * 4)
            *reinterpret_cast<float4*>(sums + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        __syncthreads();
    }
    const int own = of.shared ? group.index : (of.lane - base) * of.count + of.g;
    const int column = group.thread * VEC, pitch = group.threads * VEC;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (column + c * pitch < of.size) put_sums(sums + own * of.size + column + c * pitch, dweight[c]);
    __syncthreads();
    add_rows(sums, terms, width, width, partial + static_cast<i64>(blockIdx.x) * width);
}

// gate_at for the products that gradients need, two instructions shorter: where `open` is flushed to zero, from -87.3
// on, `closed` may be any finite number.
template <typename T>
RTK_DEVICE Gate gate_of(float x) {
    if constexpr (sizeof(T) != 2) return gate_at<T>(x);
    const float e = ptx::ex2(-ptx::max_nan(x * 1.4426950408889634f, -127.0f));
    const float open = ptx::rcp(1.0f + e);
    return {open, e * open};
}

// gate_slope with gate_of.
template <typename T>
RTK_DEVICE GateSlope slope_of(float x, i64 form) {
    return slope_at(x, gate_of<T>(x), form);
}

}  // namespace rtk
