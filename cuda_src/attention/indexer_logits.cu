// Scores by which DeepSeek's sparse attention chooses keys: out[t][s] = key_scales[s] sum over heads h of
// weights[t][h] relu(q[t][h] . k[s]) for starts[t] <= s < ends[t], else -inf; for tokens first.. + tokens - 1.
//
// A block owns 128 keys and up to `each` tokens. A warp holds 16 keys in registers as the left operand; the heads of a token
// come in tiles of 64, as 16-bit numbers (e4m3 codes are converted, which is exact). The next tile is loaded while one is
// multiplied. With `table`, key s of a token is row table[token][s / page] page + s % page of k, and `each` is 1.
// Grid: tiles of 128 keys, tokens / each.
#include "attention/mma_tile.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kIndexerKeys = 128, kIndexerHeads = 64, kIndexerWidth = 128;

// The 16-bit type that products of T have.
template <typename T>
struct MmaOperand {
    using Type = bf16;
};
template <>
struct MmaOperand<fp16> {
    using Type = fp16;
};

template <typename T>
__global__ void __launch_bounds__(256, 2)
    indexer_logits(const T* q, const T* k, const float* weights, const float* key_scales, const i32* starts, const i32* ends,
                   const i32* table, float* out, i64 first, i64 tokens, i64 each, i64 heads, i64 keys, i64 width, i64 q_row,
                   i64 q_head, i64 k_row, i64 page, i64 table_row) {
    using Half = typename MmaOperand<T>::Type;
    using Tile = MmaTile<kIndexerWidth>;
    constexpr int kVectors = kIndexerWidth / 8, kQueryVectors = kIndexerHeads * kVectors / 256;
    extern __shared__ __align__(128) u8 shared[];
    u8* const tiles = shared + kIndexerKeys * Tile::kPitch;  // two of queries
    __shared__ float factors[2][kIndexerHeads];

    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const i64 key0 = static_cast<i64>(blockIdx.x) * kIndexerKeys, token0 = static_cast<i64>(blockIdx.y) * each;
    const int here = static_cast<int>(min(tokens - token0, each)), groups = (static_cast<int>(heads) + kIndexerHeads - 1) / kIndexerHeads;
    auto row_of = [&](i64 key) {
        return table == nullptr ? key : table[(first + token0) * table_row + key / page] * page + key % page;
    };
    auto interval = [&](int token, i64& from, i64& to) {
        from = starts == nullptr ? 0 : max(static_cast<i64>(starts[first + token0 + token]), i64{0});
        to = ends == nullptr ? keys : min(static_cast<i64>(ends[first + token0 + token]), keys);
    };
    auto meets = [&](int token) {
        i64 from, to;
        interval(token, from, to);
        return from < key0 + kIndexerKeys && to > key0;
    };
    i64 last = 0;  // keys from here on are not read: pages may not exist
    for (int token = 0; token < here; ++token) {
        i64 from, to;
        interval(token, from, to);
        last = max(last, to);
    }
    for (int i = thread; i < kIndexerKeys * kVectors; i += 256) {
        const int row = i / kVectors, vector = i % kVectors;
        float f[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (key0 + row < last && vector * 8 < width) load_keep<T, 8>(k + row_of(key0 + row) * k_row + 8 * vector, f);
        *reinterpret_cast<Raw<16>*>(shared + Tile::offset(row, vector)) = pack<Half, 8>(f);
    }
    __syncthreads();
    u32 a[kIndexerWidth / 16][4];
#pragma unroll
    for (int step = 0; step < kIndexerWidth / 16; ++step) Tile::left(a[step], shared, 16 * warp, step, lane);

    Raw<8 * sizeof(T)> next[kQueryVectors];
    float next_factor = 0.0f;
    auto load = [&](int item) {  // token and group of heads
        const int thread = static_cast<int>(this_thread());
        const int token = item / groups, head0 = item % groups * kIndexerHeads;
        const i64 from = first + token0 + token;
#pragma unroll
        for (int i = 0; i < kQueryVectors; ++i) {
            const int place = thread + 256 * i, head = head0 + place / kVectors, vector = place % kVectors;
            clear(next[i]);
            if (head < heads && vector * 8 < width) next[i] = load_raw<T, 8, false>(q + from * q_row + head * q_head + 8 * vector);
        }
        if (thread < kIndexerHeads) next_factor = head0 + thread < heads ? weights[from * heads + head0 + thread] : 0.0f;
    };
    float sum[2] = {0.0f, 0.0f};
    load(0);
#pragma unroll 1
    for (int item = 0; item < here * groups; ++item) {
        u8* const tile = tiles + (item & 1) * (kIndexerHeads * Tile::kPitch);
        const int thread = static_cast<int>(this_thread());
#pragma unroll
        for (int i = 0; i < kQueryVectors; ++i) {
            const int place = thread + 256 * i;
            float f[8];
            unpack<T, 8>(next[i], f);
            *reinterpret_cast<Raw<16>*>(tile + Tile::offset(place / kVectors, place % kVectors)) = pack<Half, 8>(f);
        }
        if (thread < kIndexerHeads) factors[item & 1][thread] = next_factor;
        __syncthreads();
        if (item + 1 < here * groups) load(item + 1);
        const int token = item / groups;
        if (meets(token)) {
#pragma unroll 2
            for (int part = 0; part < 4; ++part) {  // 16 heads at a time: registers
                float s[2][4];
                clear_sums(s);
#pragma unroll
                for (int step = 0; step < kIndexerWidth / 16; ++step) {
                    u32 b[4];
                    Tile::right(b, tile, 16 * part, step, lane);
                    mma_step<Half>(s[0], a[step], b[0], b[1]);
                    mma_step<Half>(s[1], a[step], b[2], b[3]);
                }
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int head = 16 * part + 8 * n + lane % 4 * 2 + e % 2;
                        sum[e / 2] += (s[n][e] < 0.0f ? 0.0f : s[n][e]) * factors[item & 1][head];
                    }
            }
        }
        if (item % groups + 1 < groups) continue;
        i64 from, to;
        interval(token, from, to);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i64 key = key0 + 16 * warp + lane / 4 + 8 * r;
            const float total = quad_sum(sum[r]);
            sum[r] = 0.0f;
            if (lane % 4 != 0 || key >= keys) continue;
            float value = negative_infinity();
            if (key >= from && key < to) value = key_scales == nullptr ? total : total * key_scales[row_of(key)];
            out[(token0 + token) * keys + key] = value;
        }
    }
}

}  // namespace rtk
