// What a stage of the skinny product holds, and how it comes: 128 rows of weights, 128 bytes of each, the activations of the
// same k, and the scales that vary along k. All of it is asked for by cp.async, `stages` stages before it is used.
//
// Weights: row r at 128 r, its 16-byte vectors swizzled so that the rows of a step fall into different banks.
// Activations, 16 bits: in the order of fragments. Vector (step, tile, lane 4g + t) has k = 32 step + 8t ... + 7 of token
// 8 tile + g. Quantised ones come as they are, token by token, and `convert` makes those fragments of them.
// Scales of weights: words [word][128 rows], a word being an fp32 number or four bytes; of activations: [word][tokens].
#pragma once
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kSkinnyThreads = 256;
inline constexpr int kSkinnyRows = 128;        // of weights, in a tile
inline constexpr int kSkinnyRowBytes = 128;    // of a row, in a stage
inline constexpr int kSkinnyWeightBytes = kSkinnyRows * kSkinnyRowBytes;

enum SkinnyActivations { kActivations16, kActivationsE4m3, kActivationsE5m2, kActivationsInt8, kActivationsInt4, kActivationsUint4 };
enum SkinnyScales { kScalesFp32, kScalesE8m0, kScalesUe4m3, kScalesSwizzled = 4 };  // the last one is added to a kind

// Scales that vary along k: where they are, and which ones a stage has.
struct SkinnyScale {
    const u8* data;
    i64 row_pitch, depth_pitch;  // bytes
    int row_shift;               // 2^row_shift rows share a scale
    int depth;                   // of k share one
    int count;                   // along k
    int kind;                    // SkinnyScales
    int words;                   // of a row in a stage; 0: none vary along k
    bool aligned;                // words are

    // The word of a row, of which `bytes` exist.
    RTK_DEVICE const u8* word(i64 row, int group, int& bytes) const {
        if ((kind & 3) == kScalesFp32) {
            bytes = group < count ? 4 : 0;
            return data + (row >> row_shift) * row_pitch + group * depth_pitch;
        }
        bytes = min(max(count - group, 0), 4);
        if ((kind & kScalesSwizzled) == 0) return data + (row >> row_shift) * row_pitch + group;
        return data + ((row >> 7) * ((count + 3) >> 2) + (group >> 2)) * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4;
    }

    RTK_DEVICE void fetch(u8* to, i64 row, int first_group, int word_index) const {
        int bytes;
        const u8* from = word(row, first_group + word_index * ((kind & 3) == kScalesFp32 ? 1 : 4), bytes);
        if (aligned) {
            ptx::cp_async_4_partial(ptx::shared_address(to), bytes == 0 ? data : from, bytes);
        } else {
            u32 value = 0;
            for (int i = 0; i < bytes; ++i) value |= static_cast<u32>(from[i]) << (8 * i);
            *reinterpret_cast<u32*>(to) = value;
        }
    }
};

// 16 bytes to shared memory, the first `bytes` of them from memory (any number, also below 0), zeros behind.
RTK_DEVICE void skinny_fetch_16(u8* to, const u8* from, int bytes, bool aligned) {
    bytes = min(max(bytes, 0), 16);
    if (aligned) {
        ptx::cp_async_16_partial(ptx::shared_address(to), from, bytes);
        return;
    }
    Raw<16> raw = {{0u, 0u, 0u, 0u}};
#pragma unroll 1
    for (int i = 0; i < bytes; ++i) {
        const u32 byte = static_cast<u32>(from[i]) << (8 * (i & 3));
#pragma unroll
        for (int w = 0; w < 4; ++w) raw.w[w] |= i >> 2 == w ? byte : 0u;
    }
    ptx::st_shared_16(ptx::shared_address(to), raw);
}

// A product as the stages see it. KBITS of a weight.
template <int KBITS>
struct SkinnyProduct {
    static constexpr int kDepth = kSkinnyRowBytes * 8 / KBITS;  // of k, in a stage
    static constexpr int kSwizzle = KBITS == 16 ? 1 : KBITS == 8 ? 2 : 3;

    const u8* a;
    const u8* b;
    i64 a_pitch, b_pitch;  // bytes
    i64 n;
    int m, k, tiles;       // tiles of 8 tokens
    int activations;       // SkinnyActivations
    bool a_aligned, b_aligned, gated;
    SkinnyScale scale_a, scale_b;

    RTK_DEVICE int activation_bits() const {
        return activations == kActivations16 ? 16 : activations >= kActivationsInt4 ? 4 : 8;
    }
    RTK_DEVICE int activation_bytes() const { return tiles * kDepth * activation_bits(); }  // in a stage
    RTK_DEVICE int stage_bytes() const {
        return kSkinnyWeightBytes + activation_bytes() + scale_b.words * (kSkinnyRows * 4) + scale_a.words * (tiles * 32);
    }
    RTK_DEVICE int k_stages() const { return max((k + kDepth - 1) / kDepth, 1); }
    RTK_DEVICE int tile_columns() const { return gated ? kSkinnyRows / 2 : kSkinnyRows; }

    // Row r of a tile, in b. Rows that are not there are those of the last one, whose results are not written twice. Gated:
    // warps have 32 rows, 16 of the gate and their 16 counterparts.
    RTK_DEVICE i64 weight_row(int tile, int r) const {
        const i64 first = static_cast<i64>(tile) * tile_columns();
        if (!gated) return min(first + r, n - 1);
        return min(first + (r >> 5) * 16 + (r & 15), n - 1) + (r & 16 ? n : 0);
    }

