// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to 64 rows of a: a product that
// reads its weights b at the speed of memory. Codes of 16, 8 and 4 bits become 16-bit operands of mma.sync in registers
// (gemm_skinny_weights.cuh), where weights are the 16 rows and tokens the 8 columns; sums are fp32.
//
// Work is cut into units: a tile of 128 weight rows (gated: 64 and their counterparts), 16 for each of 8 warps, times a slab
// of k (256 bytes of a row). The units of all tiles in order are dealt to the blocks in equal consecutive shares. A warp
// loads its own weights straight to registers, a slab before it uses them; blocks meet when they go to the next slab of
// activations (gemm_skinny_operands.cuh), which all warps share. A tile that several blocks share is put together by the
// one that finishes last, from parts in global memory, in the order of k: the result does not depend on who that is.
//
// Sums of a chunk (64 bytes of a row) or of a scale group, whatever is shorter, leave the tensor cores for fp32 registers,
// times the scales of that group; sums of integers for int32 ones. Results are rounded at the end, and only there.
//
// Shared memory: sums [tokens][kSkinnySumPitch] words, two slabs of fragments, of quantised activations two slabs of codes and
// four of scales [group of 128][tokens].
#include "gemm/gemm_skinny_finish.cuh"
#include "gemm/gemm_skinny_operands.cuh"

namespace rtk {

// The 16 weight rows of a warp and their sums for all tokens.
template <typename Codes, typename Math, int TILES>
struct SkinnyWarp {
    using Weights = WeightCodes<Codes, Math>;
    using Activations = SkinnyActivation16<Weights::kBits, TILES>;
    static constexpr int kParts = Activations::kParts, kBits = Weights::kBits;
    static constexpr int kPair = TILES > 1 ? 2 : 1;  // tiles whose products overlap
    static constexpr bool kEarlyScales = TILES == 1;  // scales are asked for with the weights; more tokens need the registers

    int lane, tiles;             // tiles of tokens that exist
    bool folded, fine, integer;  // scales of weights are part of the operands; change inside of a chunk; sums of integers
    CodeOptions options;
    SkinnyScale scale;
    const u8* weights[2];  // of the next loads: rows g and g + 8, this lane's bytes
    const u8* scales[2];
    Raw<16> raw[kSkinnyChunks][2];
    u32 word[kEarlyScales ? kSkinnyChunks : 1][2];  // scales of a chunk
    float part[TILES][4], total[TILES][4];
    u32 flags[2];

    RTK_DEVICE void clear() {
        flags[0] = flags[1] = 0u;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) part[j][i] = total[j][i] = 0.0f;
    }

