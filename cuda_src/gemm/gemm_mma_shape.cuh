// Shapes of the mma.sync product (gemm/gemm_mma.cu): sizes of tiles, stages and units of k that follow from its template arguments,
// and the words of a warp's operands for one unit.
#pragma once
#include "gemm/gemm_mma_codes.cuh"
#include "gemm/gemm_mma_operand.cuh"

namespace rtk {

template <typename A, typename B, typename Math, bool kBlockScales, int kLayout, int kTile>
struct MmaShape {
    static constexpr int kTileM = kTile == 2 ? 64 : 128, kTileN = kTileM;
    static constexpr int kWarpM = kTile == 2 ? 32 : 64, kWarpN = kTile == 0 ? 64 : 32;
    static constexpr int kWarpsN = kTileN / kWarpN, kThreads = kTileM / kWarpM * kWarpsN * kWarp;

    static constexpr int kBitsA = CodeTraits<A>::kBits, kBitsB = CodeTraits<B>::kBits;
    static constexpr int kMinBits = kBitsA < kBitsB ? kBitsA : kBitsB, kMaxBits = kBitsA < kBitsB ? kBitsB : kBitsA;
    static constexpr int kDepth = 1024 / kMaxBits;  // k of a stage
    static constexpr bool kPromotes = kTile != 0 && !kBlockScales && kMinBits < 16;
    using OperandA = MmaOperand<kBitsA, kTileM, kDepth, kThreads, (kLayout & 1) != 0, kTile == 2>;
    using OperandB = MmaOperand<kBitsB, kTileN, kDepth, kThreads, (kLayout & 2) != 0, kTile == 2>;

    // A unit of k: 16 bytes of the narrower operand (a chunk), or 32 if it needs no conversion. It yields kWords words
    // per row, two per product.
    static constexpr int kGrowth = Math::kBits / kMinBits;
    static constexpr int kChunks = kGrowth == 1 ? 2 : 1, kWords = kGrowth * kChunks;
    static constexpr int kRawA = kBitsA / kMinBits, kRawB = kBitsB / kMinBits;  // words of a chunk as they lie in memory
    static constexpr int kUnits = kDepth * kMinBits / 128 / kChunks, kUnitDepth = kDepth / kUnits;

    static constexpr int kScaleVector = scale_vector<Math>(0);  // scales that a product takes itself
    static constexpr bool kConvertScaled = kBlockScales && kScaleVector == 0;
    // Scales of a row and stage: bytes for blocks of 16 or 32, or floats for stretches of 32 and more. Floats have a
    // ring of their own after the stages, with one more slot, because they are still read when their stage is released.
    static constexpr int kScaleBytes =
        kBlockScales ? (kDepth / 16 < 4 ? 4 : kDepth / 16) : kPromotes ? (kTile == 2 ? kDepth / 32 * 4 : 4) : 0;
    static constexpr int kScaleStage = (kTileM + kTileN) * kScaleBytes;
    static constexpr int kScaleAt = OperandA::kBytes + OperandB::kBytes;
    static constexpr int kStageBytes = kScaleAt + (kBlockScales ? kScaleStage : 0);
};

// Words of kBlocks blocks of eight rows, for one unit, in memory order. kIsA: in the order that products need for a.
template <typename Operand, int kBlocks, int kChunks, int kRaw, bool kIsA>
struct MmaWords {
    static constexpr int kAtATime = kChunks == 2 ? 2 : 4;  // blocks that are loaded together
    u32 w[kBlocks / kAtATime][4][kRaw];

    RTK_DEVICE void load(const u8* stage, int first, int unit, int part) {
        if constexpr (kChunks == 2) {
            u32 four[4];
            Operand::template fragments<kIsA>(four, stage, first + 16 * part, unit * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) w[part][i][0] = four[i];
        } else {
            Operand::raw_words(w[part], stage, first + 32 * part, unit);
        }
    }

    // Blocks first ... first + kCount - 1 as words of the product's type; times scale[i] if kScaled.
    template <typename Code, typename Math, bool kOrdered, bool kScaled, int kCount, int kWords>
    RTK_DEVICE void expand(int first, int kind, const u32* scale, u32 (&out)[kCount][kWords]) const {
        if constexpr (kChunks == 2) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    out[i][c] = w[(first + i) / 2][kIsA ? (first + i) % 2 + 2 * c : (first + i) % 2 * 2 + c][0];
        } else {
            constexpr int kEach = Math::kBits / CodeTraits<Code>::kBits;
            u32 in[kCount * kRaw], some[kCount * kRaw][kEach];
#pragma unroll
            for (int i = 0; i < kCount * kRaw; ++i) in[i] = w[(first + i / kRaw) / 4][(first + i / kRaw) % 4][i % kRaw];
            expand_words<Code, Math, kOrdered, kScaled>(in, kind, some);
#pragma unroll
            for (int i = 0; i < kCount * kRaw; ++i)
#pragma unroll
                for (int e = 0; e < kEach; ++e) {
                    u32 word = some[i][e];
                    if constexpr (kScaled)
                        word = fma_pair<is_same<Math, MathBf16>::value>(word, scale[i / kRaw], kMinusZeros);
                    out[i / kRaw][i % kRaw * kEach + e] = word;
                }
        }
    }
};

}  // namespace rtk
