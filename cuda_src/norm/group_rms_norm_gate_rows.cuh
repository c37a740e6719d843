// Rows of the backward of the gated normalisation: how threads share them, and their sums.
#pragma once
#include "common/reduce.cuh"
#include "norm/group_rms_norm_gate.cuh"
#include "ptx/integer.cuh"

namespace rtk {

// How the threads of a row lie in warps.
enum RowForm {
    kLanes,   // a power of two of at most 32 lanes
    kPieces,  // a multiple of four lanes, some of which share their warp with other rows
    kWarps,   // whole warps
    kTwoWarps,
    kFourWarps,
    kTwoWarpsEven,  // all with a piece of the row; see the kernel
    kFourWarpsEven,
};

RTK_DEVICE constexpr bool has_two_warps(int form) { return form == kTwoWarps || form == kTwoWarpsEven; }

// The RowGroup of this thread, with the number of threads known to the compiler where the form says it.
template <int FORM>
RTK_DEVICE RowGroup row_group(i64 threads_per_row) {
    constexpr int kThreads = has_two_warps(FORM) ? 2 * kWarp : 4 * kWarp;
    RowGroup group(threads_per_row);
    if constexpr (FORM >= kTwoWarps) {
        group.threads = group.meeting = kThreads;
        group.count = blockDim.x / kThreads, group.index = threadIdx.x / kThreads, group.thread = threadIdx.x % kThreads;
    }
    return group;
}

// How many rows a thread has in registers, the one it works on included: three where some of 512 threads are idle or a row
// has more than four warps (8192x5120, 4 groups: 107.6 instead of 110.0 us; 8192x8192: 167.1, 169.7), else two (8192x4096:
// 87.4, 88.7).
RTK_DEVICE constexpr int rows_in_registers(int form) { return form == kPieces || form == kWarps ? 3 : 2; }

// Two arguments in one.
RTK_DEVICE u32 lower(i64 pair) { return static_cast<u32>(pair); }
RTK_DEVICE u32 upper(i64 pair) { return static_cast<u32>(static_cast<u64>(pair) >> 32); }

// The weight of 16 bytes of channels, of T or, `wide`, of fp32: asked for early, unpacked where it is needed.
template <typename T>
struct AskedWeight {
    static constexpr int VEC = 16 / sizeof(T);
    WideRaw<float, VEC> raw;  // or VEC of T in its first part

    // Ones unless it `exists`. One address for both types: loads of either kind into the same registers would wait for
    // each other.
    RTK_DEVICE void ask(const void* weight, bool wide, u32 channel, bool exists) {
        constexpr u32 kOnes = sizeof(T) == 4 ? 0x3f800000u : is_same<T, bf16>::value ? 0x3f803f80u : 0x3c003c00u;
#pragma unroll
        for (auto& part : raw.part) {
#pragma unroll
            for (u32& word : part.w) word = kOnes;
        }
        if (!exists) return;
        const u8* const from = reinterpret_cast<const u8*>(
            ptx::mad_wide(channel, wide ? sizeof(float) : sizeof(T), reinterpret_cast<u64>(weight)));
        raw.part[0] = ptx::ld_keep<16>(from);
        if (sizeof(T) < sizeof(float) && wide) raw.part[raw.kParts - 1] = ptx::ld_keep<16>(from + 16);
    }

    RTK_DEVICE void get(bool wide, float (&weights)[VEC]) const {
        if (wide) {
            unpack_wide<float, VEC>(raw, weights);
        } else {
            unpack<T, VEC>(raw.part[0], weights);
        }
    }
};

// Sums of two numbers over the row of a thread, which has them all in the end. Blocks of at most 512 threads.
template <int FORM>
struct PairSums {
    static constexpr int kSlots = FORM == kPieces ? 128 : 16;
    float slot[3][kSlots][2];  // used by turns, so that one barrier for each pair is enough

    // `phase` changes from call to call.
    RTK_DEVICE void sum(float& a, float& b, const RowGroup& group, int phase) {
        constexpr u32 kAll = 0xffffffffu;
        if constexpr (FORM == kLanes) {
            if (group.threads == 1) return;
        }
        // Lanes that exchange.
        const int span = FORM == kLanes ? group.threads : FORM >= kWarps ? kWarp : group.threads % 8 == 0 ? 8 : 4;
        const bool odd = threadIdx.x & 1;  // even lanes carry a, odd ones b
        float mine = (odd ? b : a) + __shfl_xor_sync(kAll, odd ? a : b, 1);
#pragma unroll
        for (int offset = 2; offset < (FORM == kPieces ? 8 : kWarp); offset *= 2)
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
            if constexpr (!has_two_warps(FORM)) {
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
    // Rows that share warps meet at one barrier.
    RTK_DEVICE static void meet(const RowGroup& group) {
        int shift = 0;  // of the number of them
        if constexpr (FORM == kPieces)
            for (int lanes = group.threads; lanes % kWarp != 0; lanes *= 2) ++shift;
        ptx::named_barrier_sync((group.index >> shift) + 1, group.threads << shift);
    }
};

// gate_at for the products that gradients need, two instructions shorter: where `open` is flushed to zero, from -87.3 on,
// `closed` may be anything finite.
template <typename T>
RTK_DEVICE Gate gate_of(float x) {
    if constexpr (sizeof(T) != 2) return gate_at<T>(x);
    const float e = ptx::ex2(-ptx::max_nan(x * 1.4426950408889634f, -127.0f));
    const float open = ptx::rcp(1.0f + e);
    return {open, e * open};
}

}  // namespace rtk
