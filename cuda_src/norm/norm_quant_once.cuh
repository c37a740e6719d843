// How the blocks of norm/norm_quant_once.cu make 1/rms of 128 rows together.
//
// A strip of 128 rows is `wide` pairs of tiles, in as many blocks. Each adds up the squares of its pair and writes 128 sums,
// of which every one of `sharers` of them reads a share of 128 / sharers rows from all blocks of the strip. It makes their
// 1/rms, which all of them read. Every number is in a word of 8 bytes with the launch's tag, so whoever reads it knows
// whether it is there already: no fences and no counters. Sums are added in an order of their own, so results do not
// depend on who comes first.
#pragma once
#include "norm/norm_quant_ring.cuh"
#include "norm/norm_quant_stats.cuh"
#include "ptx/mma.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/words.cuh"

namespace rtk {

inline constexpr int kAdders = 2;  // warps that add up squares
inline constexpr int kAhead = 4;   // pairs that a block has at once, in slots and registers

struct OnceShared : RingShared<6, 1> {
    u64 published[kAhead];   // the pair's sums have been written
    u64 shared_out[kAhead];  // and 1/rms of the block's share of them
    float sums[kSide];

    RTK_DEVICE void init() {
        RingShared<6, 1>::init(kAdders);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&published[i]), kAdders);
            ptx::mbarrier_init(ptx::shared_address(&shared_out[i]), 1);
        }
    }
};

using OnceWalk = RingWalk<2>;

// Words in global memory: [0] the tag of the launch before and how many blocks of this one have ended, [16...] 1/rms of
// all rows, then sums [strips][sharers][wide][share].
struct OnceExchange {
    u64* words;
    int wide, share;  // share: rows, a power of two from 2 to 64
    int rows;
    u32 tag = 0;

    RTK_DEVICE void begin() { tag = *reinterpret_cast<volatile u32*>(words) + 1; }

    RTK_DEVICE u64* rstd_of_strip(int strip) const { return words + 16 + static_cast<i64>(strip) * kSide; }
    // What sharer `sharer` of a strip reads.
    RTK_DEVICE u64* sums_of_share(const OnceWalk& walk, int strip, int sharer) const {
        return rstd_of_strip(static_cast<int>(walk.strips)) + static_cast<i64>(strip) * kSide * wide + sharer * share * wide;
    }
    RTK_DEVICE bool shares(int place) const { return place * share < kSide; }
    RTK_DEVICE u64 word(float v) const { return static_cast<u64>(tag) << 32 | __float_as_uint(v); }
    RTK_DEVICE bool there(const ptx::Words& w) const {
        return static_cast<u32>(w.first >> 32) == tag && static_cast<u32>(w.second >> 32) == tag;
    }
    RTK_DEVICE static float value(u64 word) { return __uint_as_float(static_cast<u32>(word)); }

    // Brings what the block will read about one of its pairs to L2: else it would be asked for from memory, behind tiles.
    RTK_DEVICE void prefetch(const OnceWalk& walk, int pair) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        int down, across;
        if (!walk.find(2 * pair, down, across)) return;
        if (lane < 16) {
            if (shares(across / 2) && lane * 16 < share * wide)
                ptx::prefetch_l2(sums_of_share(walk, down, across / 2) + lane * 16);
        } else if (lane < 24) {
            ptx::prefetch_l2(rstd_of_strip(down) + (lane - 16) * 16);
        }
    }

    // The last block to end leaves everything as the next launch wants it.
    RTK_DEVICE void end() const {
        u32* head = reinterpret_cast<u32*>(words);
        if (atomicAdd(head + 1, 1u) == gridDim.x - 1) head[0] = tag, head[1] = 0u;
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

// Sums of squares of 64 rows of a tile, to `sums`, or added to what is there: 16 rows times themselves by tensor cores, of
// which the diagonal counts. One warp; x is at the first of the rows.
template <typename T>
RTK_DEVICE void add_squares(const u8* x, float* sums, bool added) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4, row = lane % 16, piece = lane / 16;
    const bool diagonal = lane % 4 == g / 2, odd = g % 2 != 0;
    const u8* from = x + row * 128;
    auto load = [&](int k, u32(&a)[4]) {  // 16 rows, columns 16 * k of 128
        ptx::ldmatrix_x4(a, from + k / 4 * kBoxBytes + ((k % 4 * 2 + piece ^ row % 8) << 4));
    };
    u32 a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) load(k, a[k]);
    sums += g;
#pragma unroll 1
    for (int m = 0; m < 64; m += 16, sums += 16) {
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
            if (added) upper += sums[0], lower += sums[8];
            sums[0] = upper, sums[8] = lower;
        }
    }
}

// A sharer's sums as they come: lane l has rows 2l, 2l + 1 (mod share) of every 32 / share * 2 blocks.
struct OnceSums {
    ptx::Words w[4];

    // Asks for all of them, or again for those that were not there.
    RTK_DEVICE void ask(const OnceExchange& exchange, const u64* from, bool again) {
        const int first = static_cast<int>(threadIdx.x) % kWarp * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * 64 < exchange.share * exchange.wide && !(again && exchange.there(w[i])))
                w[i] = ptx::ld_words(from + first + i * 64);
    }

    RTK_DEVICE bool complete(const OnceExchange& exchange) const {
        const int first = static_cast<int>(threadIdx.x) % kWarp * 2;
        bool all = true;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * 64 < exchange.share * exchange.wide) all = all && exchange.there(w[i]);
        return __all_sync(0xffffffffu, all);
    }

    // 1/rms of the share, to the other blocks and to `rstd`.
    RTK_DEVICE void share_out(const OnceExchange& exchange, int strip, int sharer, float cols, float eps, float* rstd) const {
        const int first = static_cast<int>(threadIdx.x) % kWarp * 2;
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * 64 < exchange.share * exchange.wide)
                a += exchange.value(w[i].first), b += exchange.value(w[i].second);
#pragma unroll 1
        for (int mask = exchange.share / 2; mask < kWarp; mask *= 2) {
            a += __shfl_xor_sync(0xffffffffu, a, mask);
            b += __shfl_xor_sync(0xffffffffu, b, mask);
        }
        if (first >= exchange.share) return;
        a = rstd_of(a, cols, eps), b = rstd_of(b, cols, eps);
        const int row = sharer * exchange.share + first;
        ptx::st_words(exchange.rstd_of_strip(strip) + row, {exchange.word(a), exchange.word(b)});
        const i64 place = static_cast<i64>(strip) * kSide + row;
        if (place < exchange.rows) rstd[place] = a, rstd[place + 1] = b;  // rows are even
    }
};

}  // namespace rtk
