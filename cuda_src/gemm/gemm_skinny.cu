// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to 64 rows of a: a product that
// reads its weights b at the speed of memory. Codes of 16, 8 and 4 bits become 16-bit operands of mma.sync in registers
// (gemm_skinny_weights.cuh), where weights are the 16 rows and tokens the 8 columns; sums are fp32.
//
// Work is cut into units: a tile of 128 weight rows (gated: 64 and their counterparts) times a stage of k (128 bytes of a
// row). The units of all tiles in order are dealt to the blocks in equal consecutive shares, so that every block streams the
// same number of bytes through one ring of stages (gemm_skinny_stage.cuh) without a break where a tile ends. A tile that
// several blocks share is put together by the one that finishes last, from parts in global memory, in the order of k: the
// result does not depend on who that is.
//
// The 8 warps are 4 along the rows, with two products of 16 rows each, times 2 halves of every stage. Sums of a stage or of a
// scale group, whatever is shorter, leave the tensor cores for fp32 registers, times the scales of that group; sums of integers
// for int32 ones. Results are rounded at the end, and only there.
//
// Shared memory: sums [8 tiles][kSkinnySumPitch] words, two buffers of converted activations if a is quantised, the stages.
#include "gemm/gemm_skinny_finish.cuh"
#include "gemm/gemm_skinny_stage.cuh"

namespace rtk {

RTK_DEVICE float skinny_group_scale(const u8* words, int row, int group, int kind) {
    if ((kind & 3) == kScalesFp32) return reinterpret_cast<const float*>(words)[group * kSkinnyRows + row];
    const u32 byte = reinterpret_cast<const u32*>(words)[(group >> 2) * kSkinnyRows + row] >> (8 * (group & 3)) & 0xffu;
    return __uint_as_float(byte == 0xffu ? 0x7fffffffu : byte == 0u ? 0x00400000u : byte << 23);  // 2^(byte - 127)
}

// The sums of a warp: 32 weight rows, all tokens, half of every stage.
template <typename Codes, typename Math, int TILES>
struct SkinnyWarp {
    using Weights = WeightCodes<Codes, Math>;
    using Product = SkinnyProduct<Weights::kBits, TILES>;
    static constexpr int kSteps = Product::kDepth / 64;  // of 32, in half a stage
    static constexpr int kPair = TILES > 1 ? 2 : 1;
    static constexpr int kUnroll = Weights::kBits == 8 ? 2 : 1;  // what was faster; others have more steps, or more registers

    int lane, rows, half;  // the first of its rows in the tile, its half of the stages
    int tiles;             // of tokens that exist
    bool folded;           // scales of the weights are part of the operands
    float part[2][TILES][4], total[2][TILES][4];
    u32 flags[2][2];

