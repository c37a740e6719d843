// How the blocks of norm/norm_fp8_single_read.cu compute 1/rms of 128 rows together.
//
// A strip of 128 rows is `tiles_across` pairs of tiles, in as many blocks. Each adds its sums of squares to those of
// the strip in global memory, as integers, so that the order does not matter: a sum is two words, one of units and one
// of 2^-48ths, with the number of blocks that have added to it in the upper eight bits. That count tells a reader
// whether the sum is complete: no fences, no flags. The last block to read resets it to zero.
#pragma once
#include "common/pressure.cuh"
#include "norm/norm_fp8_ring.cuh"
#include "norm/norm_fp8_stats.cuh"
#include "ptx/mma.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/words.cuh"

namespace rtk {

inline constexpr int kAdders = 2;  // warps that sum squares
inline constexpr int kPairsInFlight = 4;  // pairs of tiles that a block has in slots and registers

struct SingleReadShared : RingShared<6, 1> {
    u64 published[kPairsInFlight];  // the block has added the sums of its pair
    float sums[kSide];

    RTK_DEVICE void init() {
        RingShared<6, 1>::init(kAdders);
#pragma unroll
        for (int i = 0; i < kPairsInFlight; ++i) ptx::mbarrier_init(ptx::shared_address(&published[i]), kAdders);
    }
};

using SingleReadWalk = RingWalk<2>;

// Words in global memory, zero before and after: sums [strips][128][2], then how many blocks have read those of a
// strip. Rows are ordered so that those of a warp that sums squares are contiguous.
struct SingleReadExchange {
    u64* words;
    const SingleReadWalk& walk;
    bool small_counts;  // sums below 2^-25 are not small compared with epsilon

    static constexpr int kCount = 56;                    // from this bit on
    static constexpr u64 kValue = (1ull << kCount) - 1;  // below it
    static constexpr u64 kOdd = 1ull << 48;              // added in the word of units in place of a sum that would not fit
    static constexpr float kMaxSum = 0x1p41f, kMinSum = 0x1p-25f, kParts = 0x1p48f;
    static constexpr u64 kMaxTilesAcross = 128;
    static_assert(kMaxTilesAcross * kOdd < kValue && kMaxTilesAcross * static_cast<u64>(kParts) < kValue, "sums stay below the count");
    static_assert(kMaxTilesAcross * static_cast<u64>(kMaxSum) <= kOdd, "a sum below kOdd has no odd part");
    static_assert(kMaxTilesAcross < 256, "the count has eight bits");

    RTK_DEVICE u64* sum(int strip, int place) const { return words + (static_cast<i64>(strip) * kSide + place) * 2; }
    RTK_DEVICE static int row_at(int place) { return place % 64 / 4 * 8 + place / 64 * 4 + place % 4; }

    RTK_DEVICE void add(int strip, int place, float value) const {
        u64 units = kOdd, parts = 0;
        if (value < kMaxSum && !(small_counts && value > 0.0f && value < kMinSum)) {
            units = static_cast<u64>(value);
            parts = static_cast<u64>((value - static_cast<float>(units)) * kParts);
        }
        atomicAdd(sum(strip, place), units | 1ull << kCount);
        atomicAdd(sum(strip, place) + 1, parts | 1ull << kCount);
    }

    // Prefetches the sums of one of the block's pairs into L2: otherwise the additions would wait for memory, behind
    // tiles.
    RTK_DEVICE void prefetch(int pair) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        int down, across;
        if (lane < kSide / 8 && walk.find(2 * pair, down, across)) ptx::prefetch_l2(sum(down, lane * 8));
    }

