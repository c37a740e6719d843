// Decoding attention: a few queries per sequence over a KV cache, paged or contiguous.
//
// A block owns 16 rows, the queries of all heads that share a key head (row r: query r / group, head r % group; more
// rows take more blocks), and one split of the keys. Each warp loops over its own chunks of 16 keys through its own
// ring of kDecodeStages stages in shared memory, so the loop has no block-wide barrier; at the end the warps' sums are
// merged. The host chooses the number of splits from shapes only; where they begin depends on the length, which is
// known on the device. With one split the block writes out and lse, with more it writes fp32 partial results, which
// attention_combine merges in the order of splits.
//
// An 8-bit cache (CODES) has rows of D bytes. Products are then fp16: codes are exact in it, and each row of q is first
// multiplied by a power of two. Within each 16 elements of d, fragments use the order in which ldmatrix delivers 8-bit
// rows (codes.cuh).
#include "attention/codes.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "attention/scores.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

inline constexpr int kChunk = 16;       // keys of a stage
inline constexpr int kDecodeRows = 16;  // queries of a block
inline constexpr int kDecodeStages = 3;

// Row addresses of a cache. Without a page table, a page is a sequence.
struct CachePages {
    const u8* base;  // of this head
    i64 page, row;   // bytes from one to the next

    RTK_DEVICE const u8* at(i64 page_number, int slot) const { return base + page_number * page + slot * row; }
};

// The type of products: that of q, or fp16 for codes.
template <typename T, bool BYTE>
struct MmaType {
    using type = T;
};
template <typename T>
struct MmaType<T, true> {
    using type = fp16;
};

// Rows row0.. + 15 (query r / group, head first_head + r % group) as left operands. BYTE: fp16, with d in the order of
// codes; each row is multiplied by a power of two, and row_scale by its inverse.
template <typename T, bool BYTE, int STEPS>
RTK_DEVICE void load_decode_rows(u32 (&a)[STEPS][4], float (&row_scale)[2], const T* q, i64 q_row, i64 q_head, int first_head,
                                 int group, int row0, int rows, int width, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + lane / 4 + 8 * r;
        const bool exists = row < rows;
        const T* const from = q + (exists ? row / group : 0) * q_row + (first_head + (exists ? row % group : 0)) * q_head;
        if constexpr (!BYTE) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int d = 16 * step + 8 * h + lane % 4 * 2;
                    a[step][2 * h + r] = exists && d < width ? load_raw<T, 2, false>(from + d).w[0] : 0u;
                }
        } else {
            float f[STEPS][4], amax = 0.0f;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int d = 16 * step + lane % 4 * 4;
#pragma unroll
                for (int i = 0; i < 4; ++i) f[step][i] = 0.0f;
                if (exists && d < width) load_keep<T, 4>(from + d, f[step]);
#pragma unroll
                for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(f[step][i]));
            }
            amax = quad_max(amax);
            // The power of two below amax; rows of zeros, infinities and NaN stay unscaled.
            const u32 exponent = __float_as_uint(amax) & 0x7f800000u;
            const bool finite = exponent != 0u && exponent != 0x7f800000u && exponent <= 0x7e000000u;
            const float down = finite ? __uint_as_float(0x7f000000u - exponent) : 1.0f;
            row_scale[r] = finite ? __uint_as_float(exponent) : 1.0f;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                a[step][r] = ptx::cvt_f16x2(f[step][0] * down, f[step][1] * down);
                a[step][2 + r] = ptx::cvt_f16x2(f[step][2] * down, f[step][3] * down);
            }
        }
    }
}

template <typename T>
struct DecodeArguments {
    const T* q;
    const u8 *k_cache, *v_cache;
    const i32 *lengths, *table;
    const float *k_scale, *v_scale, *sinks;
    T* out;
    float *lse, *parts, *part_lse;
    i64 heads, group, lq, lkv, d_qk, d_v, splits, page_size, page_divisor, table_row, q_batch, q_row, q_head, k_page,
        k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, k_scale_head, v_scale_head, left, right;
    double scale, softcap;
};

