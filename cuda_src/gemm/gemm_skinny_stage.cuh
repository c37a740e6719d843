// What a stage of the skinny product holds, and how it comes: 128 rows of weights, 128 bytes of each, the activations of the
// same k, and the scales that vary along k. All of it is asked for by cp.async, as many stages before it is used as there are.
// Instructions count as much as bytes here, so every thread keeps the addresses of what it asks for and moves them on.
//
// Weights: row r at 128 r; its parts of 32 k (16, 32 or 64 bytes) change places by xor with r, so that the rows of a step
// fall into different banks.
// Activations, 16 bits: in the order of fragments. Vector (step, tile, lane 4g + t) has k = 32 step + 8t ... + 7 of token
// 8 tile + g. Quantised ones come as they are, token by token, and `convert` makes those fragments of them.
// Scales of weights: words [word][128 rows], a word being an fp32 number or four bytes; of activations: [word][tokens].
#pragma once
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kSkinnyThreads = 256;
inline constexpr int kSkinnyRows = 128;      // of weights, in a tile
inline constexpr int kSkinnyRowBytes = 128;  // of a row, in a stage
inline constexpr int kSkinnyWeightBytes = kSkinnyRows * kSkinnyRowBytes;

enum SkinnyActivations { kActivations16, kActivationsE4m3, kActivationsE5m2, kActivationsInt8, kActivationsInt4, kActivationsUint4 };
enum SkinnyScales { kScalesFp32, kScalesE8m0, kScalesUe4m3, kScalesSwizzled = 4 };  // the last one is added to a kind

// Scales that vary along k.
struct SkinnyScale {
    const u8* data;
    i64 row_pitch;   // bytes
    i64 word_pitch;  // bytes from one word of a row to the next: the next scale, or the next four
    int row_shift;   // 2^row_shift rows share a scale
    int depth;       // of k share one
    int count;       // along k
    int kind;        // SkinnyScales
    int words;       // of a row in a stage; 0: none vary along k
    bool aligned;    // words are

    RTK_DEVICE bool is_fp32() const { return (kind & 3) == kScalesFp32; }

    RTK_DEVICE const u8* row(i64 r) const {
        if ((kind & kScalesSwizzled) == 0) return data + (r >> row_shift) * row_pitch;
        return data + (r >> 7) * ((count + 3) >> 2) * 512 + (r & 31) * 16 + (r >> 5 & 3) * 4;
    }

    // The first word of a stage, counted along a whole row.
    template <int DEPTH>
    RTK_DEVICE int first_word(int stage) const {
        return depth <= DEPTH ? stage * words : stage * DEPTH / depth;
    }

    RTK_DEVICE void fetch(u8* to, const u8* of_row, int word) const {
        const int bytes = is_fp32() ? (word < count ? 4 : 0) : min(max(count - 4 * word, 0), 4);
        const u8* from = of_row + word * word_pitch;
        if (aligned) {
            ptx::cp_async_4_partial(ptx::shared_address(to), from, bytes);
        } else {
            u32 value = 0;
#pragma unroll 1
            for (int i = 0; i < bytes; ++i) value |= static_cast<u32>(from[i]) << (8 * i);
            *reinterpret_cast<u32*>(to) = value;
        }
    }
};

// 16 bytes to shared memory, the first `bytes` of them from memory (any number, also below 0), zeros behind, in any alignment.
RTK_DEVICE void skinny_copy_16(u8* to, const u8* from, int bytes) {
    Raw<16> raw = {{0u, 0u, 0u, 0u}};
#pragma unroll 1
    for (int i = 0; i < min(bytes, 16); ++i) {
        const u32 byte = static_cast<u32>(from[i]) << (8 * (i & 3));
#pragma unroll
        for (int w = 0; w < 4; ++w) raw.w[w] |= i >> 2 == w ? byte : 0u;
    }
    ptx::st_shared_16(ptx::shared_address(to), raw);
}

