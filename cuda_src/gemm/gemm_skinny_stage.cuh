// Operand loads of the skinny product: all by cp.async, several units before they are used.
//
// A unit of weights is what a warp works on at a time: 32 rows, 64 bytes of each. Each warp has its own ring of units,
// so that no warp waits for another one's weights. Row r is at 64 r; its steps of 32 k (16, 32 or 64 bytes) are
// swizzled by xor with r / 2, so that the rows of a step fall into different banks. The weights of a unit are followed
// by the words of its scales along k, [word][32 rows], a word being an fp32 number or four bytes.
//
// Activations are loaded in chunks of k for the whole block, token by token, with a barrier where a chunk begins:
// [m][pitch], then the words of their scales, [word][tokens]. Lane 4g + t of a step reads k = 8t ... 8t + 7 of token g;
// a pitch of 64 bytes more than a multiple of 128 avoids bank conflicts. Quantised ones are converted to fp16 when
// their chunk begins.
#pragma once
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kSkinnyMaxRows = 128;  // of weights, that a block has
inline constexpr int kSkinnyUnitRows = 32;
inline constexpr int kSkinnyRowBytes = 64;  // of a row, in a unit
inline constexpr int kSkinnyUnitBytes = kSkinnyUnitRows * kSkinnyRowBytes;
inline constexpr int kSkinnyRing = 3;  // units of a warp; more in flight only raises their latency (H200)

enum SkinnyActivations { kActivations16, kActivationsE4m3, kActivationsE5m2, kActivationsInt8, kActivationsInt4, kActivationsUint4 };
enum SkinnyScales { kScalesFp32, kScalesE8m0, kScalesUe4m3, kScalesSwizzled = 4 };  // the last one is added to a kind

// `size` bytes to shared memory, the first `bytes` of them from memory, zeros after those, in any alignment. Not
// inlined: rare code amid the common path would take as long to fetch as the weights.
__device__ __noinline__ void skinny_copy(u8* to, const u8* from, int bytes, int size) {
#pragma unroll 1
    for (int i = 0; i < size; ++i) to[i] = i < bytes ? from[i] : 0;
}

// 16 bytes of rows that are multiples of 8 bytes only.
RTK_DEVICE void skinny_copy_halves(ptx::SharedAddress to, const u8* from, int bytes) {
#pragma unroll
    for (int i = 0; i < 16; i += 8) ptx::cp_async_8_partial(to + i, from + i, min(max(bytes - i, 0), 8));
}

// Scales that vary along k.
struct SkinnyScale {
    const u8* data;
    i64 row_pitch;   // bytes
    i64 word_pitch;  // bytes from one word of a row to the next: the next scale, or the next four
    int row_shift;   // 2^row_shift rows share a scale
    int shift;       // 2^shift of k share one
    int count;       // along k
    int kind;        // SkinnyScales
    int words;       // of a row in a unit or chunk; 0: none vary along k
    bool aligned;    // words are

    RTK_DEVICE bool is_fp32() const { return (kind & 3) == kScalesFp32; }

    RTK_DEVICE const u8* row(i64 r) const {
        if ((kind & kScalesSwizzled) == 0) return data + (r >> row_shift) * row_pitch;
        return data + (r >> 7) * ((count + 3) >> 2) * 512 + (r & 31) * 16 + (r >> 5 & 3) * 4;
    }

    // The word, counted along a whole row, that holds the scale of k = `at`.
    RTK_DEVICE int word(int at) const { return at >> (is_fp32() ? shift : shift + 2); }

    RTK_DEVICE void fetch(u8* memory, int to, const u8* of_row, int word) const {
        const int bytes = is_fp32() ? (word < count ? 4 : 0) : min(max(count - 4 * word, 0), 4);
        const u8* from = of_row + word * word_pitch;
        if (aligned) {
            ptx::cp_async_4_partial(ptx::shared_address(memory) + to, from, bytes);
        } else {
            skinny_copy(memory + to, from, bytes, 4);
        }
    }
};

// A product as the copies see it. BITS per weight, TILES of 8 tokens (`m` tokens exist).
template <int BITS, int TILES>
struct SkinnyProduct {
    static constexpr int kDepth = kSkinnyRowBytes * 8 / BITS;  // of k, in a unit
    static constexpr int kSteps = kDepth / 32;
    static constexpr int kTokens = TILES * 8;

    const u8* a;
    const u8* b;
    int a_pitch, b_pitch;  // bytes
    int n, m, k;
    int activations;  // SkinnyActivations
    int bits_shift;   // 2^bits_shift bits of an activation
    int chunk_shift;  // 2^chunk_shift of k in a chunk
    int tile_rows;    // of weights, that a block has
    bool a_aligned, b_aligned, a_halves, b_halves, gated;  // halves: to 8 bytes
    SkinnyScale scale_a, scale_b;

    RTK_DEVICE int units() const { return (k + kDepth - 1) / kDepth; }
    RTK_DEVICE int tile_columns() const { return gated ? tile_rows / 2 : tile_rows; }
    RTK_DEVICE int slot_bytes() const { return kSkinnyUnitBytes + scale_b.words * (kSkinnyUnitRows * 4); }
    RTK_DEVICE int row_bytes() const { return 1 << (chunk_shift + bits_shift - 3); }  // of a token in a chunk
    RTK_DEVICE int token_pitch() const { return ((2 << chunk_shift) + 127 & ~127) + 64; }  // of 16-bit activations
    RTK_DEVICE int copied_pitch() const { return activations == kActivations16 ? token_pitch() : row_bytes(); }
    RTK_DEVICE int buffer_bytes() const { return m * copied_pitch() + scale_a.words * (kTokens * 4); }