    RTK_DEVICE bool complete(const ptx::Words& w) const {
        return static_cast<u32>(w.first >> kCount) == walk.tiles_across &&
               static_cast<u32>(w.second >> kCount) == walk.tiles_across;
    }
    RTK_DEVICE static bool odd(const ptx::Words& w) { return (w.first & kValue) >= kOdd; }
    RTK_DEVICE static float value(const ptx::Words& w) {
        return static_cast<float>(static_cast<double>(w.first & kValue) + static_cast<double>(w.second & kValue) * 0x1p-48);
    }

    RTK_DEVICE u32* readers(int strip) const {
        return reinterpret_cast<u32*>(sum(static_cast<int>(walk.strips), 0)) + strip;
    }
    // Called by one warp that has read a strip: lane 0 gets the number of earlier readers, which takes a while; the
    // last one resets the sums.
    RTK_DEVICE u32 leave(int strip) const {
        return threadIdx.x % kWarp == 0 ? atomicAdd(readers(strip), 1u) : 0;
    }
    RTK_DEVICE void clear_behind(int strip, u32 before) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        if (__shfl_sync(0xffffffffu, before, 0) != walk.tiles_across - 1) return;
        for (int place = lane; place < kSide; place += kWarp) ptx::st_words(sum(strip, place), {0, 0});
        if (lane == 0) *readers(strip) = 0;
    }
};

template <typename T>
RTK_DEVICE void add_products(float (&d)[4], u32 a0, u32 a1, u32 b);
template <>
RTK_DEVICE void add_products<bf16>(float (&d)[4], u32 a0, u32 a1, u32 b) {
    ptx::mma_m16n8k8_bf16(d, a0, a1, b);
}
template <>
RTK_DEVICE void add_products<fp16>(float (&d)[4], u32 a0, u32 a1, u32 b) {
    ptx::mma_m16n8k8_f16(d, a0, a1, b);
}

// Sums of squares of 64 rows of a tile, at consecutive places, stored to `sums` or added to it: tensor cores multiply
// 16 rows by themselves, and only the diagonal is used. One warp; x points at the first of the rows.
template <typename T>
RTK_DEVICE void add_squares(const u8* x, float* sums, bool added) {
    const int lane = static_cast<int>(this_thread()) % kWarp;
    const int g = lane / 4, row = lane % 16, half = lane / 16;
    const bool diagonal = lane % 4 == g / 2, odd = g % 2 != 0;
    const u8* from = x + row * 128;
    auto load = [&](int k, u32(&a)[4]) {  // 16 rows, columns 16 * k of 128
        ptx::ldmatrix_x4(a, from + k / 4 * kBoxBytes + ((k % 4 * 2 + half ^ row % 8) << 4));
    };
    u32 a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) load(k, a[k]);
    sums += g * 8;
#pragma unroll 1
    for (int m = 0; m < 64; m += 16, ++sums) {
        float d[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) d[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            u32(&f)[4] = a[k % 4];
            add_products<T>(d[0], f[0], f[1], f[0]);
            add_products<T>(d[1], f[0], f[1], f[1]);
            add_products<T>(d[2], f[2], f[3], f[2]);
            add_products<T>(d[3], f[2], f[3], f[3]);
            if (k == 4) from += m < 48 ? 16 * 128 : 0;  // the next rows, or anything
            load(k < 4 ? k + 4 : k - 4, f);
        }
        float upper = odd ? d[0][1] + d[2][1] : d[0][0] + d[2][0], lower = odd ? d[1][3] + d[3][3] : d[1][2] + d[3][2];
        if (diagonal) {
            if (added) upper += sums[0], lower += sums[64];
            sums[0] = upper, sums[64] = lower;
        }
    }
}

// A row's sum of squares by one warp, from x in memory: for sums that are too large, too small or not finite.
template <typename T>
RTK_DEVICE float row_squares(const T* x, int cols) {
    float sum = 0.0f;
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x) % kWarp * 8; c < cols; c += kWarp * 8) {
        float v[8];
        unpack<T, 8>(ptx::ld_keep<16>(x + c), v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    }
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    return sum;
}

}  // namespace rtk