    RTK_DEVICE static int swizzled(int r, int vector) {
        return r * kSkinnyRowBytes + ((vector ^ ((r & ((1 << kSwizzle) - 1)) << (3 - kSwizzle))) << 4);
    }

    // This thread's part of the weights: one vector of rows r, r + 32, r + 64 and r + 96.
    struct WeightRows {
        const u8* from[4];
    };
    RTK_DEVICE WeightRows weight_rows(int tile) const {
        WeightRows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rows.from[i] = b + weight_row(tile, threadIdx.x / 8 + 32 * i) * b_pitch + threadIdx.x % 8 * 16;
        return rows;
    }

    // Asks for stage `index` of a tile's k.
    RTK_DEVICE void fetch(u8* stage, const WeightRows& rows, int tile, int index) const {
        const int thread = static_cast<int>(threadIdx.x), first_k = index * kDepth;
        const i64 offset = static_cast<i64>(index) * kSkinnyRowBytes;
        const int vector = thread % 8;
        const int bytes = (k * KBITS + 7) / 8 - index * kSkinnyRowBytes - vector * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            skinny_fetch_16(stage + swizzled(thread / 8 + 32 * i, vector), rows.from[i] + offset, bytes, b_aligned);
        fetch_activations(stage + kSkinnyWeightBytes, first_k);
        u8* scales = stage + kSkinnyWeightBytes + activation_bytes();
        if (scale_b.words != 0) {
            const int group = first_k / scale_b.depth;
            for (int i = thread; i < scale_b.words * kSkinnyRows; i += kSkinnyThreads)
                scale_b.fetch(scales + i * 4, weight_row(tile, i % kSkinnyRows), group, i / kSkinnyRows);
            scales += scale_b.words * (kSkinnyRows * 4);
        }
        if (scale_a.words != 0) {
            const int group = first_k / scale_a.depth, tokens = tiles * 8;
            for (int i = thread; i < scale_a.words * tokens; i += kSkinnyThreads)
                scale_a.fetch(scales + i * 4, min(i % tokens, m - 1), group, i / tokens);
        }
    }

    // Of tokens that are not there come those of the last one.
    RTK_DEVICE void fetch_activations(u8* to, int first_k) const {
        const int thread = static_cast<int>(threadIdx.x);
        if (activations == kActivations16) {
            constexpr int kVectors = kDepth / 8, kTokens = kSkinnyThreads / kVectors;
            const int vector = thread % kVectors, bytes = (k - first_k) * 2 - vector * 16;
            const u8* from = a + static_cast<i64>(first_k) * 2 + vector * 16;
#pragma unroll 4
            for (int token = thread / kVectors; token < tiles * 8; token += kTokens)
                skinny_fetch_16(to + fragment(vector, token) * 16, from + min(token, m - 1) * a_pitch, bytes, a_aligned);
            return;
        }
        const int bits = activation_bits(), vectors = kDepth * bits / 128;
#pragma unroll 1
        for (int i = thread; i < tiles * 8 * vectors; i += kSkinnyThreads) {
            const int token = i / vectors, vector = i % vectors;
            skinny_fetch_16(to + i * 16, a + min(token, m - 1) * a_pitch + (static_cast<i64>(first_k) * bits / 8 + vector * 16),
                            ((k - first_k) * bits + 7) / 8 - vector * 16, a_aligned);
        }
    }

    // Where 8 numbers of a token are among the fragments, in units of 16 bytes.
    RTK_DEVICE int fragment(int vector, int token) const {
        return ((vector / 4 * tiles + token / 8) * 8 + token % 8) * 4 + vector % 4;
    }

    // Quantised activations of a stage to fragments of fp16, exactly.
    RTK_DEVICE void convert(const u8* from, u8* to) const {
        constexpr int kVectors = kDepth / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < tiles * 8 * kVectors; i += kSkinnyThreads) {
            float value[8];
            if (activations >= kActivationsInt4) {
                const u32 word = reinterpret_cast<const u32*>(from)[i];
                const int flip = activations == kActivationsInt4 ? 8 : 0;
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    value[e] = static_cast<float>((static_cast<int>(word >> (4 * e) & 15u) ^ flip) - flip);
            } else {
                const uint2 words = reinterpret_cast<const uint2*>(from)[i];
                const Raw<8> raw = {{words.x, words.y}};
                if (activations == kActivationsE4m3) {
                    unpack<e4m3, 8>(raw, value);
                } else if (activations == kActivationsE5m2) {
                    unpack<e5m2, 8>(raw, value);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        value[e] = static_cast<float>(static_cast<signed char>(raw.w[e / 4] >> (8 * (e % 4))));
                }
            }
            ptx::st_shared_16(ptx::shared_address(to + fragment(i % kVectors, i / kVectors) * 16), pack<fp16, 8>(value));
        }
    }
};

// Waits until at most `pending` of this thread's newest groups of copies are unfinished.
RTK_DEVICE void skinny_wait(int pending) {
    switch (pending) {
        case 0: ptx::cp_async_wait<0>(); break;
        case 1: ptx::cp_async_wait<1>(); break;
        case 2: ptx::cp_async_wait<2>(); break;
        case 3: ptx::cp_async_wait<3>(); break;
        case 4: ptx::cp_async_wait<4>(); break;
        case 5: ptx::cp_async_wait<5>(); break;
        case 6: ptx::cp_async_wait<6>(); break;
        default: ptx::cp_async_wait<7>(); break;
    }
}

}  // namespace rtk