    // Row r of a tile, in b. Missing rows read the last one and their results are not written. Gated: warps have 32
    // rows, 16 of the gate and their 16 counterparts.
    RTK_DEVICE int weight_row(int tile, int r) const {
        const int first = tile * tile_columns();
        if (!gated) return min(first + r, n - 1);
        return min(first + (r >> 5) * 16 + (r & 15), n - 1) + (r & 16 ? n : 0);
    }

    // Offset of the codes of a step in row r.
    RTK_DEVICE static int step_place(int r, int step) { return (step ^ (r / 2 & (kSteps - 1))) * (4 * BITS); }

    // A lane's loads: one vector of rows r, r + 8, r + 16 and r + 24 of its warp, and one word of a row's scales.
    struct Source {
        const u8* weights[4];
        const u8* scales;
    };

    RTK_DEVICE Source source(int tile, int first_row, int lane) const {
        Source source;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            source.weights[i] = b + static_cast<i64>(weight_row(tile, first_row + lane / 4 + 8 * i)) * b_pitch + lane % 4 * 16;
        source.scales = scale_b.words != 0 ? scale_b.row(weight_row(tile, first_row + lane)) : nullptr;
        return source;
    }

    // Issues the loads of a unit of the warp; `to`: offset in `memory`.
    RTK_DEVICE void fetch(u8* memory, int to, const Source& source, int lane, int unit) const {
        const int vector = lane % 4, r = lane / 4;  // rows r + 8i have the same places
        const i64 offset = static_cast<i64>(unit) * kSkinnyRowBytes;
        const int own = to + r * kSkinnyRowBytes + step_place(r, vector / (BITS / 4)) + vector % (BITS / 4) * 16;
        const int bytes = (k * BITS + 7) / 8 - unit * kSkinnyRowBytes - vector * 16;
        if (b_aligned) {
            const int some = min(max(bytes, 0), 16);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ptx::cp_async_16_stream(ptx::shared_address(memory) + own + i * (8 * kSkinnyRowBytes), source.weights[i] + offset,
                                        some);
        } else if (b_halves) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                skinny_copy_halves(ptx::shared_address(memory) + own + i * (8 * kSkinnyRowBytes), source.weights[i] + offset, bytes);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) skinny_copy(memory + own + i * (8 * kSkinnyRowBytes), source.weights[i] + offset, bytes, 16);
        }
#pragma unroll 1
        for (int w = 0; w < scale_b.words; ++w)
            scale_b.fetch(memory, to + kSkinnyUnitBytes + (w * kSkinnyUnitRows + lane) * 4, source.scales,
                          scale_b.word(unit * kDepth) + w);
    }

    // Issues the loads of the activations of a chunk that begins at k = `first`.
    RTK_DEVICE void fetch_chunk(u8* memory, int to, int first) const {
        const int vectors_shift = chunk_shift + bits_shift - 7, bytes = ((k - first << bits_shift) + 7) >> 3;
        const u8* from = a + (static_cast<i64>(first) << bits_shift >> 3);
#pragma unroll 1
        for (int i = threadIdx.x; i < m << vectors_shift; i += static_cast<int>(blockDim.x)) {
            const int token = i >> vectors_shift, at = (i & (1 << vectors_shift) - 1) * 16;
            const int own = to + token * copied_pitch() + at;
            const u8* source = from + static_cast<i64>(token) * a_pitch + at;
            if (a_aligned) {
                ptx::cp_async_16_partial(ptx::shared_address(memory) + own, source, min(max(bytes - at, 0), 16));
            } else if (a_halves) {
                skinny_copy_halves(ptx::shared_address(memory) + own, source, bytes - at);
            } else {
                skinny_copy(memory + own, source, bytes - at, 16);
            }
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < scale_a.words * kTokens; i += static_cast<int>(blockDim.x))
            scale_a.fetch(memory, to + m * copied_pitch() + i * 4, scale_a.row(min(i % kTokens, m - 1)),
                          scale_a.word(first) + i / kTokens);
    }

    // Converts quantised activations of a chunk to fp16, exactly.
    RTK_DEVICE void convert(const u8* from, u8* to) const {
        const int vectors_shift = chunk_shift - 3;
#pragma unroll 1
        for (int i = threadIdx.x; i < m << vectors_shift; i += static_cast<int>(blockDim.x)) {
            const int token = i >> vectors_shift, vector = i & (1 << vectors_shift) - 1;
            float value[8];
            if (activations >= kActivationsInt4) {
                const u32 word = reinterpret_cast<const u32*>(from + token * row_bytes())[vector];
                const int flip = activations == kActivationsInt4 ? 8 : 0;
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    value[e] = static_cast<float>((static_cast<int>(word >> (4 * e) & 15u) ^ flip) - flip);
            } else {
                const uint2 words = reinterpret_cast<const uint2*>(from + token * row_bytes())[vector];
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
            ptx::st_shared_16(ptx::shared_address(to + token * token_pitch() + vector * 16), pack<fp16, 8>(value));
        }
    }
};

}  // namespace rtk
