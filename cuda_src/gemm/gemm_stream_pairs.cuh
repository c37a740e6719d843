// Weights, products and activations of a warp in decoding steps of 5 to 32 tokens (gemm_stream.cu).
//
// A unit of work is a pair of octets, the 16 rows of operand A of m16n8k16: lane 4g + t has the 16 bytes t of row g of both.
// Eight tokens are the columns of B: lane 4g + t has vector t of token g. So the weights of a step are read from shared
// memory once for all tokens, and those of a token once for 16 weight rows.
//
// A norm's reciprocal root mean square multiplies the finished sums, so that no thread waits for the squares of a row.
#pragma once
#include "gemm/gemm_decode_rows.cuh"
#include "gemm/gemm_stream_lanes.cuh"

namespace rtk {

inline constexpr int kStreamTokens = 32;  // at the most

// EIGHTS: of tokens.
template <typename Codes, typename Math, int EIGHTS>
struct StreamPairs {
    using Operand = typename StreamOperand<Codes, Math>::Type;
    using Weights = WeightCodes<Codes, Operand>;
    static constexpr bool kCodes = Weights::kBits < 16;
    static constexpr int kOctets = 2, kTokenGroups = EIGHTS;
    static constexpr int kParts = 16 / Weights::kBits;  // of eight weights, that a lane has of a step
    static constexpr int kDepth = 32 * kParts;          // of k, in a step
    static constexpr int kGroupSteps = 128 / kDepth;    // that share a scale along k
    static constexpr int kMany = kParts == 4 ? 1 : 2;   // steps at a time
    using Sums = float[EIGHTS][4];

    Sums total;
    u32 flags[2];

    RTK_DEVICE static void clear(Sums& sums) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[e][i] = 0.0f;
    }

    RTK_DEVICE void clear() {
        flags[0] = flags[1] = 0u;
        clear(total);
    }

    // Products of COUNT steps. `weights`: this lane's vector of the first one; x[e] + x_at: its activations of eight e;
    // `scale`: of the first group of codes, null for 1.
    template <int COUNT>
    RTK_DEVICE void steps(const CodeOptions& options, ptx::SharedAddress weights, const ptx::SharedAddress (&x)[EIGHTS], int x_at,
                          const float* scale) {
        static_assert(COUNT <= kGroupSteps || !kCodes, "one group at a time");
        Sums part;
        if (kCodes && scale != nullptr) clear(part);
        Raw<16> raw[COUNT][2];
#pragma unroll
        for (int s = 0; s < COUNT; ++s)
#pragma unroll
            for (int o = 0; o < 2; ++o) raw[s][o] = ptx::ld_shared_16(weights + (1024 * s + 512 * o));
        auto add = [&](Sums& sums) {
#pragma unroll
            for (int s = 0; s < COUNT; ++s) {
                u32 low[kParts][4], high[kParts][4];
                stream_pairs<Weights>(raw[s][0], options, flags[0], low);
                stream_pairs<Weights>(raw[s][1], options, flags[1], high);
#pragma unroll
                for (int j = 0; j < kParts; ++j)
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        const Raw<16> b = ptx::ld_shared_16(x[e] + (x_at + s * (2 * kDepth) + j * 64));
                        mma_pair<Operand>(sums[e], {low[j][0], high[j][0], low[j][1], high[j][1]}, {b.w[0], b.w[1]});
                        mma_pair<Operand>(sums[e], {low[j][2], high[j][2], low[j][3], high[j][3]}, {b.w[2], b.w[3]});
                    }
            }
        };
        if (!kCodes || scale == nullptr) {
            add(total);
        } else {
            add(part);
            const float of_rows[2] = {scale[0], scale[8 * kSlotGroups]};
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[e][i] = fmaf(part[e][i], of_rows[i / 2], total[e][i]);
        }
    }

    RTK_DEVICE void finish() {}

    // NaN for rows with a NaN weight that the conversion does not preserve.
    RTK_DEVICE void settle_flags(int g) {
        if constexpr (Weights::kFlagged) {
#pragma unroll
            for (int o = 0; o < 2; ++o)
                if (stream_flagged(flags[o], g)) {
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) total[e][2 * o] = total[e][2 * o + 1] = __uint_as_float(0x7fffffffu);
                }
        }
    }

    // Writes the sums of up to two octets, [token][row] each, `octet_sums` apart.
    RTK_DEVICE void put(float* sums, int octet_sums, int octets, int m, int g, int t) const {
#pragma unroll
        for (int o = 0; o < 2; ++o)
            if (o < octets) {
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int token = 8 * e + 2 * t + i;
                        if (token < m) sums[o * octet_sums + token * 8 + g] = total[e][2 * o + i];
                    }
            }
    }
};