    RTK_DEVICE void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            flags[r][0] = flags[r][1] = 0u;
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) part[r][j][i] = total[r][j][i] = 0.0f;
        }
    }

    // One stage. `fragments`: its activations; `group_shift`: 2^group_shift of k share a scale of the weights, if that is
    // less than a stage; `period`: steps until sums are promoted, a power of two, or 0 if no scale varies along k: the tensor
    // cores then add up a whole tile.
    RTK_DEVICE void work(const Product& product, const CodeOptions& options, const u8* stage, const u8* fragments,
                         const u8* scales, int group_shift, int period, bool integer) {
        const u8* own_rows = stage + (rows + lane / 4) * kSkinnyRowBytes + lane % 4 * Weights::kBits;
        const u8* own_fragments = fragments + half * (kSteps * TILES * 512) + lane * 16;
#pragma unroll kUnroll
        for (int i = 0; i < kSteps; ++i) {
            const u8* codes = own_rows + Product::step_place(lane / 4, half * kSteps + i);
            u32 left[2][2][4];  // [16 rows][product]
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) decode(options, codes, scales, half * kSteps + i, r, h, left[r]);
#pragma unroll
            for (int j = 0; j < TILES; j += kPair) {  // two tiles at a time, so that their products overlap
                if (TILES > kPair && j >= tiles) break;
                uint4 right[kPair];
#pragma unroll
                for (int c = 0; c < kPair; ++c)
                    right[c] = *reinterpret_cast<const uint4*>(own_fragments + (i * TILES + j + c) * 512);
#pragma unroll
                for (int c = 0; c < kPair; ++c)
#pragma unroll
                    for (int r = 0; r < 2; ++r) mma_pair<Math>(part[r][j + c], left[r][0], {right[c].x, right[c].y});
#pragma unroll
                for (int c = 0; c < kPair; ++c)
#pragma unroll
                    for (int r = 0; r < 2; ++r) mma_pair<Math>(part[r][j + c], left[r][1], {right[c].z, right[c].w});
            }
            if (period != 0 && (i == kSteps - 1 || (i + 1) % period == 0))
                promote(product, scales, (half * kSteps + i) * 32 >> group_shift, Product::kDepth > 128 ? half : 0, integer);
        }
    }

    // Rows whose weights had a NaN that its format's conversion does not keep.
    RTK_DEVICE void settle_flags() {
        if constexpr (Weights::kFlagged) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 found = flags[r][h];
                    found |= __shfl_xor_sync(0xffffffffu, found, 1);
                    found |= __shfl_xor_sync(0xffffffffu, found, 2);
                    if ((found & 0x80808080u) == 0u) continue;
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
                        total[r][j][2 * h] = total[r][j][2 * h + 1] = __uint_as_float(0x7fffffffu);
                }
        }
    }

    // To sums[token][row], written or added.
    RTK_DEVICE void put(float* sums, bool added, bool integer) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (TILES > 1 && j >= tiles) break;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float* p = sums + (8 * j + 2 * t + i % 2) * kSkinnySumPitch + rows + 16 * r + 8 * (i / 2) + g;
                    *p = added ? plus(*p, total[r][j][i], integer) : total[r][j][i];
                }
        }
    }

    RTK_DEVICE static float plus(float x, float y, bool integer) {
        return integer ? __int_as_float(__float_as_int(x) + __float_as_int(y)) : x + y;
    }

    // Sums of the tensor cores, times the scales of their group, to the totals.
    RTK_DEVICE void promote(const Product& product, const u8* scales, int group_b, int group_a, bool integer) {
        if (integer) {
            take([&](float total, float part, int, int, int) {
                return __int_as_float(__float_as_int(total) + __float2int_rn(part));
            });
            return;
        }
        const int words_b = product.scale_b.words;
        float of_row[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        if (words_b != 0 && !folded) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    of_row[r][h] = skinny_group_scale(scales, rows + lane / 4 + 16 * r + 8 * h, group_b, product.scale_b.kind);
        }
        if (product.scale_a.words == 0) {
            take([&](float total, float part, int r, int, int i) { return fmaf(part, of_row[r][i / 2], total); });
            return;
        }
        const float* of_tokens = reinterpret_cast<const float*>(scales + words_b * (kSkinnyRows * 4)) +
                                 group_a * Product::kTokens + lane % 4 * 2;
        take([&](float total, float part, int r, int j, int i) {
            return fmaf(part, of_row[r][i / 2] * of_tokens[8 * j + i % 2], total);
        });
    }

   private:
    // Weights of rows 16 r + 8 h + g of this warp, of both products of a step; `codes`: those of row g.
    RTK_DEVICE void decode(const CodeOptions& options, const u8* codes, const u8* scales, int step, int r, int h,
                           u32 (&left)[2][4]) {
        constexpr int kBits = Weights::kBits;
        const u8* p = codes + (16 * r + 8 * h) * kSkinnyRowBytes;
        Raw<kBits> raw;
        if constexpr (kBits == 16) {
            const uint4 words = *reinterpret_cast<const uint4*>(p);
            raw.w[0] = words.x, raw.w[1] = words.y, raw.w[2] = words.z, raw.w[3] = words.w;
        } else if constexpr (kBits == 8) {
            const uint2 words = *reinterpret_cast<const uint2*>(p);
            raw.w[0] = words.x, raw.w[1] = words.y;
        } else {
            raw.w[0] = *reinterpret_cast<const u32*>(p);
        }
        u32 scale = 0u;
        if constexpr (Weights::kScaled) {
            const int row = rows + lane / 4 + 16 * r + 8 * h;
            u32 code = 0x38u;  // 1
            if (folded)
                code = reinterpret_cast<const u32*>(scales)[step / 2 * kSkinnyRows + row] >> (16 * (step % 2) + lane % 4 / 2 * 8);
            scale = skinny_scale_pair<Math>(code);
        }
        if constexpr (Weights::kFlagged) flags[r][h] = Weights::flag(flags[r][h], raw);
        u32 pair[4];
        Weights::pairs(raw, scale, options, pair);
        left[0][h] = pair[0], left[0][h + 2] = pair[1], left[1][h] = pair[2], left[1][h + 2] = pair[3];
    }

    // total = function(total, part, rows, tile, place), and part is 0.
    template <typename Function>
    RTK_DEVICE void take(Function function) {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (TILES > kPair && j % kPair == 0 && j >= tiles) break;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    total[r][j][i] = function(total[r][j][i], part[r][j][i], r, j, i);
                    part[r][j][i] = 0.0f;
                }
        }
    }
};

