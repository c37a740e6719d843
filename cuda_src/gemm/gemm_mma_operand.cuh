// An operand of the mma.sync product: from global memory to a stage of shared memory, and from there to the lanes.
//
// A stage has kRows rows of kDepth elements of k, kRowBytes (128, 64 or 32) each, in lines of 128 bytes; the 16-byte vectors
// of a line are swizzled so that eight rows of one vector, and the accesses of 8 and 16 bytes below, hit different banks.
// kAcross (16-bit operands): 64 elements of the result in a line, kDepth lines, then those of the next 64.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/integer.cuh"
#include "ptx/mma.cuh"

namespace rtk {

RTK_DEVICE constexpr u32 reversed_3_bits(u32 v) { return (v & 1u) << 2 | (v & 2u) | (v >> 2 & 1u); }

// Maps rows of a tile to rows of memory. A gated product takes eight rows of the gate, then eight of the other half.
struct MmaRows {
    i64 first;   // of memory, the tile's first
    int exist;   // rows of memory from there on (of one half, if gated)
    i64 half;    // rows from the gate to the other half; 0 if not gated

    // -1 if there is none.
    RTK_DEVICE i64 source(int row) const {
        if (half == 0) return row < exist ? first + row : -1;
        const int inside = row / 16 * 8 + row % 8;
        return inside < exist ? first + inside + (row & 8 ? half : 0) : -1;
    }
};

template <int kBits, int kRows, int kDepth, int kThreads, bool kAcross, bool kAnyStrides>
struct MmaOperand {
    static constexpr int kRowBytes = kDepth * kBits / 8, kBytes = kRows * kRowBytes;
    static constexpr int kEach = 128 / kBits;  // elements in 16 bytes
    static constexpr int kPerThread = kBytes / 16 / kThreads;
    static_assert(kBytes % (16 * kThreads) == 0, "all threads fetch as much");
    static_assert(!kAcross || (kBits == 16 && kRowBytes == 128), "only 16-bit numbers can be transposed");

    const u8* data;  // of this group
    i64 pitch;       // elements
    MmaRows rows;
    bool by_element, stored_across;  // of kAnyStrides; stored_across: rows of memory are those of k

    // ---- to shared memory: k0 ... k0 + kDepth - 1, zeros outside of k_first ... k_last - 1. Rows that do not exist
    // are filled from another row, because their products are dropped.

    // This thread's first vector of row 0 at k; fetch takes it and advances it by a stage.
    RTK_DEVICE const u8* start(int k) const {
        if constexpr (kAcross) {
            const int row = static_cast<int>(threadIdx.x) % (kRows / 8) * 8;
            const int inside = rows.half == 0 ? row : row / 16 * 8;
            const i64 column = rows.first + (inside < rows.exist ? inside : 0) + (rows.half != 0 && (row & 8) ? rows.half : 0);
            const i64 line = k + static_cast<int>(threadIdx.x) / (kRows / 8);
            return data + (line * pitch + column) * 2;
        } else {
            constexpr int kVectors = kRowBytes / 16;
            const int row = static_cast<int>(threadIdx.x) / kVectors, vector = static_cast<int>(threadIdx.x) % kVectors;
            const i64 first = rows.first + (rows.half != 0 && (row & 8) ? rows.half : 0);
            return data + (first * pitch + k + vector * kEach) * kBits / 8;
        }
    }

    // True if fetch_part, called kPerThread times, fetches this stage: whole vectors, interleaved with products,
    // without a branch.
    RTK_DEVICE bool in_parts(int k0, int k_last) const {
        const bool whole = k0 + kDepth <= k_last;
        if constexpr (kAcross) return whole && rows.exist >= (rows.half == 0 ? kRows : kRows / 2);
        return whole && !(kAnyStrides && by_element);
    }

    RTK_DEVICE void fetch_part(bool wanted, ptx::SharedAddress to, const u8* from, int part) const {
        if constexpr (kAcross) {
            constexpr int kVectors = kRows / 8, kStep = kThreads / kVectors;
            const int k = static_cast<int>(threadIdx.x) / kVectors, row = static_cast<int>(threadIdx.x) % kVectors * 8;
            ptx::cp_async_16_if(wanted, to + (across_place(k, row) + part * kStep * 128), from + part * kStep * pitch * 2);
        } else {
            constexpr int kVectors = kRowBytes / 16, kStep = kThreads / kVectors;
            const int row = static_cast<int>(threadIdx.x) / kVectors, vector = static_cast<int>(threadIdx.x) % kVectors;
            ptx::cp_async_16_if(wanted, to + (place(row, vector) + part * kStep * kRowBytes), source(from, part));
        }
    }

    // Any other stage.
    RTK_DEVICE void fetch(ptx::SharedAddress to, const u8* from, int k0, int k_first, int k_last) const {
        if constexpr (kAnyStrides && !kAcross) {
            if (by_element) return fetch_elements(to, k0, k_first, k_last);
        }
        if constexpr (kAcross) {
            fetch_across(to, from, k0, k_last);
        } else {
            fetch_vectors(to, from, k0, k_last);
        }
    }

    // Distance from `from` to that of the next stage.
    RTK_DEVICE i64 stage_stride() const { return kAcross ? static_cast<i64>(kDepth) * pitch * 2 : kRowBytes; }

    // The vector of this thread's row number `part`, or of the last row that exists.
    RTK_DEVICE const u8* source(const u8* from, int part) const {
        constexpr int kVectors = kRowBytes / 16, kStep = kThreads / kVectors;
        static_assert(kStep % 16 == 0, "the swizzle, and the half of a gated product, repeat");
        const bool gated = rows.half != 0;
        const int row = static_cast<int>(threadIdx.x) / kVectors, inside = gated ? row / 16 * 8 + row % 8 : row;
        const int wanted = min(inside + part * (gated ? kStep / 2 : kStep), rows.exist - 1);
        return reinterpret_cast<const u8*>(ptx::mad_wide(static_cast<u32>(wanted), static_cast<u32>(pitch * kBits / 8),
                                                         reinterpret_cast<u64>(from)));
    }

