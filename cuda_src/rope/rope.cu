// Rotary position embedding of q and k heads:  x [batch, length, heads, head_dim] with any strides between heads,
// positions and batches, unit stride within a head. Elements outside of the rotary part are copied (or left alone in
// place). Arithmetic is fp32, rounded once. Rotations: rope/angles.cuh.
//
// Parameters of rope and rope_any: k may be null (k_heads 0). `slots` groups of threads work on a token, each on up to
// kRopeHeads heads (slot, slot + slots, ...), q's first: the rotation of a token is read once per group.
#include "rope/head_chunks.cuh"
#include "rope/fetch_heads.cuh"

namespace rtk {

inline constexpr int kRopeHeads = 4;

inline constexpr int kTokenThreads = 192;  // of a block, at most
inline constexpr int kTokenBlocks = 5;     // blocks of that size per SM that registers must suffice for

// Flags of rope_token: a chunk may hold elements of both halves, or of a part of the head that is not rotated, in units
// of half a chunk; the lanes of a head may be in two warps.
inline constexpr int kSplitChunks = 1, kAcrossWarps = 2;

template <typename T>
struct TokenArguments {
    const T *q, *k;
    T *q_out, *k_out;
    i64 tokens, length, q_heads, k_heads, q_slots, k_slots, groups, block_tokens, lanes, begin, width, first, pairs,
        flags, q_batch, q_place, q_head, k_batch, k_place, k_head, q_out_batch, q_out_place, q_out_head, k_out_batch,
        k_out_place, k_out_head, by_lanes, by_slots, by_length;
    AngleArguments angle;
};

// Pairs stay neighbours or halves apart (`pairs`). A block owns `block_tokens` tokens from blockIdx.x * block_tokens on,
// or a part of the heads of one token, blockIdx.y: q_slots and then k_slots groups of `lanes` threads for each token,
// `groups` in the block, each with every q_slots-th q head or k_slots-th k head. A lane has one 16-byte chunk of the
// `width` elements from `begin` on of each of its heads. All chunks are copied to shared memory at once, [heads,
// threads], so that registers do not limit the bytes in flight; the lane then reads its own chunks, and those with the
// partners of its elements.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads, kTokenBlocks)
    rope_token(const __grid_constant__ TokenArguments<T> args) {
    constexpr int N = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    const int group = static_cast<int>(divided(threadIdx.x, args.by_lanes));
    const int lane = static_cast<int>(threadIdx.x) - group * static_cast<int>(args.lanes);
    int at = group + static_cast<int>(blockIdx.y) * static_cast<int>(args.groups);
    const int of_block = static_cast<int>(divided(at, args.by_slots));  // which of the block's tokens
    at -= of_block * static_cast<int>(args.q_slots + args.k_slots);
    const u32 token = blockIdx.x * static_cast<u32>(args.block_tokens) + of_block;
    const int batch = static_cast<int>(divided(token, args.by_length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(args.length));
    const int column = static_cast<int>(args.begin) + lane * N;
    const bool is_q = at < static_cast<int>(args.q_slots);
    if (!is_q) at -= static_cast<int>(args.q_slots);
    const int step = static_cast<int>(is_q ? args.q_slots : args.k_slots);
    int left = static_cast<int>(is_q ? args.q_heads : args.k_heads) - at;
    if (group >= static_cast<int>(args.groups) || of_block >= static_cast<int>(args.block_tokens) ||
        token >= static_cast<u32>(args.tokens) || lane * N >= static_cast<int>(args.width))
        left = 0;

    const int pitch = static_cast<int>(blockDim.x) * 16;
    ptx::SharedAddress slot = ptx::shared_address(memory + threadIdx.x * 16);
    {
        const i64 head = is_q ? args.q_head : args.k_head;
        const T* x = (is_q ? args.q + (batch * args.q_batch + place * args.q_place)
                           : args.k + (batch * args.k_batch + place * args.k_place)) + at * head + column;
        const i64 to_next = step * head;
        fetch_heads(x, to_next, left, step, slot, pitch);
    }
    const Angles angles = args.angle.of(args.length);
    const bool adjacent = args.pairs == kAdjacent, split = args.flags & kSplitChunks;
    const int turned = column - static_cast<int>(args.first);  // column of the rotary part
    const HalfChunk<T> lower(turned, angles.rotary, adjacent), upper(turned + N / 2, angles.rotary, adjacent);
    const bool rotated = left > 0 && (lower.rotated || upper.rotated);
    ChunkRotation<N> rotation;
    if (rotated) {
        const i64 row = angles.row(batch, place, 0);
        if (split) {
            load_split_rotation<T, N>(angles, row, turned, adjacent, lower.rotated, upper.rotated, rotation);
        } else {
            load_chunk_rotation<T, N>(angles, row, turned, adjacent, rotation);
            finish_chunk_rotation<N>(angles, turned, adjacent, rotation);
        }
    }
    const i64 head = is_q ? args.q_out_head : args.k_out_head;
    T* y = (is_q ? args.q_out + (batch * args.q_out_batch + place * args.q_out_place)
                 : args.k_out + (batch * args.k_out_batch + place * args.k_out_place)) + at * head + column;
    const i64 to_next = step * head;
    ptx::cp_async_wait<0>();
    if (args.flags & kAcrossWarps) {
        __syncthreads();
    } else {
        __syncwarp();
    }
#pragma unroll 4
    for (; left > 0; left -= step) {
        Raw<16> raw = ptx::ld_shared_16(slot);
        if (rotated) {
            float x[N], other[N];
            unpack<T, N>(raw, x);
            Raw<16> others;
            if (split) {
                const Raw<8> a = ptx::ld_shared_8(slot + lower.to_other), b = ptx::ld_shared_8(slot + (8 + upper.to_other));
                others.w[0] = a.w[0], others.w[1] = a.w[1], others.w[2] = b.w[0], others.w[3] = b.w[1];
            } else {
                others = ptx::ld_shared_16(slot + lower.to_other);
            }
            unpack_others<T>(others, adjacent, other);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = x[i] * rotation.own[i] + other[i] * rotation.cross[i];
            Raw<16> result = pack<T, N>(x);
            if (split) {  // what is not rotated keeps its bits
                if (!lower.rotated) result.w[0] = raw.w[0], result.w[1] = raw.w[1];
                if (!upper.rotated) result.w[2] = raw.w[2], result.w[3] = raw.w[3];
            }
            raw = result;
        }
        ptx::st<16>(y, raw);
        y += to_next;
        slot = slot + pitch;
    }
}

template <typename T>
struct RopeArguments {
    const T *q, *k;
    T *q_out, *k_out;
    i64 tokens, length, q_heads, k_heads, slots, lane_bits, first, spare, pairs, q_batch, q_place, q_head, k_batch,
        k_place, k_head, q_out_batch, q_out_place, q_out_head, k_out_batch, k_out_place, k_out_head, by_slots,
        by_length;
    AngleArguments angle;
};

// For pairs that change their order. Groups of 2^lane_bits lanes, one flat index over (token, slot); 16-byte chunks.
// `spare` counts chunks.
template <typename T, int PAIRS>
__global__ void __launch_bounds__(128, 4) rope(const __grid_constant__ RopeArguments<T> args) {
    constexpr int N = 16 / sizeof(T);
    const int lane = static_cast<int>(threadIdx.x & ((1u << args.lane_bits) - 1u));
    const u32 group = blockIdx.x * (blockDim.x >> args.lane_bits) + (threadIdx.x >> args.lane_bits);
    const u32 token = divided(group, args.by_slots);
    const int slot = static_cast<int>(group - token * static_cast<u32>(args.slots));
    const int batch = static_cast<int>(divided(token, args.by_length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(args.length));
    const HeadChunks<N, PAIRS> own(lane, static_cast<int>(args.first), static_cast<int>(args.angle.rotary),
                                   static_cast<int>(args.spare));
    const int from_q = static_cast<int>(args.q_heads);
    const int heads = token < static_cast<u32>(args.tokens) && own.any ? from_q + static_cast<int>(args.k_heads) : 0;

    const T* q_in = args.q + batch * args.q_batch + place * args.q_place;
    const T* k_in = args.k + batch * args.k_batch + place * args.k_place - from_q * args.k_head;

    Raw<16> a[kRopeHeads], b[kRopeHeads];
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const int head = slot + i * static_cast<int>(args.slots);
        clear(a[i]), clear(b[i]);
        if (head < heads) {
            const T* x = head < from_q ? q_in + head * args.q_head : k_in + head * args.k_head;
            a[i] = load_raw<T, N>(x + own.in_a);
            b[i] = load_raw<T, N>(x + own.in_b);
        }
    }
    Rotation<N> r;
    if (heads > 0 && own.rotated) load_rotation<T, N, PAIRS == kAdjacent>(args.angle.of(args.length), batch, place,
                                                                          lane, r);
    T* q_to = args.q_out + batch * args.q_out_batch + place * args.q_out_place;
    T* k_to = args.k_out + batch * args.k_out_batch + place * args.k_out_place - from_q * args.k_out_head;
    // In place, lanes of a head that reorders its pairs write where others still read.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const int head = slot + i * static_cast<int>(args.slots);
        if (head < heads) {
            T* y = head < from_q ? q_to + head * args.q_out_head : k_to + head * args.k_out_head;
            if (own.rotated) {
                float fa[N], fb[N];
                unpack<T, N>(a[i], fa);
                unpack<T, N>(b[i], fb);
                rotate<N, PAIRS>(r, fa, fb);
                a[i] = pack<T, N>(fa);
                b[i] = pack<T, N>(fb);
            }
            ptx::st<16>(y + own.out_a, a[i]);
            ptx::st<16>(y + own.out_b, b[i]);
        }
    }
}

// Any sizes and alignments: a warp per (token, head), a lane per pair or element at a time. `spare` counts elements,
// `slots` is the number of heads, lane_bits is 5.
template <typename T>
__global__ void __launch_bounds__(128, 4) rope_any(const __grid_constant__ RopeArguments<T> args) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const u32 unit = blockIdx.x * (blockDim.x >> args.lane_bits) + (threadIdx.x >> args.lane_bits);
    const u32 token = divided(unit, args.by_slots);
    if (token >= static_cast<u32>(args.tokens)) return;
    const int head = static_cast<int>(unit - token * static_cast<u32>(args.slots));
    const int batch = static_cast<int>(divided(token, args.by_length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(args.length));
    const int from_q = static_cast<int>(args.q_heads);
    const bool is_q = head < from_q;
    const int of_k = head - from_q;
    const T* x = is_q ? args.q + batch * args.q_batch + place * args.q_place + head * args.q_head
                      : args.k + batch * args.k_batch + place * args.k_place + of_k * args.k_head;
    T* y = is_q ? args.q_out + batch * args.q_out_batch + place * args.q_out_place + head * args.q_out_head
                : args.k_out + batch * args.k_out_batch + place * args.k_out_place + of_k * args.k_out_head;
    const Angles angles = args.angle.of(args.length);
    const TokenRows rows(angles, batch, place);
    for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
        const PairPlace at(pair, static_cast<int>(args.first), angles.rotary, static_cast<int>(args.pairs));
        Rotation<1> r;
        load_pair<T>(angles, rows, pair, r);
        float a[1] = {load_one(x + at.in_0)}, b[1] = {load_one(x + at.in_1)};
        rotate<1, kHalves>(r, a, b);
        store_one(y + at.out_0, a[0]);
        store_one(y + at.out_1, b[0]);
    }
    for (int i = lane; i < args.spare; i += kWarp) {
        const int at = i < args.first ? i : i + angles.rotary;
        ptx::st<sizeof(T)>(y + at, load_raw<T, 1>(x + at));
    }
}

