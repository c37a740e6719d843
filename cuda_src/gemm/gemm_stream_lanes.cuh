// Weights and products of a warp in decoding steps (gemm_stream.cu).
//
// An octet is eight weight rows (gated: four of the gate and their counterparts), a step 64 bytes of each. Lane 4g + t of
// a step has the 16 bytes t of row g. It copies them into its warp's ring in shared memory and is the only one to read
// them again, so that a warp waits for nobody. A slot of the ring has up to `slot_steps` steps, followed by the scales
// [row][group of 128 of k], if they vary along k. e2m1 codes have a ue4m3 scale for 16 of them, [row][8 of a step], which
// multiplies codes, not sums: the products are exact in fp16.
//
// The four words of a lane's eight 16-bit weights are the operand A of m16n8k16 as they are: row g of the product is
// weight row g over one half of k, row g + 8 the same weight row over the other half. Columns of B are pairs as well:
// column 2i has token i over the first half, column 2i + 1 over the second one. The sum of row g and token t is then
// c[0] + c[3] of lane 4g + t; the other two mix halves and are ignored. Codes become fp16, whatever the activations are.
#pragma once
#include "common/vec.cuh"
#include "gemm/gemm_decode_stage.cuh"
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kStreamRing = 4;  // slots of a warp
inline constexpr int kSlotGroups = 4;  // groups of 128 of k in a slot, at the most

template <typename Codes, typename Math>
struct StreamOperand {  // what the tensor cores multiply: codes are fp16
    using Type = fp16;
};
template <typename Math>
struct StreamOperand<Math, Math> {
    using Type = Math;
};

template <int N>
struct Size {
    static constexpr int value = N;
};

// QUADS: of tokens.
template <typename Codes, typename Math, int QUADS>
struct StreamLanes {
    using Operand = typename StreamOperand<Codes, Math>::Type;
    using Weights = WeightCodes<Codes, Operand>;
    static constexpr bool kCodes = Weights::kBits < 16;
    static constexpr int kParts = 16 / Weights::kBits;  // of eight weights, that a lane has of a step
    static constexpr int kDepth = 32 * kParts;          // of k, in a step
    static constexpr int kGroupSteps = 128 / kDepth;    // that share a scale along k
    static constexpr bool kFine = Weights::kScaled;     // scales multiply codes, not sums
    static constexpr int kScaleBytes = kFine ? 256 : 32 * kSlotGroups;  // of a slot
    static constexpr int kChains = kCodes ? 2 : QUADS == 1 ? 3 : 2;  // of products that depend on each other
    using Sums = float[kChains][QUADS][4];

    Sums part;  // 16-bit weights, e2m1: of all steps
    float total[QUADS];
    u32 flags;

    RTK_DEVICE static void clear(Sums& sums) {
#pragma unroll
        for (int c = 0; c < kChains; ++c)
#pragma unroll
            for (int q = 0; q < QUADS; ++q)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[c][q][i] = 0.0f;
    }

    RTK_DEVICE void clear() {
        flags = 0u;
        clear(part);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) total[q] = 0.0f;
    }

    RTK_DEVICE void add(const Sums& sums, float scale) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < kChains; ++c) sum += sums[c][q][0] + sums[c][q][3];
            total[q] = fmaf(sum, scale, total[q]);
        }
    }

    // Products of COUNT steps. `weights`: this lane's vector of the first one; x[q] + x_at: its activations of quad q;
    // `scale`: of the first group of codes, null for 1; `fine`: of this lane's first 32 e2m1 codes.
    template <int COUNT>
    RTK_DEVICE void steps(const CodeOptions& options, ptx::SharedAddress weights, const ptx::SharedAddress (&x)[QUADS], int x_at,
                          const float* scale, const u8* fine) {
        constexpr int kGroups = (COUNT + kGroupSteps - 1) / kGroupSteps;
        Raw<16> raw[COUNT];
#pragma unroll
        for (int s = 0; s < COUNT; ++s) raw[s] = ptx::ld_shared_16(weights + 512 * s);
        if constexpr (!kCodes) {
#pragma unroll
            for (int s = 0; s < COUNT; ++s)
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    const Raw<8> b = ptx::ld_shared_8(x[q] + (x_at + s * (2 * kDepth)));
                    mma_pair<Operand>(part[s % kChains][q], raw[s].w, {b.w[0], b.w[1]});
                }
        } else if constexpr (kFine) {
#pragma unroll
            for (int s = 0; s < COUNT; ++s) {
                const u32 both = *reinterpret_cast<const u16*>(fine + 8 * s);
                const u32 scales[2] = {skinny_scale_pair<Operand>(both & 255u), skinny_scale_pair<Operand>(both >> 8)};
                u32 pair[kParts][4];
#pragma unroll
                for (int j = 0; j < kParts; ++j) Weights::pairs(Raw<4>{{raw[s].w[j]}}, scales[j / 2], options, pair[j]);
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
#pragma unroll
                    for (int j = 0; j < kParts; j += 2) {
                        const Raw<16> b = ptx::ld_shared_16(x[q] + (x_at + s * (2 * kDepth) + j * 64));
                        mma_pair<Operand>(part[0][q], pair[j], {b.w[0], b.w[1]});
                        mma_pair<Operand>(part[1][q], pair[j + 1], {b.w[2], b.w[3]});
                    }
            }
        } else {
            Sums sums[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) clear(sums[i]);
#pragma unroll
            for (int s = 0; s < COUNT; ++s) {
                u32 pair[kParts][4];
#pragma unroll
                for (int j = 0; j < kParts; ++j) {
                    if constexpr (kParts == 2) {
                        const Raw<8> codes = {{raw[s].w[2 * j], raw[s].w[2 * j + 1]}};
                        if constexpr (Weights::kFlagged) flags = Weights::flag(flags, codes);
                        Weights::pairs(codes, 0u, options, pair[j]);
                    } else {
                        Weights::pairs(Raw<4>{{raw[s].w[j]}}, 0u, options, pair[j]);
                    }
                }
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
#pragma unroll
                    for (int j = 0; j < kParts; j += 2) {
                        const Raw<16> b = ptx::ld_shared_16(x[q] + (x_at + s * (2 * kDepth) + j * 64));
                        mma_pair<Operand>(sums[s / kGroupSteps][0][q], pair[j], {b.w[0], b.w[1]});
                        mma_pair<Operand>(sums[s / kGroupSteps][1][q], pair[j + 1], {b.w[2], b.w[3]});
                    }
            }
#pragma unroll
            for (int i = 0; i < kGroups; ++i) add(sums[i], scale != nullptr ? scale[i] : 1.0f);
        }
    }

    RTK_DEVICE void finish() {
        if constexpr (!kCodes || kFine) add(part, 1.0f);
    }

    // NaN for rows with a NaN weight that the conversion does not preserve.
    RTK_DEVICE void settle_flags(int g) {
        if constexpr (Weights::kFlagged) {
            const u32 lanes = __ballot_sync(0xffffffffu, (flags & 0x80808080u) != 0u);
            if ((lanes >> (4 * g) & 15u) != 0u) {
#pragma unroll
                for (int q = 0; q < QUADS; ++q) total[q] = __uint_as_float(0x7fffffffu);
            }
        }
    }
};