// Activations of the block's part of k in shared memory, multiplied by the norm's weight. A warp has every eighth token.
// Where numbers become fp16, or fp16 is multiplied by weights, a row is multiplied by the power of two that moves its largest
// magnitude to [2^13, 2^14), as in gemm_stream_rows.cuh.
template <typename T, typename Lanes>
struct StreamPairRows {
    static constexpr int kParts = Lanes::kParts, kEights = Lanes::kTokenGroups;
    static constexpr bool kMoved = is_same<fp16, typename Lanes::Operand>::value;
    using Place = DecodeRows<T, kParts>;
    const u8* x;
    i64 pitch;  // bytes
    int m, k;
    int first, vectors;  // of the block's part: eight elements each, those past k are zeros
    ptx::SharedAddress to;
    int to_pitch;
    const u8* gain;  // in shared memory, for the block's part; null without a norm
    float offset, eps;

    RTK_DEVICE static int lane_token(int e, int g) { return 8 * e + g; }
    RTK_DEVICE static int lane_place(int, int t) { return t * 16; }

    RTK_DEVICE void weigh(int v, float (&value)[8]) const {
        float weight[8];
        unpack<T, 8>(ptx::ld_shared_16(ptx::shared_address(gain) + v * 16), weight);
#pragma unroll
        for (int e = 0; e < 8; ++e) value[e] *= offset + weight[e];
    }

    // Copies the block's part. `squares[token]`: sums of squares of it; `units[token]`: what sums of a moved row are to
    // be multiplied by.
    RTK_DEVICE void prepare(float* squares, float* units) const {
        constexpr int kAhead = 8 / kEights;  // vectors of a token that a lane loads at a time
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const bool moves = kMoved && (gain != nullptr || !is_same<T, fp16>::value);
        float square[kEights] = {}, peak[kEights] = {};
#pragma unroll 1
        for (int start = lane; start < vectors; start += 32 * kAhead) {
            Raw<16> raw[kEights][kAhead];
#pragma unroll
            for (int i = 0; i < kEights; ++i)
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    const int token = warp + kDecodeWarps * i, v = start + 32 * a;
                    clear(raw[i][a]);
                    if (token < m && v < vectors && 8 * (first + v) < k) raw[i][a] = decode_load(x + token * pitch + (first + v) * 16);
                }
#pragma unroll
            for (int i = 0; i < kEights; ++i)
#pragma unroll
                for (int a = 0; a < kAhead; ++a) {
                    const int token = warp + kDecodeWarps * i, v = start + 32 * a;
                    if (token >= m || v >= vectors) continue;
                    if (gain != nullptr || moves) {
                        float value[8];
                        unpack<T, 8>(raw[i][a], value);
#pragma unroll
                        for (int e = 0; e < 8; ++e) square[i] = fmaf(value[e], value[e], square[i]);
                        if (gain != nullptr) weigh(v, value);
#pragma unroll
                        for (int e = 0; e < 8; ++e) peak[i] = fmaxf(peak[i], fabsf(value[e]));
                        if (!moves) raw[i][a] = pack<T, 8>(value);
                    }
                    ptx::st_shared_16(to + (token * to_pitch + Place::place(v)), raw[i][a]);
                }
        }
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            const int token = warp + kDecodeWarps * i;
            const float sum = warp_reduce<Sum>(square[i]);
            if (lane == 0 && token < m) squares[token] = sum;
            if constexpr (kMoved) {
                float unit = 1.0f;
                if (moves) {
                    const u32 exponent = __float_as_uint(warp_reduce<MaxMagnitude>(peak[i])) >> 23 & 255u;
                    const u32 moved = min(267u - exponent, 253u);  // 140 - exponent, as an exponent
                    unit = __uint_as_float(254u - moved << 23);
                    if (token < m) move(token, __uint_as_float(moved << 23));
                }
                if (lane == 0 && token < m) units[token] = unit;
            }
        }
    }

    // Multiplies what this warp has stored by the norm's weight and by `factor`.
    RTK_DEVICE void move(int token, float factor) const {
        __syncwarp();
#pragma unroll 2
        for (int v = threadIdx.x % 32; v < vectors && 8 * (first + v) < k; v += 32) {
            const ptx::SharedAddress own = to + (token * to_pitch + Place::place(v));
            float value[8];
            unpack<T, 8>(ptx::ld_shared_16(own), value);
            if (gain != nullptr) weigh(v, value);
#pragma unroll
            for (int e = 0; e < 8; ++e) value[e] *= factor;
            ptx::st_shared_16(own, pack<fp16, 8>(value));
        }
    }
};

// The lanes and rows of a launch for up to TOKENS tokens.
template <typename Codes, typename Math, int TOKENS>
struct StreamKind {
    using Lanes = StreamPairs<Codes, Math, TOKENS / 8>;
    using Rows = StreamPairRows<Math, Lanes>;
};

}  // namespace rtk