    // Asks for a chunk of a slab. `bytes`: how many a row has from this slab on, or of which no vector is whole.
    RTK_DEVICE void load(int slab, int chunk, int bytes, bool aligned) {
        const i64 at = static_cast<i64>(slab) * (kSkinnyChunks * kSkinnyChunkBytes) + chunk * kSkinnyChunkBytes;
        const int left = bytes - chunk * kSkinnyChunkBytes - lane % 4 * 16;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (aligned && bytes >= kSkinnyChunks * kSkinnyChunkBytes) {
                raw[chunk][h] = ptx::ld_stream_16(weights[h] + at, ptx::l2_first());
            } else if (aligned && left >= 16) {
                raw[chunk][h] = ptx::ld_keep<16>(weights[h] + at);
            } else {
                raw[chunk][h] = skinny_load_part(weights[h] + at, left);
            }
            if (kEarlyScales && scale.data != nullptr && !fine) word[chunk][h] = load_scales(scales[h], slab, chunk);
        }
    }

    // Scales of a chunk of a row: one of fp32, or two bytes for this lane's 32 codes.
    RTK_DEVICE u32 load_scales(const u8* row, int slab, int chunk) const {
        const int group = (slab * kSkinnyChunks + chunk) * Activations::kChunk >> scale.shift;
        if (!folded) return ptx::ld_keep<4>(scale.at(row, group)).w[0];
        const int own = group + lane % 4 * 2;
        return ptx::ld_keep<1>(scale.at(row, own)).w[0] | ptx::ld_keep<1>(scale.at(row, own + 1)).w[0] << 8;
    }

    // Products of a chunk. `fragments`: this lane's, of the chunk; `of_tokens`: scales of this lane's tokens, or null.
    RTK_DEVICE void work(int slab, int chunk, const u8* fragments, const float* of_tokens) {
        if (fine) {
            exchange(raw[chunk][0]);
            exchange(raw[chunk][1]);
        } else if (!kEarlyScales && scale.data != nullptr) {
            word[0][0] = load_scales(scales_now[0], slab, chunk);
            word[0][1] = load_scales(scales_now[1], slab, chunk);
        }
        constexpr int kWords = kEarlyScales ? kSkinnyChunks : 1;
#pragma unroll
        for (int h = 0; h < kParts; ++h) {
            u32 left[2][4];  // [product]
            decode(chunk, h, 0, left);
            decode(chunk, h, 1, left);
#pragma unroll
            for (int j = 0; j < TILES; j += kPair) {
                if (TILES > kPair && j >= tiles) break;
                uint4 right[kPair];
#pragma unroll
                for (int c = 0; c < kPair; ++c)
                    right[c] = *reinterpret_cast<const uint4*>(fragments + (h * TILES + j + c) * 512);
#pragma unroll
                for (int c = 0; c < kPair; ++c) mma_pair<Math>(part[j + c], left[0], {right[c].x, right[c].y});
#pragma unroll
                for (int c = 0; c < kPair; ++c) mma_pair<Math>(part[j + c], left[1], {right[c].z, right[c].w});
            }
            if (fine) {
                const int group = (slab * kSkinnyChunks + chunk) * Activations::kChunk + h * 32 >> scale.shift;
                promote(scale.load(scales_now[0], group), scale.load(scales_now[1], group), of_tokens);
            }
        }
        if (!fine) {
            const bool scaled = scale.data != nullptr && !folded;
            promote(scaled ? __uint_as_float(word[chunk % kWords][0]) : 1.0f,
                    scaled ? __uint_as_float(word[chunk % kWords][1]) : 1.0f, of_tokens);
        }
    }

    // Rows whose weights had a NaN that its format's conversion does not keep.
    RTK_DEVICE void settle_flags() {
        if constexpr (Weights::kFlagged) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 found = flags[h];
                found |= __shfl_xor_sync(0xffffffffu, found, 1);
                found |= __shfl_xor_sync(0xffffffffu, found, 2);
                if ((found & 0x80808080u) == 0u) continue;
#pragma unroll
                for (int j = 0; j < TILES; ++j) total[j][2 * h] = total[j][2 * h + 1] = __uint_as_float(0x7fffffffu);
            }
        }
    }

    // To sums[token][row].
    RTK_DEVICE void put(float* sums) const {
        float* own = sums + lane % 4 * 2 * kSkinnySumPitch + threadIdx.x / kWarp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) own[(8 * j + i % 2) * kSkinnySumPitch + 8 * (i / 2)] = total[j][i];
    }

    const u8* scales_now[2];  // those of the slab that is worked on

   private:
    RTK_DEVICE void exchange(Raw<16>& codes) const {
        if constexpr (kBits == 4) {
            skinny_transpose(codes, lane);
        } else if constexpr (kBits == 8) {  // part h of lane t is half t % 2 of what lane t / 2 + 2h has
            u32 wanted[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int from = (lane & ~3) | (i / 2 * 2 + lane % 4 / 2);
                const u32 first = __shfl_sync(0xffffffffu, codes.w[i % 2], from);
                const u32 second = __shfl_sync(0xffffffffu, codes.w[2 + i % 2], from);
                wanted[i] = lane % 2 == 0 ? first : second;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) codes.w[i] = wanted[i];
        }
    }

    // Part h of weight row g + 8 r, for both products.
    RTK_DEVICE void decode(int chunk, int h, int r, u32 (&left)[2][4]) {
        Raw<kBits> codes;
#pragma unroll
        for (int i = 0; i < kBits / 4; ++i) codes.w[i] = raw[chunk][r].w[h * (kBits / 4) + i];
        u32 times = 0u;
        if constexpr (Weights::kScaled) times = skinny_scale_pair<Math>(folded ? word[kEarlyScales ? chunk : 0][r] >> (h / 2 * 8) : 0x38u);  // 1
        if constexpr (Weights::kFlagged) flags[r] = Weights::flag(flags[r], codes);
        u32 pair[4];
        Weights::pairs(codes, times, options, pair);
        left[0][r] = pair[0], left[0][r + 2] = pair[1], left[1][r] = pair[2], left[1][r + 2] = pair[3];
    }

    // Sums of the tensor cores to those in registers, times the scales of both rows and of the tokens.
    RTK_DEVICE void promote(float first, float second, const float* of_tokens) {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (TILES > kPair && j % kPair == 0 && j >= tiles) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (integer) {
                    total[j][i] = __int_as_float(__float_as_int(total[j][i]) + __float2int_rn(part[j][i]));
                } else {
                    float times = i / 2 == 0 ? first : second;
                    if (of_tokens != nullptr) times *= of_tokens[8 * j + i % 2];
                    total[j][i] = fmaf(part[j][i], times, total[j][i]);
                }
                part[j][i] = 0.0f;
            }
        }
    }
};