template <typename T>
struct TablesArguments {
    float *cos_out, *sin_out;
    i64 tokens, length, width;
    AngleArguments angle;
};

// The entries of every token, cos and sin, times mscale, fp32 [tokens, width], with the width of the tables: turns
// tables with several position streams or unaligned rows into ones that rope can read. One thread per entry.
template <typename T>
__global__ void __launch_bounds__(256)
    rope_tables(const __grid_constant__ TablesArguments<T> args) {
    const Angles angles = args.angle.of(args.length);
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const u32 token = static_cast<u32>(blockIdx.y);
    for (i64 t = token; t < args.tokens; t += gridDim.y) {
        if (i >= args.width) return;
        const int column = static_cast<int>(i);
        const int batch = static_cast<int>(static_cast<u32>(t) / static_cast<u32>(args.length));
        const int place = static_cast<int>(static_cast<u32>(t) - batch * static_cast<u32>(args.length));
        const int half = angles.rotary / 2;
        const bool full = angles.flags & kTableFull, adjacent = full && (angles.flags & kTableAdjacent);
        const int pair = adjacent ? column / 2 : column < half ? column : column - half;
        const i64 row = angles.row(batch, place, angles.stream_of(pair));
        float c = __uint_as_float(0x7fffffffu), s = c;
        if (row >= 0) {
            float value[1];
            load_entries<T, 1>(angles.cos, row * angles.stride + column, angles.flags, value), c = value[0];
            load_entries<T, 1>(angles.sin, row * angles.stride + column, angles.flags, value), s = value[0];
        }
        args.cos_out[t * args.width + column] = c * angles.mscale;
        args.sin_out[t * args.width + column] = s * angles.mscale;
    }
}

}  // namespace rtk
