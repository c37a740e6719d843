// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to 64 rows of a: a product that
// reads its weights b at memory bandwidth. 16-, 8- and 4-bit codes become 16-bit operands of mma.sync in registers
// (gemm_skinny_weights.cuh), with weights as the 16 rows and tokens as the 8 columns; sums are fp32.
//
// A block owns a tile of weight rows (gated: half of them and their counterparts) and a part of k; the blocks of a tile
// form a cluster. Of its 8 or 16 warps some are spread along the rows, 32 each, the others along k, where they take
// units (gemm_skinny_stage.cuh) round-robin. Every warp streams its weights through its own ring; the block
// synchronises only where a chunk of activations begins.
//
// Sums of a unit or of a scale group, whichever is shorter, leave the tensor cores for fp32 registers, times the scales
// of that group; integer sums for int32 ones. The sums of warps, then those of the blocks, which arrive through
// distributed shared memory, are added in the order of k, so that results do not depend on timing. They are rounded
// once, at the end.
//
// Shared memory: the rings [warps][kSkinnyRing units], buffers of activations, converted activations if a is quantised.
// Afterwards it is reused for sums of warps [warps along k][tokens][rows + 4], then for those of blocks, sent to the
// one that finishes them.
#include "gemm/gemm_skinny_finish.cuh"
#include "gemm/gemm_skinny_stage.cuh"
#include "ptx/cluster.cuh"

namespace rtk {

RTK_DEVICE float skinny_group_scale(const u8* words, int row, int group, int kind) {
    if ((kind & 3) == kScalesFp32) return reinterpret_cast<const float*>(words)[group * kSkinnyUnitRows + row];
    const u32 byte = reinterpret_cast<const u32*>(words)[(group >> 2) * kSkinnyUnitRows + row] >> (8 * (group & 3)) & 0xffu;
    return __uint_as_float(byte == 0xffu ? 0x7fffffffu : byte == 0u ? 0x00400000u : byte << 23);  // 2^(byte - 127)
}

RTK_DEVICE float skinny_plus(float x, float y, bool integer) {
    return integer ? __int_as_float(__float_as_int(x) + __float_as_int(y)) : x + y;
}

// The sums of a warp: 32 weight rows, all tokens, its units.
template <typename Codes, typename Math, int TILES>
struct SkinnyWarp {
    using Weights = WeightCodes<Codes, Math>;
    using Product = SkinnyProduct<Weights::kBits, TILES>;
    static constexpr int kSteps = Product::kSteps;
    static constexpr int kPair = TILES > 1 ? 2 : 1;

    int lane;
    int tiles;    // of tokens that exist
    bool folded;  // scales of the weights are part of the operands
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

    // Address of the activations of token lane / 4 of tile `j`, relative to those of a unit. Missing tokens read the
    // last one.
    RTK_DEVICE int fragment(const Product& product, int j) const {
        return min(8 * j + lane / 4, product.m - 1) * product.token_pitch() + lane % 4 * 16;
    }