// The parts of a tile: block `first` has the one that begins with k = 0, in its second slot, the blocks behind it have the
// others in their first.
struct SkinnyParts {
    const float* partial;
    int m, first, count;

    RTK_DEVICE SkinnySums sum(int token, int row, bool integer) const {
        SkinnySums sums = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const i64 slot = 2 * static_cast<i64>(first + i) + (i == 0 ? 1 : 0);
            const float4 v = *reinterpret_cast<const float4*>(partial + (slot * m + token) * kSkinnyRows + row);
            const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; ++c)
                sums.of[c] = integer ? __int_as_float(__float_as_int(sums.of[c]) + __float_as_int(part[c])) : sums.of[c] + part[c];
        }
        return sums;
    }
};

// Sums of a tile to results. Parts: null if the whole of them is in shared memory.
RTK_DEVICE void skinny_finish(const SkinnyResult& result, const float* sums, const SkinnyParts* parts, int m, int tile) {
    const int columns = result.gated ? kSkinnyRows / 2 : kSkinnyRows, quads = columns / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < m * quads; i += kSkinnyThreads) {
        const int token = i / quads, quad = i % quads;
        const i64 column = static_cast<i64>(tile) * columns + quad * 4;
        if (column >= result.n) continue;
        auto sums_of = [&](int row) {
            if (parts != nullptr) return parts->sum(token, row, result.integer);
            const float4 v = *reinterpret_cast<const float4*>(sums + token * kSkinnySumPitch + row);
            return SkinnySums{{v.x, v.y, v.z, v.w}};
        };
        if (result.gated) {
            const int row = quad / 2 * 16 + quad % 2 * 4;
            result.put(sums_of(row), sums_of(row + 8), token, column);
        } else {
            const SkinnySums own = sums_of(quad * 4);
            result.put(own, own, token, column);
        }
    }
}

