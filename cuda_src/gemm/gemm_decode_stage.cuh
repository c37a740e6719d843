// Operand loads of the product for decoding steps (gemm_decode.cu, gemm_step_experts.cu).
//
// An octet is eight weight rows (gated: four of the gate and their counterparts), a step 64 bytes of each. A warp loads
// up to six steps of an octet at a time into registers (a slot), so that no warp waits for another one's weights, and
// neighbouring warps load neighbouring stretches of the same rows.
//
// Lane 4g + t of a step has the 16 bytes t of row g: eight weights (16 bits), or 2 or 4 times eight. The activations of
// a step are stored in the order in which lanes read them, eight at a time: part j of all four lanes, then part j + 1.
#pragma once
#include "common/vec.cuh"
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/ldst.cuh"
#include "ptx/shared.cuh"

namespace rtk {

inline constexpr int kDecodeWarps = 8;

// The weights as a warp loads them.
struct DecodeWeights {
    const u8* data;
    const float* scale;  // null unless scales vary along k
    i64 pitch, row_bytes;
    i64 scale_row, scale_group;  // elements from one scale to the next
    int scale_shift;             // 2^scale_shift rows share one
    int n, groups;
    bool gated;

    // Missing rows read the last one, and their results are dropped.
    RTK_DEVICE i64 row(int octet, int r) const {
        if (!gated) return min(8 * octet + r, n - 1);
        return static_cast<i64>(min(4 * octet + (r & 3), n - 1)) + (r & 4 ? n : 0);
    }
};

// The sums of a warp over its part of k: eight weight rows, 8 TOKENS tokens.
template <typename Codes, typename Math, int TOKENS>
struct DecodeWarp {
    using Weights = WeightCodes<Codes, Math>;
    static constexpr int kParts = 16 / Weights::kBits;  // of eight weights, that a lane has of a step
    static constexpr int kDepth = 32 * kParts;          // of k, in a step
    static constexpr int kGroupSteps = 128 / kDepth;    // that share a scale along k

    float part[2][4], total[4];  // two chains of products
    u32 flags;

    RTK_DEVICE void clear() {
        flags = 0u;
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][i] = part[1][i] = total[i] = 0.0f;
    }

    // The products of a step. `weights`: of the slot, for this lane; `low`, `high`: activations of tokens g and g + 8.
    RTK_DEVICE void step(const CodeOptions& options, const Raw<16>& raw, ptx::SharedAddress low, ptx::SharedAddress high) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
            u32 pair[4];
            if constexpr (kParts == 1) {
                Weights::pairs(raw, 0u, options, pair);
            } else if constexpr (kParts == 2) {
                const Raw<8> codes = {{raw.w[2 * j], raw.w[2 * j + 1]}};
                if constexpr (Weights::kFlagged) flags = Weights::flag(flags, codes);
                Weights::pairs(codes, 0u, options, pair);
            } else {
                Weights::pairs(Raw<4>{{raw.w[j]}}, 0u, options, pair);
            }
            const Raw<16> x = ptx::ld_shared_16(low + 64 * j);
            Raw<16> y = {};
            if constexpr (TOKENS == 2) y = ptx::ld_shared_16(high + 64 * j);
            mma_pair<Math>(part[0], {x.w[0], y.w[0], x.w[1], y.w[1]}, {pair[0], pair[1]});
            mma_pair<Math>(part[1], {x.w[2], y.w[2], x.w[3], y.w[3]}, {pair[2], pair[3]});
        }
    }

    // Adds the sums of a group, times its scale of rows 2t and 2t + 1.
    RTK_DEVICE void promote(float2 scale) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            total[i] = fmaf(part[0][i] + part[1][i], i % 2 == 0 ? scale.x : scale.y, total[i]);
            part[0][i] = part[1][i] = 0.0f;
        }
    }

    // Forgets the sums of a group.
    RTK_DEVICE void drop() {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][i] = part[1][i] = 0.0f;
    }

    // NaN for rows with a NaN weight that the conversion does not preserve.
    RTK_DEVICE void settle_flags(int t) {
        if constexpr (Weights::kFlagged) {
            const u32 lanes = __ballot_sync(0xffffffffu, (flags & 0x80808080u) != 0u);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((lanes >> (4 * (2 * t + i % 2)) & 15u) != 0u) total[i] = __uint_as_float(0x7fffffffu);
        }
    }
};

// Up to kSteps steps of an octet in registers, as a warp loads them: no shared memory, and no barrier. `scale`:
// lane l has that of row l % 8 and group l / 8, if scales vary along k.
template <typename Warp>
struct DecodeSlot {
    static constexpr int kSteps = Warp::kParts == 4 ? 4 : 6;  // at the most; more would not fit into registers
    Raw<16> raw[kSteps];
    float scale;

    // Loads `count` steps from `first` on; zeros behind them and behind the end of rows.
    RTK_DEVICE void load(const DecodeWeights& from, int lane, int octet, int first, int count) {
        const int at = first * 64 + lane % 4 * 16;
        const u8* const own = from.data + from.row(octet, lane / 4) * from.pitch + at;
        const u64 policy = ptx::l2_first();
        const int limit = min(64 * count, static_cast<int>(from.row_bytes) - at);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            clear(raw[s]);
            ptx::ld_stream_16_if(64 * s < limit, raw[s], own + 64 * s, policy);
        }
        if constexpr (Warp::kParts > 1) {
            if (from.scale != nullptr) {
                const float* const scales = from.scale + (from.row(octet, lane % 8) >> from.scale_shift) * from.scale_row;
                scale = scales[min(first / Warp::kGroupSteps + lane / 8, from.groups - 1) * from.scale_group];
            }
        }
    }

    // Adds the products of `count` steps; `low`, `high`: activations of tokens g and g + 8, from the first step on.
    RTK_DEVICE void multiply(Warp& own, const CodeOptions& options, bool scaled, int count, int t, ptx::SharedAddress low,
                             ptx::SharedAddress high) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            if (s < count) {
                own.step(options, raw[s], low + s * (2 * Warp::kDepth), high + s * (2 * Warp::kDepth));
                if constexpr (Warp::kParts > 1) {
                    if (scaled && ((s + 1) % Warp::kGroupSteps == 0 || s + 1 == count)) {
                        const int group = s / Warp::kGroupSteps;
                        own.promote(make_float2(__shfl_sync(0xffffffffu, scale, group * 8 + 2 * t),
                                                __shfl_sync(0xffffffffu, scale, group * 8 + 2 * t + 1)));
                    }
                }
            }
        }
    }
};

}  // namespace rtk