    // One unit. `activations`: those of its k; `first_group`: its first group in the words of its scales; 2^group_shift
    // of k share a scale of the weights, if that is less than a unit; `period`: steps until sums are promoted, a power
    // of two, or 0 if no scale varies along k, so that the tensor cores accumulate everything.
    RTK_DEVICE void work(const Product& product, const CodeOptions& options, const u8* unit, const u8* activations,
                         const float* of_tokens, int first_group, int group_shift, int period, bool integer) {
        const u8* own_rows = unit + lane / 4 * kSkinnyRowBytes + lane % 4 * Weights::kBits;
        const u8* scales = unit + kSkinnyUnitBytes;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const u8* codes = own_rows + Product::step_place(lane / 4, i);
            u32 left[2][2][4];  // [16 rows][product]
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) decode(options, codes, scales, i, r, h, left[r]);
#pragma unroll
            for (int j = 0; j < TILES; j += kPair) {  // two tiles at a time, so that their products overlap
                if (TILES > kPair && j >= tiles) break;
                uint4 right[kPair];
#pragma unroll
                for (int c = 0; c < kPair; ++c)
                    right[c] = *reinterpret_cast<const uint4*>(activations + fragment(product, j + c) + 64 * i);
#pragma unroll
                for (int c = 0; c < kPair; ++c)
#pragma unroll
                    for (int r = 0; r < 2; ++r) mma_pair<Math>(part[r][j + c], left[r][0], {right[c].x, right[c].y});
#pragma unroll
                for (int c = 0; c < kPair; ++c)
#pragma unroll
                    for (int r = 0; r < 2; ++r) mma_pair<Math>(part[r][j + c], left[r][1], {right[c].z, right[c].w});
            }
            if (period != 0 && (i == kSteps - 1 || (i + 1 & period - 1) == 0))
                promote(product, scales, of_tokens, first_group + (i * 32 >> group_shift), integer);
        }
    }

    // Rows with a NaN weight that the conversion of its format does not preserve.
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

    // Writes to sums[token][row]; `rows` is the first row of the warp.
    RTK_DEVICE void put(float* sums, int pitch, int rows) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (TILES > 1 && j >= tiles) break;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[(8 * j + 2 * t + i % 2) * pitch + rows + 16 * r + 8 * (i / 2) + g] = total[r][j][i];
        }
    }

    // Adds tensor-core sums, times the scales of their group, to the totals.
    RTK_DEVICE void promote(const Product& product, const u8* scales, const float* of_tokens, int group, bool integer) {
        if (integer) {
            take([&](float total, float part, int, int, int) {
                return __int_as_float(__float_as_int(total) + __float2int_rn(part));
            });
            return;
        }
        float of_row[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        if (product.scale_b.words != 0 && !folded) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    of_row[r][h] = skinny_group_scale(scales, lane / 4 + 16 * r + 8 * h, group, product.scale_b.kind);
        }
        if (product.scale_a.words == 0) {
            take([&](float total, float part, int r, int, int i) { return fmaf(part, of_row[r][i / 2], total); });
            return;
        }
        const float* own = of_tokens + lane % 4 * 2;
        take([&](float total, float part, int r, int j, int i) {
            return fmaf(part, of_row[r][i / 2] * own[8 * j + i % 2], total);
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
            const int row = lane / 4 + 16 * r + 8 * h;
            u32 code = 0x38u;  // 1
            if (folded)
                code = reinterpret_cast<const u32*>(scales)[step / 2 * kSkinnyUnitRows + row] >> (16 * (step % 2) + lane % 4 / 2 * 8);
            scale = skinny_scale_pair<Math>(code);
        }
        if constexpr (Weights::kFlagged) flags[r][h] = Weights::flag(flags[r][h], raw);
        u32 pair[4];
        Weights::pairs(raw, scale, options, pair);
        left[0][h] = pair[0], left[0][h + 2] = pair[1], left[1][h] = pair[2], left[1][h + 2] = pair[3];
    }

   public:
    // total = function(total, part, rows, tile, place), and part is reset to 0.
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
struct SkinnyArguments {
    const u8 *a, *b, *scale_a, *scale_b;
    const float* global_scale;
    const void *bias, *add;
    void* out;
    i64 m, n, k, a_pitch, b_pitch, out_pitch, add_pitch, scale_a_row, scale_a_word, scale_b_row, scale_b_word,
        scale_b_shift, shift_b, count_a, count_b, words_a, words_b, group_shift, period, global_step, flags, types,
        row_shift_, part_rounds, chunk_shift, buffers;
};

// `flags`, from bit 0: a aligned, b aligned, words of scale_a aligned, of scale_b aligned, signed codes, integer sums,
// gated, accumulate, rows of b multiples of 8 bytes, scale_a by row, scale_b by row, rows of a multiples of 8 bytes.
// `types`: four bits each for bias, add, out, activation, activations of a, scales of b. Scales along k: `words` per row
// of a chunk (a) or unit (b), 0 if one scale serves all of k, and their `count`. 2^row_shift warps of 32 rows;
// `part_rounds` units of each warp per block; chunks of 2^chunk_shift of k in `buffers` buffers. The grid is the parts of
// k, which form a cluster, times tiles.
template <typename Codes, typename Math, int TILES>
__global__ void __launch_bounds__(TILES <= 2 ? 512 : 256, 1)
    gemm_skinny(const __grid_constant__ SkinnyArguments args) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float2 of_rows[kSkinnyMaxRows];
    using Warp = SkinnyWarp<Codes, Math, TILES>;
    using Product = typename Warp::Product;
    auto flag = [&](int i) { return (args.flags >> i & 1) != 0; };
    auto type = [&](int i) { return static_cast<int>(args.types >> (4 * i) & 15); };
    const int kind = type(5), activations = type(4), row_shift = static_cast<int>(args.row_shift_);
    const bool integer = flag(5), gated = flag(6), converted = activations != kActivations16;
    auto narrow = [](i64 number) { return static_cast<int>(number); };
    const SkinnyScale along_a = {args.scale_a, args.scale_a_row, args.scale_a_word, 0, 7, narrow(args.count_a), kScalesFp32,
                                 narrow(args.words_a), flag(2)};
    const SkinnyScale along_b = {args.scale_b, args.scale_b_row, args.scale_b_word, narrow(args.scale_b_shift),
                                 narrow(args.shift_b), narrow(args.count_b), kind, narrow(args.words_b), flag(3)};
    const int tile_rows = kSkinnyUnitRows << row_shift;
    const Product product = {args.a, args.b, narrow(args.a_pitch), narrow(args.b_pitch), narrow(args.n), narrow(args.m),
                             narrow(args.k), activations, converted ? (activations >= kActivationsInt4 ? 2 : 3) : 4,
                             narrow(args.chunk_shift), tile_rows,
                             flag(0), flag(1), flag(11), flag(8), gated, along_a, along_b};
    const SkinnyResult result = {
        args.global_scale, args.words_a == 0 ? reinterpret_cast<const float*>(args.scale_a) : nullptr,
        args.words_b == 0 ? reinterpret_cast<const float*>(args.scale_b) : nullptr, flag(9) ? args.scale_a_row >> 2 : 0,
        flag(10) ? args.scale_b_row >> 2 : 0, args.bias, args.n, Warp::Weights::kFactor, narrow(args.global_step), type(0),
        integer,
        {args.add, args.out, args.out_pitch, args.add_pitch, type(1), type(2), type(3), flag(7), gated}};
    const CodeOptions options = {flag(4)};

    // Warps along k take units round-robin; blocks get whole rounds of them.
    const u32 parts = gridDim.x, rank = blockIdx.x;
    const int tile = static_cast<int>(blockIdx.y);
    const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32), along_k = warps >> row_shift;
    const int warp_k = warp >> row_shift, rows = (warp & (1 << row_shift) - 1) * kSkinnyUnitRows;
    const int units = product.units(), first_unit = static_cast<int>(rank * args.part_rounds) * along_k;
    const int end_unit = min(units, first_unit + static_cast<int>(args.part_rounds) * along_k);
    const int chunk_units = (1 << args.chunk_shift) / Product::kDepth;

    const int slot_bytes = product.slot_bytes(), buffer_bytes = product.buffer_bytes();
    const int ring = warp * kSkinnyRing * slot_bytes, chunks = warps * kSkinnyRing * slot_bytes;
    const int ready = chunks + static_cast<int>(args.buffers) * buffer_bytes;

    Warp own;
    own.lane = static_cast<int>(threadIdx.x % 32);
    const typename Product::Source source = product.source(tile, rows, own.lane);

    // Units are loaded in rounds of `along_k`, those of a chunk of activations together with the chunk.
    int fetch_unit = first_unit, fetch_slot = 0, fetch_in_chunk = 0, fetch_buffer = 0;
    auto fetch = [&]() {
        if (fetch_unit < end_unit) {
            if (fetch_unit + warp_k < units)
                product.fetch(memory, ring + fetch_slot * slot_bytes, source, own.lane, fetch_unit + warp_k);
            if (fetch_in_chunk == 0) {
                product.fetch_chunk(memory, chunks + fetch_buffer * buffer_bytes, fetch_unit * Product::kDepth);
                fetch_in_chunk = chunk_units;
                if (++fetch_buffer == static_cast<int>(args.buffers)) fetch_buffer = 0;
            }
            fetch_in_chunk -= along_k;
            fetch_unit += along_k;
            if (++fetch_slot == kSkinnyRing) fetch_slot = 0;
        }
        ptx::cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kSkinnyRing - 1; ++i) fetch();

    own.tiles = static_cast<int>((args.m + 7) / 8);
    own.folded = (kind & 3) == kScalesUe4m3;
    own.clear();
    const bool by_periods = integer || args.words_a != 0 || (args.words_b != 0 && !own.folded);
    const int steps_together = by_periods ? narrow(args.period) : 0;
    const bool has_terms = static_cast<int>(threadIdx.x) < tile_rows;
    typename SkinnyResult::OfRow terms = {};
    if (has_terms) terms = result.of_row(product.weight_row(tile, static_cast<int>(threadIdx.x)));

    int slot = 0, in_chunk = 0, buffer = -1;