// `flags`, from bit 0: a aligned, b aligned, scales of b change inside of a chunk, scales of a change along k, signed codes,
// integer sums, gated, accumulate, results four at a time, scale_a by row, scale_b by row, scales of b change along k. `types`:
// four bits each of bias, add, out, activation, activations of a, scales of b.
template <typename Codes, typename Math, int TILES>
__global__ void __launch_bounds__(kSkinnyThreads, TILES > 4 ? 1 : 2)
    gemm_skinny(const u8* a, const u8* b, const u8* scale_a, const u8* scale_b, const float* global_scale, const void* bias,
                const void* add, void* out, float* partial, u32* tickets, i64 m, i64 n, i64 k, i64 a_pitch, i64 b_pitch,
                i64 out_pitch, i64 add_pitch, i64 scale_a_row, i64 scale_a_group, i64 scale_b_row, i64 scale_b_group,
                i64 scale_b_row_shift, i64 scale_b_shift, i64 global_step, i64 flags, i64 types) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ bool last;
    using Warp = SkinnyWarp<Codes, Math, TILES>;
    using Activations = typename Warp::Activations;
    auto flag = [&](int i) { return (flags >> i & 1) != 0; };
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };
    const int depth = static_cast<int>(k), tokens = static_cast<int>(m), kind = type(4);
    const bool converted = kind != kActivations16, gated = flag(6), scales_a = flag(3), aligned = flag(1);
    const Activations activations = {a, a_pitch, tokens, depth, kind, !converted ? 16 : kind >= kActivationsInt4 ? 4 : 8, flag(0),
                                     flag(2)};
    const SkinnyResult result = {
        global_scale, scales_a ? nullptr : reinterpret_cast<const float*>(scale_a),
        flag(11) ? nullptr : reinterpret_cast<const float*>(scale_b), flag(9) ? scale_a_row / 4 : 0,
        flag(10) ? scale_b_row / 4 : 0, bias, add, out, n, out_pitch, add_pitch, Warp::Weights::kFactor,
        static_cast<int>(global_step), type(0), type(1), type(2), type(3), flag(7), gated, flag(5), flag(8)};

    const int slabs = max((depth + Activations::kDepth - 1) / Activations::kDepth, 1);
    const int columns = gated ? kSkinnyRows / 2 : kSkinnyRows;
    const u32 units = static_cast<u32>((n + columns - 1) / columns) * slabs;  // times the grid, it has 32 bits
    const u32 first = units * blockIdx.x / gridDim.x;
    const int count = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x - first);
    int tile = static_cast<int>(first / slabs), slab = static_cast<int>(first - tile * slabs), begin = slab;

    float* const sums = reinterpret_cast<float*>(memory);
    u8* const fragments = memory + Activations::kTokens * kSkinnySumPitch * 4;
    u8* const codes = fragments + 2 * Activations::kBytes;
    const int code_bytes = Activations::kTokens * Activations::kDepth / 8 * activations.bits;
    float* const token_scales = reinterpret_cast<float*>(codes + 2 * code_bytes);
    constexpr int kGroups = Activations::kDepth / 128, kScales = kGroups * Activations::kTokens;
    auto fetch_codes = [&](int of_slab, int buffer) {  // with the scales of tokens
        activations.fetch(codes + (buffer & 1) * code_bytes, of_slab);
        if (scales_a && threadIdx.x < kScales) {
            const int group = of_slab * kGroups + threadIdx.x / Activations::kTokens;
            const int token = min(static_cast<int>(threadIdx.x) % Activations::kTokens, tokens - 1);
            ptx::cp_async_4_partial(ptx::shared_address(token_scales + (buffer & 3) * kScales + threadIdx.x),
                                    scale_a + token * scale_a_row + group * scale_a_group, group * 128 < depth ? 4 : 0);
        }
        ptx::cp_async_commit();
    };
    auto behind = [&](int s) { return s + 1 == slabs ? 0 : s + 1; };

    Warp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarp;
    warp.tiles = (tokens + 7) / 8;
    warp.fine = flag(2);
    warp.integer = flag(5);
    warp.options = {flag(4)};
    warp.scale = {flag(11) ? scale_b : nullptr, scale_b_row, scale_b_group, static_cast<int>(scale_b_row_shift),
                  static_cast<int>(scale_b_shift), (depth + (1 << scale_b_shift) - 1) >> scale_b_shift, type(5)};
    warp.folded = (type(5) & 3) == kScalesUe4m3;
    warp.clear();
    // Rows g and g + 8 of this warp; gated, the second one is the counterpart of the first. Rows that are not there are those
    // of the last one, whose results are not written twice.
    auto begin_tile = [&](int of_tile) {
        const int row = threadIdx.x / kWarp * (gated ? 8 : 16) + warp.lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 r = min(static_cast<i64>(of_tile) * columns + row + (gated ? 0 : 8 * h), n - 1) + (gated && h == 1 ? n : 0);
            warp.weights[h] = b + r * b_pitch + warp.lane % 4 * 16;
            warp.scales[h] = warp.scale.row(r);
        }
    };
    const int row_bytes = (depth * Warp::kBits + 7) / 8;
    auto load = [&](int of_slab, int chunk) {
        warp.load(of_slab, chunk, row_bytes - of_slab * (kSkinnyChunks * kSkinnyChunkBytes), aligned);
    };
    begin_tile(tile);
    if (count > 0) {
#pragma unroll
        for (int c = 0; c < kSkinnyChunks; ++c) load(slab, c);
        if (converted) {
            fetch_codes(slab, 0);
            ptx::cp_async_wait<0>();
            __syncthreads();
            activations.convert(codes, fragments);
            if (count > 1) fetch_codes(behind(slab), 1);
        } else {
            activations.fetch(fragments, slab);
            ptx::cp_async_commit();
        }
    }