// A product as the stages see it. KBITS of a weight, TILES of 8 tokens (of which `m` tokens exist).
template <int KBITS, int TILES>
struct SkinnyProduct {
    static constexpr int kDepth = kSkinnyRowBytes * 8 / KBITS;  // of k, in a stage
    static constexpr int kTokens = TILES * 8;
    static constexpr int kFragmentBytes = kTokens * kDepth * 2;
    static constexpr int kVectors = kDepth / 8;                 // 16-byte vectors of a token
    static constexpr int kPassTokens = kSkinnyThreads / kVectors;
    static constexpr int kPasses = (kTokens + kPassTokens - 1) / kPassTokens;

    const u8* a;
    const u8* b;
    i64 a_pitch, b_pitch;  // bytes
    i64 n;
    int m, k;
    int activations;  // SkinnyActivations
    int bits;         // of an activation
    bool a_aligned, b_aligned, gated;
    SkinnyScale scale_a, scale_b;

    RTK_DEVICE int activation_bytes() const { return kTokens * kDepth / 8 * bits; }  // in a stage
    RTK_DEVICE int stage_bytes() const {
        return kSkinnyWeightBytes + activation_bytes() + scale_b.words * (kSkinnyRows * 4) + scale_a.words * (kTokens * 4);
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

    // Where the codes of a step of row r begin, in the row.
    RTK_DEVICE static int step_place(int r, int step) { return (step ^ (r & (32 / KBITS - 1))) * (4 * KBITS); }

    // Where 8 numbers of a token are among the fragments, in bytes.
    RTK_DEVICE static int fragment(int vector, int token) {
        return (((vector / 4 * TILES + token / 8) * 8 + token % 8) * 4 + vector % 4) * 16;
    }

    // What this thread asks for: one vector of weight rows r, r + 32, r + 64 and r + 96, one of some tokens, one word of a
    // row's scales.
    struct Source {
        const u8* weights[4];
        const u8* activations;
        const u8* scales;
    };

    RTK_DEVICE void begin_tile(Source& source, int tile) const {
        const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            source.weights[i] = b + weight_row(tile, thread / 8 + 32 * i) * b_pitch + thread % 8 * 16;
        if (scale_b.words != 0) source.scales = scale_b.row(weight_row(tile, thread % kSkinnyRows));
    }

    RTK_DEVICE Source source(int tile) const {
        Source source;
        source.activations = a + threadIdx.x / kVectors * a_pitch + threadIdx.x % kVectors * 16;
        source.scales = nullptr;
        begin_tile(source, tile);
        return source;
    }

    // Asks for a stage of a tile.
    RTK_DEVICE void fetch(u8* to, const Source& source, int stage) const {
        const int thread = static_cast<int>(threadIdx.x), vector = thread % 8, r = thread / 8;
        const bool whole = (stage + 1) * kDepth <= k;
        {
            const i64 offset = static_cast<i64>(stage) * kSkinnyRowBytes;
            const int bytes = (k * KBITS + 7) / 8 - stage * kSkinnyRowBytes - vector * 16;
            // 16-byte vectors of a step stay together.
            u8* const own = to + r * kSkinnyRowBytes + step_place(r, vector / (KBITS / 4)) + vector % (KBITS / 4) * 16;
            if (!b_aligned) {
#pragma unroll 1
                for (int i = 0; i < 4; ++i) {
                    const u8* from = source.weights[0];
#pragma unroll
                    for (int j = 1; j < 4; ++j) from = i == j ? source.weights[j] : from;
                    skinny_copy_16(own + i * (32 * kSkinnyRowBytes), from + offset, bytes);
                }
            } else if (whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::cp_async_16(ptx::shared_address(own) + i * (32 * kSkinnyRowBytes), source.weights[i] + offset);
            } else {
                const int some = min(max(bytes, 0), 16);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::cp_async_16_partial(ptx::shared_address(own) + i * (32 * kSkinnyRowBytes), source.weights[i] + offset,
                                             some);
            }
        }
        if (activations == kActivations16) {
            fetch_fragments(to + kSkinnyWeightBytes, source, stage, whole);
        } else {
            fetch_codes(to + kSkinnyWeightBytes, stage);
        }
        if (scale_b.words != 0) {
            u8* const own = to + kSkinnyWeightBytes + activation_bytes() + thread * 4;
            const int first = scale_b.template first_word<kDepth>(stage);
#pragma unroll 1
            for (int w = thread / kSkinnyRows; w < scale_b.words; w += 2)
                scale_b.fetch(own + (w & ~1) * (kSkinnyRows * 4), source.scales, first + w);
        }
        if (scale_a.words != 0 && thread < scale_a.words * kTokens) {
            u8* const own = to + kSkinnyWeightBytes + activation_bytes() + scale_b.words * (kSkinnyRows * 4) + thread * 4;
            scale_a.fetch(own, scale_a.row(min(thread % kTokens, m - 1)),
                          scale_a.template first_word<kDepth>(stage) + thread / kTokens);
        }
    }

    // Zeros for tokens that do not exist, in all stages: `fetch` leaves them alone.
    RTK_DEVICE void clear_fragments(u8* stages, int count) const {
        const int vector = threadIdx.x % kVectors;
        for (int token = threadIdx.x / kVectors; token < kTokens; token += kPassTokens)
            for (int i = 0; token >= m && i < count; ++i)
                ptx::st_shared_16(
                    ptx::shared_address(stages + i * stage_bytes() + kSkinnyWeightBytes + fragment(vector, token)),
                    {{0u, 0u, 0u, 0u}});
    }

   private:
    RTK_DEVICE void fetch_fragments(u8* to, const Source& source, int stage, bool whole) const {
        const int token = static_cast<int>(threadIdx.x) / kVectors, vector = static_cast<int>(threadIdx.x) % kVectors;
        const u8* from = source.activations + static_cast<i64>(stage) * (kDepth * 2);
        u8* const own = to + fragment(vector, token);
        const int bytes = (k - stage * kDepth) * 2 - vector * 16;
        const i64 pass = kPassTokens * a_pitch;
        if (a_aligned && whole) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i)
                if (token + i * kPassTokens < m)
                    ptx::cp_async_16(ptx::shared_address(own) + i * (kPassTokens / 8 * 512), from + i * pass);
            return;
        }
#pragma unroll 1
        for (int i = 0; token + i * kPassTokens < m; ++i) {
            u8* const there = own + i * (kPassTokens / 8 * 512);
            if (a_aligned) {
                ptx::cp_async_16_partial(ptx::shared_address(there), from + i * pass, min(max(bytes, 0), 16));
            } else {
                skinny_copy_16(there, from + i * pass, bytes);
            }
        }
    }

    // Of tokens that are not there come those of the last one.
    RTK_DEVICE void fetch_codes(u8* to, int stage) const {
        const int vectors = kDepth * bits / 128, bytes = ((k - stage * kDepth) * bits + 7) / 8;
        const u8* from = a + static_cast<i64>(stage) * kDepth * bits / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < kTokens * vectors; i += kSkinnyThreads) {
            const int token = i / vectors, vector = i % vectors;
            const u8* own = from + min(token, m - 1) * a_pitch + vector * 16;
            if (a_aligned) {
                ptx::cp_async_16_partial(ptx::shared_address(to + i * 16), own, min(max(bytes - vector * 16, 0), 16));
            } else {
                skinny_copy_16(to + i * 16, own, bytes - vector * 16);
            }
        }
    }

   public:
    // Quantised activations of a stage to fragments of fp16, exactly.
    RTK_DEVICE void convert(const u8* from, u8* to) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kTokens * kVectors; i += kSkinnyThreads) {
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
            ptx::st_shared_16(ptx::shared_address(to + fragment(i % kVectors, i / kVectors)), pack<fp16, 8>(value));
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
        default: ptx::cp_async_wait<6>(); break;
    }
}

}  // namespace rtk