template <typename T, int CODES, int D>
__global__ void __launch_bounds__(CODES == kSameType && D <= 128 ? 256 : 128, D > 128 || CODES == kSameType ? 1
                                                                              : CODES == kCodesE4m3         ? 4
                                                                                                            : 3)
    attention_decode(const __grid_constant__ DecodeArguments<T> args) {
    constexpr bool kByte = CODES != kSameType;
    constexpr int kSteps = D / 16, kVectors = D * (kByte ? 1 : 2) / 16;
    using Tile = MmaTile<kByte ? D / 2 : D>;
    constexpr u32 kTileBytes = kChunk * Tile::kPitch;
    using M = typename MmaType<T, kByte>::type;
    extern __shared__ __align__(128) u8 shared[];
    ptx::wait_for_previous();

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    const int split = static_cast<int>(blockIdx.x % args.splits),
              row0 = static_cast<int>(blockIdx.x / args.splits) * kDecodeRows;
    const int head_kv = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
    const int rows = static_cast<int>(args.lq * args.group);
    const i32* const pages = args.table == nullptr ? nullptr : args.table + batch * args.table_row;
    if (pages != nullptr)  // page numbers are loaded once the length is known; until then they are prefetched into L2
        for (int i = static_cast<int>(threadIdx.x) * 32; i < args.table_row; i += static_cast<int>(blockDim.x) * 32)
            ptx::prefetch_l2(pages + i);
    const Sequence sequence = sequence_at(batch, args.lq, args.lkv, nullptr, nullptr, args.lengths);
    const Mask mask(sequence, args.left, args.right);

    // Chunks of keys of this split.
    const int first_query = row0 / static_cast<int>(args.group);
    const int last_query = min(row0 + kDecodeRows - 1, rows - 1) / static_cast<int>(args.group);
    const Interval any = mask.keys_any(first_query, last_query + 1);
    const int first_chunk = any.empty() ? 0 : any.first / kChunk, end_chunk = any.empty() ? 0 : (any.end + kChunk - 1) / kChunk;
    const int per_split = (end_chunk - first_chunk + static_cast<int>(args.splits) - 1) / static_cast<int>(args.splits);
    const int begin = first_chunk + split * per_split, end = min(begin + per_split, end_chunk);

    constexpr int kBytes = kByte ? 1 : 2;
    const CachePages keys{args.k_cache + head_kv * args.k_head * kBytes, args.k_page * kBytes, args.k_row * kBytes};
    const CachePages values{args.v_cache + head_kv * args.v_head * kBytes, args.v_page * kBytes, args.v_row * kBytes};
    const bool whole_pages = args.table == nullptr || args.page_size % kChunk == 0;  // a chunk lies in one page
    const int k_vectors = static_cast<int>(args.d_qk) * kBytes / 16,
              v_vectors = static_cast<int>(args.d_v) * kBytes / 16;
    u8* const ring = shared + warp * (kDecodeStages * 2 * kTileBytes);

    auto page_index = [&](int key) { return static_cast<int>(divided(static_cast<u32>(key), args.page_divisor)); };
    auto page_of = [&](int key) -> i64 { return pages == nullptr ? batch : pages[page_index(key)]; };
    auto slot_of = [&](int key) { return key - page_index(key) * static_cast<int>(args.page_size); };
    // Starts the copy of a chunk; its page is already known if chunks do not cross pages.
    auto fetch = [&](int chunk, int stage, i64 page) {
        constexpr int kRowsPerCopy = kWarp / kVectors;
        const int j0 = chunk * kChunk, row = lane / kVectors, vector = lane % kVectors;
        const ptx::SharedAddress to = ptx::shared_address(ring + stage * 2 * kTileBytes);
        const int k_rows = vector < k_vectors ? sequence.keys - j0 - row : 0;
        const int v_rows = vector < v_vectors ? sequence.keys - j0 - row : 0;
        if (whole_pages) {
            const int slot = slot_of(j0) + row;
            const u8* k_from = keys.at(page, slot) + vector * 16;
            const u8* v_from = values.at(page, slot) + vector * 16;
#pragma unroll
            for (int i = 0; i < kChunk; i += kRowsPerCopy) {
                const u32 place = Tile::offset(row + i, vector);
                ptx::cp_async_16_or_zero(to + place, k_from, i < k_rows);
                ptx::cp_async_16_or_zero(to + kTileBytes + place, v_from, i < v_rows);
                k_from = settled(k_from + kRowsPerCopy * keys.row), v_from = settled(v_from + kRowsPerCopy * values.row);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kChunk; i += kRowsPerCopy) {
                const int key = j0 + row + i;
                const i64 page_here = key < sequence.keys ? page_of(key) : 0;
                const u32 place = Tile::offset(row + i, vector);
                ptx::cp_async_16_or_zero(to + place, keys.at(page_here, slot_of(key)) + vector * 16, i < k_rows);
                ptx::cp_async_16_or_zero(to + kTileBytes + place, values.at(page_here, slot_of(key)) + vector * 16,
                                         i < v_rows);
            }
        }
    };

    // Fill the first stages. The page number of the chunk after them is in flight while these are processed.
    const int mine = begin + warp;
    i64 next_page = 0;
    if (mine < end) next_page = page_of(mine * kChunk);
#pragma unroll kByte ? kDecodeStages - 1 : 1  // unrolled only where registers allow it: less code to fetch
    for (int s = 0; s < kDecodeStages - 1; ++s) {
        const int chunk = mine + s * warps;
        if (chunk < end) {
            fetch(chunk, s, next_page);
            if (chunk + warps < end) next_page = page_of((chunk + warps) * kChunk);
        }
        ptx::cp_async_commit();
    }

    // Q as left operands; rows that do not exist are 0.
    u32 a[kSteps][4];
    float row_scale[2] = {1.0f, 1.0f};
    load_decode_rows<T, kByte>(a, row_scale, args.q + batch * args.q_batch, args.q_row, args.q_head,
                               head_kv * static_cast<int>(args.group), static_cast<int>(args.group), row0, rows,
                               static_cast<int>(args.d_qk), lane);
    // Fragments that do not fit into registers; they are the same for all warps.
    constexpr bool kSharedQ = D > (kByte ? 64 : 128);
    const ptx::SharedAddress fragments =
        ptx::shared_address(shared + warps * (kDecodeStages * 2 * kTileBytes)) + 16 * lane;
    if constexpr (kSharedQ) {
        if (warp == 0) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                ptx::st_shared_16(fragments + step * (16 * kWarp), Raw<16>{a[step][0], a[step][1], a[step][2], a[step][3]});
        }
        __syncthreads();
    }
    auto left_operand = [&](u32(&to)[4], int step) {
        if constexpr (kSharedQ) {
            const Raw<16> raw = ptx::ld_shared_16(fragments + step * (16 * kWarp));
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = raw.w[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = a[step][i];
        }
    };
    const float product_scale =
        static_cast<float>(args.scale) * (args.k_scale == nullptr ? 1.0f : args.k_scale[head_kv * args.k_scale_head]);
    row_scale[0] *= product_scale, row_scale[1] *= product_scale;
    const float cap = static_cast<float>(args.softcap), inverse_cap = cap > 0.0f ? 1.0f / cap : 0.0f;
    int lo[2], hi[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = min(row0 + lane / 4 + 8 * r, rows - 1) / static_cast<int>(args.group);
        lo[r] = mask.lo(query), hi[r] = mask.hi(query);
    }

    float sums[D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
    LazySoftmax softmax;
    int stage = 0;
#pragma unroll 1
    for (int chunk = mine; chunk < end; chunk += warps) {
        ptx::cp_async_wait<kDecodeStages - 2>();
        __syncwarp();
        const int later = chunk + (kDecodeStages - 1) * warps;
        if (later < end) {
            fetch(later, stage == 0 ? kDecodeStages - 1 : stage - 1, next_page);
            if (later + warps < end) next_page = page_of((later + warps) * kChunk);
        }
        ptx::cp_async_commit();
        const u8* const k_tile = ring + stage * 2 * kTileBytes;
        const u8* const v_tile = k_tile + kTileBytes;
        stage = stage + 1 == kDecodeStages ? 0 : stage + 1;

        float s[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
        if constexpr (kByte) {
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                u32 b[4];
                Tile::right(b, k_tile, 0, step / 2, lane);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 from_q[4];
                    left_operand(from_q, step + half);
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        mma_step<M>(s[n], from_q, codes_to_f16x2<CODES, 0, 1>(b[2 * n + half]),
                                    codes_to_f16x2<CODES, 2, 3>(b[2 * n + half]));
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                u32 b[4], from_q[4];
                Tile::right(b, k_tile, 0, step, lane);
                left_operand(from_q, step);
                mma_step<M>(s[0], from_q, b[0], b[1]);
                mma_step<M>(s[1], from_q, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = chunk * kChunk + 8 * n + lane % 4 * 2 + e % 2;
                float score = s[n][e] * row_scale[e / 2];
                if (cap > 0.0f) score = cap * tanh_by_ex2(score * inverse_cap);
                s[n][e] = key < lo[e / 2] || key >= hi[e / 2] ? negative_infinity() : score;
            }
        float correction[2];
        if (softmax.add_lazily(s, kLog2e, correction)) scale_rows(sums, correction);
        u32 p[4];
        as_left<M>(p, s[0], s[1]);
        if constexpr (kByte) {
#pragma unroll
            for (int n = 0; n < D / 32; ++n) {
                u32 b[4];
                Tile::right_transposed(b, v_tile, 0, n, lane);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_step<M>(sums[4 * n + 2 * half], p, codes_to_f16x2<CODES, 0, 2>(b[2 * half]),
                                codes_to_f16x2<CODES, 0, 2>(b[2 * half + 1]));
                    mma_step<M>(sums[4 * n + 2 * half + 1], p, codes_to_f16x2<CODES, 1, 3>(b[2 * half]),
                                codes_to_f16x2<CODES, 1, 3>(b[2 * half + 1]));
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                u32 b[4];
                Tile::right_transposed(b, v_tile, 0, n, lane);
                mma_step<M>(sums[2 * n], p, b[0], b[1]);
                mma_step<M>(sums[2 * n + 1], p, b[2], b[3]);
            }
        }
    }
    ptx::cp_async_wait<0>();
    ptx::launch_dependents();
    __syncthreads();

    // Accumulators of the warps, in rows of kSumPitch floats so that rows of a fragment fall into different banks,
    // followed by their maxima (in log2) and softmax sums. Rows that do not exist are skipped.
    constexpr int kSumPitch = D + 8;
    const int here = min(rows - row0, kDecodeRows);
    float* const own = reinterpret_cast<float*>(shared) + warp * (kDecodeRows * kSumPitch);
    float* const tops = reinterpret_cast<float*>(shared) + warps * (kDecodeRows * kSumPitch);
    float* const totals = tops + warps * kDecodeRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const float total = quad_sum(softmax.sum[r]);
        if (row >= here) continue;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            if constexpr (kByte) {
                // In byte order, tiles 2m and 2m + 1 share 16 columns: 4t + 2c and 4t + 2c + 1.
                float* const to = own + row * kSumPitch + n / 2 * 16 + lane % 4 * 4 + n % 2;
                to[0] = sums[n][2 * r], to[2] = sums[n][2 * r + 1];
            } else {
                *reinterpret_cast<float2*>(own + row * kSumPitch + n * 8 + lane % 4 * 2) = make_float2(sums[n][2 * r], sums[n][2 * r + 1]);
            }
        }
        if (lane % 4 == 0) {
            tops[warp * kDecodeRows + row] = softmax.top[r] == negative_infinity() ? softmax.top[r] : softmax.top[r] * kLog2e;
            totals[warp * kDecodeRows + row] = total;
        }
    }
    __syncthreads();
    const float value_scale = args.v_scale == nullptr ? 1.0f : args.v_scale[head_kv * args.v_scale_head];
    const float* const all = reinterpret_cast<const float*>(shared);
    const int width = static_cast<int>(args.d_v), quads = width / 4;
    for (int i = static_cast<int>(threadIdx.x); i < here * quads; i += static_cast<int>(blockDim.x)) {
        const int row = i / quads, column = i % quads * 4;
        const int query = (row0 + row) / static_cast<int>(args.group),
                  head = head_kv * static_cast<int>(args.group) + (row0 + row) % static_cast<int>(args.group);
        const float sink = args.splits > 1 || args.sinks == nullptr ? negative_infinity() : args.sinks[head] * kLog2e;
        float top = sink;
        for (int w = 0; w < warps; ++w) top = fmaxf(top, tops[w * kDecodeRows + row]);
        const float from = top == negative_infinity() ? 0.0f : top;
        float total = ptx::ex2(sink - from), value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int w = 0; w < warps; ++w) {
            const float weight = ptx::ex2(tops[w * kDecodeRows + row] - from);
            total += weight * totals[w * kDecodeRows + row];
            const float4 part = *reinterpret_cast<const float4*>(all + (w * kDecodeRows + row) * kSumPitch + column);
            value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
        }
        const float times = total == 0.0f ? 0.0f : value_scale / total;
        const float log_sum = total == 0.0f ? negative_infinity() : (from + log2f(total)) * kLn2;
#pragma unroll
        for (int c = 0; c < 4; ++c) value[c] *= times;
        const i64 flat = (static_cast<i64>(batch) * args.lq + query) * args.heads + head;
        if (args.splits > 1) {
            store<float, 4>(args.parts + (split * (gridDim.z * args.lq * args.heads) + flat) * width + column, value);
            if (column == 0) args.part_lse[split * (gridDim.z * args.lq * args.heads) + flat] = log_sum;
        } else {
            store<T, 4>(args.out + batch * args.out_batch + query * args.out_row + head * args.out_head + column,
                        value);
            if (column == 0) args.lse[(static_cast<i64>(batch) * args.heads + head) * args.lq + query] = log_sum;
        }
    }
}

}  // namespace rtk