#pragma unroll 1
    for (int done = 0; done < count; ++done) {
        const bool more = done + 1 < count;
        const int next = behind(slab);
        ptx::cp_async_wait<0>();
        __syncthreads();
        u8* const now = fragments + (done & 1) * Activations::kBytes;
        u8* const other = fragments + (done + 1 & 1) * Activations::kBytes;
        if (converted) {
            if (done + 2 < count) fetch_codes(behind(next), done + 2);
            if (more) activations.convert(codes + (done + 1 & 1) * code_bytes, other);
        } else if (more) {
            activations.fetch(other, next);
            ptx::cp_async_commit();
        }
        warp.scales_now[0] = warp.scales[0], warp.scales_now[1] = warp.scales[1];
        if (more && next == 0) begin_tile(tile + 1);
#pragma unroll
        for (int c = 0; c < kSkinnyChunks; ++c) {
            const float* of_tokens = nullptr;
            if (scales_a)
                of_tokens = token_scales + (done & 3) * kScales + c * Activations::kChunk / 128 * Activations::kTokens +
                            warp.lane % 4 * 2;
            warp.work(slab, c, now + c * (Warp::kParts * TILES * 512) + warp.lane * 16, of_tokens);
            if (more) load(next, c);
        }
        const int end = slab + 1;
        slab = next;
        if (end != slabs && more) continue;

        // The block's share of this tile is done.
        warp.settle_flags();
        warp.put(sums);
        __syncthreads();
        if (begin == 0 && end == slabs) {
            skinny_finish(result, sums, nullptr, tokens, tile);
        } else {
            const i64 slot = 2 * static_cast<i64>(blockIdx.x) + (begin == 0 ? 1 : 0);
            for (int i = threadIdx.x; i < tokens * (kSkinnyRows / 4); i += kSkinnyThreads) {
                const int token = i / (kSkinnyRows / 4), row = i % (kSkinnyRows / 4) * 4;
                *reinterpret_cast<float4*>(partial + (slot * tokens + token) * kSkinnyRows + row) =
                    *reinterpret_cast<const float4*>(sums + token * kSkinnySumPitch + row);
            }
            // Unit u belongs to the last block that begins at or before it.
            auto owner = [&](u32 u) { return static_cast<int>(((u + 1) * gridDim.x - 1) / units); };
            const int owner_first = owner(static_cast<u32>(tile) * slabs);
            const int owners = owner((static_cast<u32>(tile) + 1) * slabs - 1) - owner_first + 1;
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                last = atomicAdd(tickets + tile, 1u) + 1 == static_cast<u32>(owners);
            }
            __syncthreads();
            if (last) {
                __threadfence();
                const SkinnyParts parts = {partial, tokens, owner_first, owners};
                skinny_finish(result, sums, &parts, tokens, tile);
            }
        }
        warp.clear();
        ++tile;
        begin = 0;
    }
}

}  // namespace rtk