#pragma unroll 1
    for (int first = first_unit; first < end_unit; first += along_k) {
        ptx::cp_async_wait<kSkinnyRing - 2>();
        const bool begins = in_chunk == 0;
        if (begins) {
            __syncthreads();
            if (++buffer == static_cast<int>(args.buffers)) buffer = 0;
        } else {
            __syncwarp();
        }
        fetch();
        const u8* now = memory + chunks + buffer * buffer_bytes;
        const float* of_tokens = reinterpret_cast<const float*>(now + product.m * product.copied_pitch());
        if (converted) {
            if (begins) {
                product.convert(now, memory + ready);
                __syncthreads();
            }
            now = memory + ready;
        }
        const int unit = first + warp_k, at = (in_chunk + warp_k) * Product::kDepth;
        in_chunk += along_k;
        if (in_chunk == chunk_units) in_chunk = 0;
        const u8* weights = memory + ring + slot * slot_bytes;
        if (++slot == kSkinnyRing) slot = 0;
        if (unit >= units) continue;
        const int first_group = along_b.is_fp32() ? 0 : unit * Product::kDepth >> along_b.shift & 3;
        own.work(product, options, weights, now + 2 * at, of_tokens + (at >> 7) * Product::kTokens, first_group,
                 static_cast<int>(args.group_shift), steps_together, integer);
    }

    // Sums of warps; those along k are added.
    if (steps_together == 0) own.take([](float, float part, int, int, int) { return part; });
    own.settle_flags();
    if (has_terms) of_rows[threadIdx.x] = make_float2(Warp::Weights::kFactor * terms.scale * terms.global, terms.bias);
    float* const sums = reinterpret_cast<float*>(memory);
    const int pitch = tile_rows + 4, plane = Product::kTokens * pitch;
    __syncthreads();
    own.put(sums + warp_k * plane, pitch, rows);
    // Also: every block of the cluster has finished its copies, so others may write to its memory.
    if (parts > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
    auto sum_of = [&](int token, int row) {
        float sum = sums[token * pitch + row];
#pragma unroll 1
        for (int w = 1; w < along_k; ++w) sum = skinny_plus(sum, sums[w * plane + token * pitch + row], integer);
        return sum;
    };
    // Result i of the tile is column i % columns of token i / columns; stretches of 32 are dealt to the blocks of the
    // cluster in turn. Gated ones have two sums; the second is in a plane of its own.
    const int columns_shift = 5 + row_shift - (gated ? 1 : 0), total = product.m << columns_shift, planes = gated ? 2 : 1;
    const u32 stretches = static_cast<u32>(total + 31) / 32, share = (stretches + parts - 1) / parts * 32;
    auto row_of = [&](int i) {
        const int column = i & (1 << columns_shift) - 1;
        return gated ? column / 16 * 32 + column % 16 : column;
    };
    float* const received = sums + along_k * plane;
    if (parts > 1) {
#pragma unroll 1
        for (u32 stretch = warp; stretch < stretches; stretch += warps) {
            const int i = static_cast<int>(stretch) * 32 + own.lane;
            const u32 place = stretch / parts, owner = stretch - place * parts;
            if (i >= total) continue;
#pragma unroll 1
            for (int which = 0; which < planes; ++which)
                ptx::st_cluster(ptx::shared_address(received + (rank * planes + which) * share + place * 32 + own.lane),
                                static_cast<int>(owner), sum_of(i >> columns_shift, row_of(i) + 16 * which));
        }
        ptx::cluster_barrier();
    }
    auto whole = [&](int i, u32 place, int which) {
        if (parts == 1) return sum_of(i >> columns_shift, row_of(i) + 16 * which);
        const float* from = received + which * share + place * 32 + own.lane;
        float sum = *from;
#pragma unroll 1
        for (u32 p = 1; p < parts; ++p) sum = skinny_plus(sum, from[p * planes * share], integer);
        return sum;
    };
#pragma unroll 1
    for (u32 place = warp; place * parts + rank < stretches; place += warps) {
        const int i = static_cast<int>(place * parts + rank) * 32 + own.lane, row = row_of(i);
        const int column = (tile << columns_shift) + (i & (1 << columns_shift) - 1);
        if (i < total && column < product.n)
            result.put(i >> columns_shift, column, whole(i, place, 0), gated ? whole(i, place, 1) : 0.0f, of_rows[row],
                       of_rows[gated ? row + 16 : row]);
    }
}

}  // namespace rtk
