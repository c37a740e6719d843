// Operand loads of the product for decoding steps (gemm_decode.cu).
//
// An octet is eight weight rows (gated: four of the gate and their counterparts), a step 64 bytes of each. A warp loads
// up to kDecodeMaxSteps steps of an octet at a time into a slot of its own ring, so that no warp waits for another one's
// weights, and neighbouring warps load neighbouring stretches of the same rows. A slot has the even rows, then the odd
// ones, 64 bytes later than they would be: the two rows that eight lanes read together are in different banks. The
// weights are followed by their scales [group of 128 of k][row], if they vary along k.
//
// TMA copies the rows of a slot, one by each of eight lanes, and arrives at its barrier; cp.async does so on older
// targets and where rows end inside of a step, which it fills up with zeros.
//
// Lane 4g + t of a step has the 16 bytes t of row g: eight weights (16 bits), or 2 or 4 times eight. The activations of
// a step are stored in the order in which lanes read them, eight at a time: part j of all four lanes, then part j + 1.
#pragma once
#include "common/vec.cuh"
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"

namespace rtk {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeMaxSteps = 8;  // of a slot
inline constexpr int kDecodeMaxRing = 8;   // slots of a warp

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

// The slots of a warp. Slots of a ring are filled and read by turns, all of them first.
struct DecodeRing {
    ptx::SharedAddress slots, barriers;
    int steps, count;  // of a slot; slots
    bool bulk, scaled;
    int slot = 0;
    u32 phase = 0;

    RTK_DEVICE int scales() const { return 512 * steps + 64; }  // offset in a slot
    RTK_DEVICE static int slot_bytes(int steps, int scales) { return 512 * steps + 64 + 4 * scales; }
    RTK_DEVICE int row(int r) const { return (r >> 1) * (64 * steps) + (r & 1) * (256 * steps + 64); }

    RTK_DEVICE void open(int lane) const {
#if RTK_HAS_TMA
        if (bulk) {
            if (lane < count) {
                ptx::mbarrier_init(barriers + 8 * lane, scaled ? 33 : 1);
                ptx::mbarrier_fence_init();
            }
            __syncwarp();
        }
#endif
    }

    // Issues the loads of `some` steps from `first` on into slot `s`; `group` is that of the first one's k.
    RTK_DEVICE void fetch(const DecodeWeights& from, int s, int bytes, int lane, int octet, int first, int some, int group, int group_count) const {
        const ptx::SharedAddress to = slots + s * bytes;
        const i64 begin = static_cast<i64>(first) * 64;
#if RTK_HAS_TMA
        if (bulk) {
            if (lane == 0) ptx::mbarrier_arrive_expect(barriers + 8 * s, 512 * some);
            __syncwarp();
            if (lane < 8) ptx::bulk_load(to + row(lane), from.data + from.row(octet, lane) * from.pitch + begin, 64 * some, barriers + 8 * s);
        } else
#endif
        {
            const i64 offset = begin + lane * 16;
            if (lane < 4 * some) {
#pragma unroll
                for (int r = 0; r < 8; ++r)
                    ptx::cp_async_16_stream(to + (row(r) + lane * 16), from.data + from.row(octet, r) * from.pitch + offset,
                                            offset < from.row_bytes ? 16 : 0);
            }
        }
        if (scaled) {
#pragma unroll 1
            for (int at = lane; at < 8 * group_count; at += 32) {
                const float* scale = from.scale + (from.row(octet, at % 8) >> from.scale_shift) * from.scale_row +
                                     min(group + at / 8, from.groups - 1) * from.scale_group;
                ptx::cp_async_4_partial(to + (scales() + at * 4), scale, 4);
            }
#if RTK_HAS_TMA
            if (bulk) ptx::cp_async_arrive(barriers + 8 * s);
#endif
        }
        if (!bulk) ptx::cp_async_commit();
    }

    // Waits for the oldest slot. Each one has had a fetch, or none if nothing was left.
    RTK_DEVICE void wait() const {
#if RTK_HAS_TMA
        if (bulk) {
            ptx::mbarrier_wait(barriers + 8 * slot, phase);
            return;
        }
#endif
        switch (count) {  // all but the newest count - 1
            case 1: ptx::cp_async_wait<0>(); break;
            case 2: ptx::cp_async_wait<1>(); break;
            case 3: ptx::cp_async_wait<2>(); break;
            case 4: ptx::cp_async_wait<3>(); break;
            case 5: ptx::cp_async_wait<4>(); break;
            case 6: ptx::cp_async_wait<5>(); break;
            case 7: ptx::cp_async_wait<6>(); break;
            default: ptx::cp_async_wait<7>(); break;
        }
        __syncwarp();
    }

    RTK_DEVICE void next() {
        if (++slot == count) slot = 0, phase ^= 1;
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