// The sums of a tile whose parts are in global memory: block `first` has the one that begins with k = 0, in its second slot,
// `count` - 1 blocks behind it have the others in their first.
RTK_DEVICE void skinny_add_parts(float* sums, const float* partial, int m, int first, int count, bool integer) {
#pragma unroll 1
    for (int i = threadIdx.x; i < m * (kSkinnyRows / 4); i += kSkinnyThreads) {
        const int token = i / (kSkinnyRows / 4), row = i % (kSkinnyRows / 4) * 4;
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int p = 0; p < count; ++p) {
            const i64 slot = 2 * static_cast<i64>(first + p) + (p == 0 ? 1 : 0);
            const float4 v = *reinterpret_cast<const float4*>(partial + (slot * m + token) * kSkinnyRows + row);
            const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; ++c)
                total[c] = integer ? __int_as_float(__float_as_int(total[c]) + __float_as_int(part[c])) : total[c] + part[c];
        }
        *reinterpret_cast<float4*>(sums + token * kSkinnySumPitch + row) = make_float4(total[0], total[1], total[2], total[3]);
    }
}

// `flags`, from bit 0: a aligned, b aligned, words of scale_a aligned, of scale_b aligned, signed codes, integer sums, gated,
// accumulate, (nothing), scale_a by row, scale_b by row. `types`: four bits each of bias, add, out, activation,
// activations of a, scales of b. Scales along k: `words` of a stage's row, 0 if a scale serves all of k.
template <typename Codes, typename Math, int TILES>
__global__ void __launch_bounds__(kSkinnyThreads, TILES <= 2 ? 2 : 1)
    gemm_skinny(const u8* a, const u8* b, const u8* scale_a, const u8* scale_b, const float* global_scale, const void* bias,
                const void* add, void* out, float* partial, u32* tickets, i64 m, i64 n, i64 k, i64 a_pitch, i64 b_pitch,
                i64 out_pitch, i64 add_pitch, i64 scale_a_row, i64 scale_a_word, i64 scale_b_row, i64 scale_b_word,
                i64 scale_b_shift, i64 depth_a, i64 depth_b, i64 words_a, i64 words_b, i64 group_shift, i64 period,
                i64 global_step, i64 flags, i64 types, i64 stages) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ bool last;
    using Warp = SkinnyWarp<Codes, Math, TILES>;
    using Product = typename Warp::Product;
    auto flag = [&](int i) { return (flags >> i & 1) != 0; };
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };
    const int depth = static_cast<int>(k), kind = type(5), activations = type(4);
    const bool integer = flag(5);
    const SkinnyScale along_a = {scale_a, scale_a_row, scale_a_word, 0, static_cast<int>(depth_a),
                                 (depth + static_cast<int>(depth_a) - 1) / static_cast<int>(depth_a), kScalesFp32,
                                 static_cast<int>(words_a), flag(2)};
    const SkinnyScale along_b = {scale_b, scale_b_row, scale_b_word, static_cast<int>(scale_b_shift), static_cast<int>(depth_b),
                                 (depth + static_cast<int>(depth_b) - 1) / static_cast<int>(depth_b), kind,
                                 static_cast<int>(words_b), flag(3)};
    const Product product = {a, b, a_pitch, b_pitch, n, static_cast<int>(m), depth, activations,
                             activations == kActivations16 ? 16 : activations >= kActivationsInt4 ? 4 : 8, flag(0), flag(1),
                             flag(6), along_a, along_b};
    const SkinnyResult result = {
        global_scale, words_a == 0 ? reinterpret_cast<const float*>(scale_a) : nullptr,
        words_b == 0 ? reinterpret_cast<const float*>(scale_b) : nullptr, flag(9) ? scale_a_row / 4 : 0,
        flag(10) ? scale_b_row / 4 : 0, bias, n, Warp::Weights::kFactor, static_cast<int>(global_step), type(0), integer,
        {add, out, out_pitch, add_pitch, type(1), type(2), type(3), flag(7), flag(6)}};
    const CodeOptions options = {flag(4)};

    const int k_stages = product.k_stages(), ring = static_cast<int>(stages);
    const u32 units = static_cast<u32>((n + product.tile_columns() - 1) / product.tile_columns()) * k_stages;
    const u32 first = units * blockIdx.x / gridDim.x;  // the host sees to it that products with the grid have 32 bits
    const int count = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x - first);
    const bool converted = activations != kActivations16;
    const int stage_bytes = product.stage_bytes(), ready_bytes = converted ? Product::kFragmentBytes : 0;
    const int scales_at = kSkinnyWeightBytes + product.activation_bytes();
    float* const sums = reinterpret_cast<float*>(memory);
    u8* const ready = memory + Product::kTokens * kSkinnySumPitch * 4;
    u8* const slots = ready + 2 * ready_bytes;
    if (!converted) product.clear_fragments(slots, ring);

    int tile = static_cast<int>(first / k_stages), stage = static_cast<int>(first % k_stages), slot = 0, begin = stage;
    int fetched = 0, fetch_tile = tile, fetch_stage = stage, fetch_slot = 0;
    typename Product::Source source = product.source(tile);
    auto fetch = [&]() {
        if (fetched < count) {
            product.fetch(slots + fetch_slot * stage_bytes, source, fetch_stage);
            ++fetched;
            if (++fetch_slot == ring) fetch_slot = 0;
            if (++fetch_stage == k_stages) {
                fetch_stage = 0;
                product.begin_tile(source, ++fetch_tile);
            }
        }
        ptx::cp_async_commit();
    };
    Warp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarp;
    warp.rows = static_cast<int>(threadIdx.x) / kWarp % 4 * 32;
    warp.half = static_cast<int>(threadIdx.x) / (4 * kWarp);
    warp.tiles = static_cast<int>((m + 7) / 8);
    warp.folded = (kind & 3) == kScalesUe4m3;
    warp.clear();
    const int steps_together = integer || words_a != 0 || (words_b != 0 && !warp.folded) ? static_cast<int>(period) : 0;
    // The first times round only ask for stages; quantised activations are converted one time before they are used.
