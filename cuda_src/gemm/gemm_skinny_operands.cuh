// What the skinny product reads. A lane 4g + t of a warp has weight rows g and g + 8 and, of each chunk of 64 bytes of them,
// the 16 bytes that begin at 16 t: the codes of the products' k are dealt to lanes as they lie in memory, and activations
// follow that order. Four chunks are a slab: all loads that a lane has in flight.
//
// Activations of a slab are in shared memory as fragments of 16-bit numbers: vector (chunk, part h, tile, lane 4g + t) has 8
// numbers of token 8 tile + g, those of the lane's part h of the chunk. `spread`: scales change inside of a chunk; lanes then
// exchange their 16 bytes so that part h has consecutive k of all four lanes.
#pragma once
#include "gemm/gemm_skinny_weights.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kSkinnyThreads = 256;
inline constexpr int kSkinnyRows = 128;  // of weights, in a tile: 16 of each warp
inline constexpr int kSkinnyChunks = 4;  // of a slab
inline constexpr int kSkinnyChunkBytes = 64;

enum SkinnyActivations { kActivations16, kActivationsE4m3, kActivationsE5m2, kActivationsInt8, kActivationsInt4, kActivationsUint4 };
enum SkinnyScales { kScalesFp32, kScalesE8m0, kScalesUe4m3, kScalesSwizzled = 4 };  // the last one is added to a kind

// Scales of weights that vary along k. A group of 2^shift of k shares one.
struct SkinnyScale {
    const u8* data;
    i64 row_pitch, group_pitch;  // bytes
    int row_shift;               // 2^row_shift rows share a scale
    int shift, count;
    int kind;

    RTK_DEVICE const u8* row(i64 r) const {
        if ((kind & kScalesSwizzled) == 0) return data + (r >> row_shift) * row_pitch;
        return data + (r >> 7) * ((count + 3) >> 2) * 512 + (r & 31) * 16 + (r >> 5 & 3) * 4;
    }
    RTK_DEVICE const u8* at(const u8* row, int group) const {
        group = min(group, count - 1);
        if ((kind & kScalesSwizzled) != 0) return row + (group >> 2) * 512 + (group & 3);
        return row + group * group_pitch;
    }
    RTK_DEVICE float load(const u8* row, int group) const {
        const u8* p = at(row, group);
        if ((kind & 3) == kScalesFp32) return __uint_as_float(ptx::ld_keep<4>(p).w[0]);
        const u32 byte = ptx::ld_keep<1>(p).w[0];
        return __uint_as_float(byte == 0xffu ? 0x7fffffffu : byte == 0u ? 0x00400000u : byte << 23);  // 2^(byte - 127)
    }
};

// The first `bytes` (any number, also below 0) of 16, zeros behind, in any alignment.
RTK_DEVICE Raw<16> skinny_load_part(const u8* from, int bytes) {
    Raw<16> raw = {{0u, 0u, 0u, 0u}};
#pragma unroll 1
    for (int i = 0; i < min(bytes, 16); ++i) {
        const u32 byte = static_cast<u32>(from[i]) << (8 * (i & 3));
#pragma unroll
        for (int w = 0; w < 4; ++w) raw.w[w] |= i >> 2 == w ? byte : 0u;
    }
    return raw;
}

// Word j of lane i of four becomes word i of lane j.
RTK_DEVICE void skinny_transpose(Raw<16>& raw, int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & distance) != 0) continue;
            const u32 sent = upper ? raw.w[i] : raw.w[i + distance];
            const u32 got = __shfl_xor_sync(0xffffffffu, sent, distance);
            if (upper) {
                raw.w[i] = got;
            } else {
                raw.w[i + distance] = got;
            }
        }
    }
}

// The activations of a product. BITS of a weight, TILES of 8 tokens (of which `m` tokens exist).
template <int BITS, int TILES>
struct SkinnyActivation16 {
    static constexpr int kParts = 16 / BITS;         // of 8 numbers, in a lane's 16 bytes of weights
    static constexpr int kChunk = 32 * kParts;       // of k, in a chunk
    static constexpr int kDepth = kSkinnyChunks * kChunk;
    static constexpr int kTokens = TILES * 8;
    static constexpr int kVectors = kDepth / 8;      // of 8 numbers, of a token
    static constexpr int kBytes = kTokens * kDepth * 2;

    const u8* a;
    i64 pitch;  // bytes
    int m, k;
    int kind;   // SkinnyActivations
    int bits;
    bool aligned, spread;

    // Where 8 numbers of a token are among the fragments, in bytes.
    RTK_DEVICE int fragment(int vector, int token) const {
        const int chunk = vector / (4 * kParts), rest = vector % (4 * kParts);
        const int t = spread ? rest % 4 : rest / kParts, h = spread ? rest / 4 : rest % kParts;
        return (((chunk * kParts + h) * TILES + token / 8) * kWarp + token % 8 * 4 + t) * 16;
    }

    // Asks for a slab: fragments if numbers have 16 bits, else codes, token by token. Tokens that are not there are those of
    // the last one.
    RTK_DEVICE void fetch(u8* to, int slab) const {
        const int vectors = kDepth * bits / 128, bytes = ((k - slab * kDepth) * bits + 7) / 8;
        const u8* from = a + static_cast<i64>(slab) * (kDepth / 8 * bits);
        const bool whole = aligned && bytes >= vectors * 16;
#pragma unroll 1
        for (int i = threadIdx.x; i < kTokens * vectors; i += kSkinnyThreads) {
            const int token = i / vectors, vector = i % vectors;
            const u8* own = from + min(token, m - 1) * pitch + vector * 16;
            u8* const place = to + (kind == kActivations16 ? fragment(vector, token) : i * 16);
            if (whole) {
                ptx::cp_async_16(ptx::shared_address(place), own);
            } else if (aligned) {
                ptx::cp_async_16_partial(ptx::shared_address(place), own, min(max(bytes - vector * 16, 0), 16));
            } else {
                ptx::st_shared_16(ptx::shared_address(place), skinny_load_part(own, bytes - vector * 16));
            }
        }
    }

    // Codes of a slab to fragments of fp16, exactly.
    RTK_DEVICE void convert(const u8* from, u8* to) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kTokens * kVectors; i += kSkinnyThreads) {
            float value[8];
            if (kind >= kActivationsInt4) {
                const u32 word = reinterpret_cast<const u32*>(from)[i];
                const int flip = kind == kActivationsInt4 ? 8 : 0;
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    value[e] = static_cast<float>((static_cast<int>(word >> (4 * e) & 15u) ^ flip) - flip);
            } else {
                const uint2 words = reinterpret_cast<const uint2*>(from)[i];
                const Raw<8> raw = {{words.x, words.y}};
                if (kind == kActivationsE4m3) {
                    unpack<e4m3, 8>(raw, value);
                } else if (kind == kActivationsE5m2) {
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

}  // namespace rtk
