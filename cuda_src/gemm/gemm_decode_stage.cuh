// Operand loads of the product for decoding steps (gemm_decode.cu).
//
// An octet is eight weight rows (gated: four of the gate and their counterparts), a step 64 bytes of each. A warp loads
// up to kDecodeSteps steps of an octet at a time into a slot of its own ring, so that no warp waits for another one's
// weights, and neighbouring warps load neighbouring stretches of the same rows. Vector v of row r of a slot is at v ^ 4
// (r & 1): the two rows that eight lanes read together are in different banks. The weights of a slot are followed by
// its scales [group of 128 of k][row], if they vary along k.
//
// Lane 4g + t of a step has the 16 bytes t of row g: eight weights (16 bits), or 2 or 4 times eight. The activations of
// a step are stored in the order in which lanes read them, eight at a time: part j of all four lanes, then part j + 1.
#pragma once
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeRing = 3;   // slots of a warp
inline constexpr int kDecodeSteps = 8;  // of a slot; even. Shorter stretches of rows take up to twice as long (H200)
inline constexpr int kDecodeRowBytes = 64 * kDecodeSteps;
inline constexpr int kDecodeSlotBytes = 8 * kDecodeRowBytes;
inline constexpr int kDecodeScales = 64;  // of a slot

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

    // Issues the loads of `steps` steps from `first` on; `first_group` is the group of the first one's k.
    RTK_DEVICE void fetch(ptx::SharedAddress to, int lane, int octet, int first, int steps, int first_group) const {
        constexpr int kVectors = 4 * kDecodeSteps;
        const i64 begin = static_cast<i64>(first) * 64;
#pragma unroll
        for (int i = 0; i < kVectors / 4; ++i) {
            const int at = lane + 32 * i, r = at / kVectors, v = at % kVectors;
            if (v < 4 * steps) {
                const i64 offset = begin + v * 16;
                ptx::cp_async_16_stream(to + (r * kDecodeRowBytes + (v ^ (r & 1) * 4) * 16), data + row(octet, r) * pitch + offset,
                                        offset < row_bytes ? 16 : 0);
            }
        }
        if (scale != nullptr) {
#pragma unroll
            for (int i = 0; i < kDecodeScales / 32; ++i) {
                const int at = lane + 32 * i, group = min(first_group + at / 8, groups - 1);
                const float* from = scale + (row(octet, at % 8) >> scale_shift) * scale_row + group * scale_group;
                ptx::cp_async_4_partial(to + (kDecodeSlotBytes + at * 4), from, 4);
            }
        }
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

}  // namespace rtk