    RTK_DEVICE static u32 place(int row, int vector) {
        if constexpr (kRowBytes == 128) {
            return row * 128 + ((vector ^ reversed_3_bits(row & 7)) << 4);
        } else {
            constexpr int kInLine = 128 / kRowBytes, kVectors = kRowBytes / 16;
            const int line = row / kInLine;
            return line * 128 + (((row % kInLine * kVectors + vector) ^ (line & 7)) << 4);
        }
    }

    RTK_DEVICE void fetch_vectors(ptx::SharedAddress to, const u8* from, int k0, int k_last) const {
        constexpr int kVectors = kRowBytes / 16, kStep = kThreads / kVectors;
        const int row = static_cast<int>(threadIdx.x) / kVectors, vector = static_cast<int>(threadIdx.x) % kVectors;
        const int bytes = min(max((k_last - k0 - vector * kEach) * kBits / 8, 0), 16);
#pragma unroll 1
        for (int i = 0; i < kPerThread; ++i)
            ptx::cp_async_16_partial(to + (place(row, vector) + i * kStep * kRowBytes), bytes == 0 ? data : source(from, i),
                                     bytes);
    }

    RTK_DEVICE void fetch_across(ptx::SharedAddress to, const u8* from, int k0, int k_last) const {
        constexpr int kVectors = kRows / 8, kStep = kThreads / kVectors;
        static_assert(kStep % 8 == 0, "the swizzle repeats");
        const int k = static_cast<int>(threadIdx.x) / kVectors, row = static_cast<int>(threadIdx.x) % kVectors * 8;
        const int inside = rows.half == 0 ? row : row / 16 * 8, bytes = min(max((rows.exist - inside) * 2, 0), 16);
#pragma unroll 1
        for (int i = 0; i < kPerThread; ++i) {
            const int read = k0 + k + i * kStep < k_last ? bytes : 0;
            ptx::cp_async_16_partial(to + (across_place(k, row) + i * kStep * 128),
                                     read == 0 ? data : from + i * kStep * pitch * 2, read);
        }
    }

    RTK_DEVICE static u32 across_place(int k, int row) {
        return row / 64 * (kDepth * 128) + k * 128 + ((row % 64 / 8 ^ reversed_3_bits(k & 7)) << 4);
    }

    // Any strides and alignment: element by element.
    RTK_DEVICE void fetch_elements(ptx::SharedAddress to, int k0, int k_first, int k_last) const {
        constexpr int kVectors = kRowBytes / 16;
#pragma unroll 1
        for (int i = 0; i < kPerThread; ++i) {
            const int index = static_cast<int>(threadIdx.x) + i * kThreads;
            const int row = index / kVectors, vector = index % kVectors;
            const i64 source = rows.source(row);
            Raw<16> raw;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                raw.w[w] = 0u;
#pragma unroll
                for (int e = 0; e < 32 / kBits; ++e) {
                    const i64 k = k0 + vector * kEach + w * (32 / kBits) + e;
                    if (source < 0 || k < k_first || k >= k_last) continue;
                    raw.w[w] |= element(stored_across ? k * pitch + source : source * pitch + k) << (kBits * e);
                }
            }
            ptx::st_shared_16(to + place(row, vector), raw);
        }
    }

    RTK_DEVICE u32 element(i64 at) const {
        if constexpr (kBits == 16) {
            return ptx::ld_keep<2>(data + 2 * at).w[0];
        } else if constexpr (kBits == 8) {
            return ptx::ld_keep<1>(data + at).w[0];
        } else {
            return ptx::ld_keep<1>(data + at / 2).w[0] >> (4 * (at & 1)) & 15u;
        }
    }

    // ---- from shared memory ----------------------------------------------------------------------------------------------

    // For products that need no conversion: two blocks of eight rows from `first` and two chunks of 16 bytes of k, in the
    // order of the registers of a (blocks first) or of b (chunks first).
    template <bool kBlocksFirst>
    RTK_DEVICE static void fragments(u32 (&words)[4], const u8* stage, int first, int chunk) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp, inner = lane / 8 % 2, outer = lane / 16;
        const int row = first + 8 * (kBlocksFirst ? inner : outer), column = chunk + (kBlocksFirst ? outer : inner);
        if constexpr (kAcross) {
            ptx::ldmatrix_x4_trans(words, stage + across_place(column * 8 + lane % 8, row));
        } else {
            ptx::ldmatrix_x4(words, stage + place(row + lane % 8, column));
        }
    }

    // For others: lane 4g + t gets kWords words of row g of each of four blocks of eight rows from `first`, starting at
    // byte (16 * chunk + 4t) * kWords of k.
    template <int kWords>
    RTK_DEVICE static void raw_words(u32 (&words)[4][kWords], const u8* stage, int first, int chunk) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
        if constexpr (kWords == 1) {
            u32 r[4];
            ptx::ldmatrix_x4(r, stage + place(first + lane, chunk));
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i][0] = r[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (kWords == 2) {
                    const uint2 two =
                        *reinterpret_cast<const uint2*>(stage + place(first + 8 * i + g, chunk * 2 + t / 2) + t % 2 * 8);
                    words[i][0] = two.x, words[i][1] = two.y;
                } else {
                    const uint4 four = *reinterpret_cast<const uint4*>(stage + place(first + 8 * i + g, chunk * 4 + t));
                    words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
                }
            }
        }
    }
};

}  // namespace rtk