// The ring of a warp.
template <typename Lanes>
struct StreamSlots {
    ptx::SharedAddress own;      // of this lane, in slot 0
    u8* scales;                  // of slot 0
    int slot_steps, slot_bytes;  // of a slot
    bool scaled;
    static constexpr int kMany = Lanes::kParts == 4 ? 2 : 6;  // steps at a time

    RTK_DEVICE static int bytes_of(int steps, bool scaled) { return 512 * steps + (scaled ? Lanes::kScaleBytes : 0); }

    // Issues the loads of `count` steps from `first` on; zeros behind the end of rows.
    RTK_DEVICE void fetch(const DecodeWeights& from, int slot, int lane, int octet, int first, int count) const {
        const int at = first * 64 + lane % 4 * 16;
        const u8* source = from.data + from.row(octet, lane / 4) * from.pitch + at;
        const int limit = static_cast<int>(from.row_bytes) - at;
        ptx::SharedAddress to = own + slot * slot_bytes;
#pragma unroll 2
        for (int s = 0; s < count; ++s, to += 512, source += 64) ptx::cp_async_16_stream(to, source, 64 * s < limit ? 16 : 0);
        if constexpr (Lanes::kFine) {  // eight bytes a step
            const u8* const scale = reinterpret_cast<const u8*>(from.scale) + from.row(octet, lane / 4) * from.scale_row;
            const u8* const own_scales = scale + (first + lane % 4) * 8;
            if (lane % 4 < count) ptx::cp_async_8_partial(ptx::shared_address(scales + slot * slot_bytes + 8 * lane), own_scales, 8);
        } else if constexpr (Lanes::kCodes) {
            if (scaled) {
                const float* const scale = from.scale + (from.row(octet, lane / 4) >> from.scale_shift) * from.scale_row;
                ptx::cp_async_4_partial(ptx::shared_address(scales + (slot * slot_bytes + 4 * (lane / 4 * kSlotGroups + lane % 4))),
                                        scale + min(first / Lanes::kGroupSteps + lane % 4, from.groups - 1) * from.scale_group, 4);
            }
        }
    }

    // Adds the products of `count` steps; x[q]: this lane's part of a token's row, `x_at` bytes before the first step.
    template <int QUADS>
    RTK_DEVICE void multiply(Lanes& sums, const CodeOptions& options, int slot, int count, const ptx::SharedAddress (&x)[QUADS],
                             int x_at) const {
        const ptx::SharedAddress weights = own + slot * slot_bytes;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const float* const scale = reinterpret_cast<const float*>(scales + slot * slot_bytes) + lane / 4 * kSlotGroups;
        const u8* const fine = scales + slot * slot_bytes + lane / 4 * 32 + lane % 4 * 2;
        int s = 0;
        auto next = [&](auto size) {
            constexpr int kCount = decltype(size)::value;
#pragma unroll 1
            for (; s + kCount <= count; s += kCount)
                sums.template steps<kCount>(options, weights + 512 * s, x, x_at + s * (2 * Lanes::kDepth),
                                            scaled ? scale + s / Lanes::kGroupSteps : nullptr, fine + 8 * s);
        };
        next(Size<kMany>{});
        if constexpr (kMany > 2) next(Size<2>{});
        next(Size<1>{});
    }
};

}  // namespace rtk