#pragma unroll 1
    for (int done = 1 - ring; done < count; ++done) {
        if (done >= (converted ? -1 : 0)) {
            skinny_wait(converted ? ring - 3 : ring - 2);
            __syncthreads();
        }
        fetch();
        if (converted && done >= -1 && done + 1 < count) {
            int next = slot + (done < 0 ? 0 : 1);
            if (next == ring) next = 0;
            product.convert(slots + next * stage_bytes + kSkinnyWeightBytes, ready + (done + 1 & 1) * ready_bytes);
        }
        if (done < 0) continue;
        const u8* now = slots + slot * stage_bytes;
        const u8* fragments = now + kSkinnyWeightBytes;
        if (++slot == ring) slot = 0;
        if (converted) fragments = ready + (done & 1) * ready_bytes;
        warp.work(product, options, now, fragments, now + scales_at, static_cast<int>(group_shift), steps_together, integer);
        ++stage;
        if (stage != k_stages && done + 1 != count) continue;

        // The block's share of this tile is done: both halves of the warps, then other blocks' shares.
        if (steps_together == 0) warp.promote(product, now + scales_at, 0, 0, false);
        warp.settle_flags();
        if (warp.half == 1) warp.put(sums, false, integer);
        __syncthreads();
        if (warp.half == 0) warp.put(sums, true, integer);
        __syncthreads();
        bool complete = true;
        if (begin != 0 || stage != k_stages) {
            const i64 slot_of_part = 2 * static_cast<i64>(blockIdx.x) + (begin == 0 ? 1 : 0);
#pragma unroll 1
            for (int i = threadIdx.x; i < product.m * (kSkinnyRows / 4); i += kSkinnyThreads) {
                const int token = i / (kSkinnyRows / 4), row = i % (kSkinnyRows / 4) * 4;
                *reinterpret_cast<float4*>(partial + (slot_of_part * product.m + token) * kSkinnyRows + row) =
                    *reinterpret_cast<const float4*>(sums + token * kSkinnySumPitch + row);
            }
            // Unit u belongs to the last block that begins at or before it.
            auto owner = [&](u32 u) { return static_cast<int>(((u + 1) * gridDim.x - 1) / units); };
            const int owner_first = owner(static_cast<u32>(tile) * k_stages);
            const int owners = owner((static_cast<u32>(tile) + 1) * k_stages - 1) - owner_first + 1;
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                last = atomicAdd(tickets + tile, 1u) + 1 == static_cast<u32>(owners);
            }
            __syncthreads();
            complete = last;
            if (complete) {
                __threadfence();
                skinny_add_parts(sums, partial, product.m, owner_first, owners, integer);
                __syncthreads();
            }
        }
        if (complete) result.finish(sums, product.m, tile);
        warp.clear();
        ++tile;
        stage = begin = 0;
    }
    ptx::cp_async_wait<0>();
}

}  // namespace rtk
