// Forward of the split, norm and rotation of qkv: rope/qk_norm_rope.cuh describes the computation and the division of
// work.
#include "rope/fetch_heads.cuh"
#include "rope/qk_by_element.cuh"
#include "rope/staged_rotations.cuh"

namespace rtk {

inline constexpr int kQkThreads = 192;  // of a block, at most
inline constexpr int kQkBlocks = 6;     // blocks of that size per SM that registers must suffice for

// N fp32 numbers of a chunk in shared memory, four at a time: the first where the chunk itself was, the others `plane`
// bytes after it.
template <int N>
RTK_DEVICE void put_floats(ptx::SharedAddress to, int plane, const float (&f)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        Raw<16> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.w[j] = __float_as_uint(f[i + j]);
        ptx::st_shared_16(to + i / 4 * plane, four);
    }
}

template <int N>
RTK_DEVICE void get_floats(ptx::SharedAddress from, int plane, float (&f)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const Raw<16> four = ptx::ld_shared_16(from + i / 4 * plane);
#pragma unroll
        for (int j = 0; j < 4; ++j) f[i + j] = __uint_as_float(four.w[j]);
    }
}

template <typename T>
struct QkForwardArguments {
    const T *qkv;
    const void *q_weight, *k_weight;
    T *q, *k, *v;
    i64 tokens, length, qkv_batch, qkv_place, q_heads, kv_heads, q_slots, kv_slots, set_slots, set_heads, set_columns,
        q_step, q_extra, kv_step, k_first, v_first, head_dim, block_tokens, groups, max_heads, pairs, weight_fp32,
        by_chunks, by_groups, by_set, by_group, inner, by_inner, batch_inner;
    double eps, offset, inverse_dim;
    AngleArguments angle;
};

// A block owns the groups of block_tokens tokens (in the memory order of qkv: `inner` batches of a position side by
// side, or positions of a batch), or a part of those of one token, blockIdx.y. A group is `chunks` neighbouring
// threads, as many as a head has 16-byte chunks, regardless of warp boundaries: every head size keeps all threads busy.
// A thread has one chunk of each of its heads. All of them are copied to shared memory at once, so that registers do
// not limit the bytes in flight. Threads leave their sums of squares in shared memory, others add those of a head, and
// after that a thread reads its own chunk, and the partners of its elements, which are in the same row of shared
// memory. Some threads compute the rotation factors meanwhile; if they can, they load the tables before their heads,
// because otherwise the tables would queue behind them. With SILU, shared memory holds silu(x) in fp32 instead of x for
// the second read.
//
// The q heads form sets of set_heads, each the work of set_slots groups; sets are set_columns heads apart in qkv. Group
// `at` of a set has its heads at, at + set_slots, ..., which are evenly spaced (by q_step heads) in qkv. Shared memory:
// `max_heads` chunks of each thread (twice with SILU and 16-bit elements), StagedRotations of each token, sums of
// squares [max_heads, threads + 1], 1 / rms [groups, kFetchedHeads].
template <typename T, bool SILU>
__global__ void __launch_bounds__(kQkThreads, SILU ? kQkBlocks - 1 : kQkBlocks)
    qk_norm_rope_fwd(const __grid_constant__ QkForwardArguments<T> args) {
    constexpr int N = 16 / sizeof(T);
    constexpr int kPlanes = SILU ? N / 4 : 1;  // 16 bytes each for a chunk
    extern __shared__ __align__(16) u8 memory[];
    const int dim = static_cast<int>(args.head_dim), chunks = dim / N;
    const float shift = static_cast<float>(args.offset);
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int of_token = static_cast<int>(args.groups), all_groups = of_token * static_cast<int>(args.block_tokens);
    const int group = static_cast<int>(divided(threadIdx.x, args.by_chunks));
    const int column = (thread - group * chunks) * N;
    const int local = static_cast<int>(divided(group, args.by_groups));  // token of the block
    const u32 walked = blockIdx.x * static_cast<u32>(args.block_tokens) + local;
    const bool active = group < all_groups && walked < static_cast<u32>(args.tokens);
    const u32 outer = divided(walked, args.by_inner);
    const u32 rest = walked - outer * static_cast<u32>(args.inner);
    const int batch = static_cast<int>(args.batch_inner ? rest : outer);
    const int place = static_cast<int>(args.batch_inner ? outer : rest);
    const int of_kv = static_cast<int>(args.kv_slots);
    const int first_group = static_cast<int>(blockIdx.y) * of_token;
    const int heads = static_cast<int>(args.max_heads);

    int at = group - local * of_token + first_group;
    int from, head, step, stride, left;  // column in heads, head; steps of both; remaining heads
    int part = kQ;
    if (at < static_cast<int>(args.q_slots)) {
        const int set = static_cast<int>(divided(at, args.by_set));
        step = static_cast<int>(args.set_slots);
        at -= set * step;
        head = set * static_cast<int>(args.set_heads) + at;
        from = set * static_cast<int>(args.set_columns) + at +
               static_cast<int>(args.q_extra) * static_cast<int>(divided(at, args.by_group));
        stride = static_cast<int>(args.q_step);
        left = static_cast<int>(args.set_heads) - at;
    } else {
        at -= static_cast<int>(args.q_slots);
        part = at < of_kv ? kK : kV;
        if (part == kV) at -= of_kv;
        head = at;
        step = of_kv;
        from = at * static_cast<int>(args.kv_step) + static_cast<int>(part == kK ? args.k_first : args.v_first);
        stride = step * static_cast<int>(args.kv_step);
        left = static_cast<int>(args.kv_heads) - at;
    }
    if (!active) left = 0;
    const u32 token = batch * static_cast<u32>(args.length) + place;
    T* y = part == kQ ? args.q : part == kK ? args.k : args.v;
    const int of_part = static_cast<int>(part == kQ ? args.q_heads : args.kv_heads);
    y += static_cast<i64>(token) * (of_part * dim) + (head * dim + column);
    const int pitch = threads * 16, plane = heads * pitch;
    const ptx::SharedAddress own = ptx::shared_address(memory + thread * 16);
    const StagedRotations<N> staged{memory + kPlanes * plane + local * (16 * N * chunks), chunks};
    float* squares =
        reinterpret_cast<float*>(memory + kPlanes * plane + static_cast<int>(args.block_tokens) * (16 * N * chunks));
    float* rstds = squares + heads * (threads + 1);
    const bool adjacent = args.pairs == kAdjacent;
    const int half = static_cast<int>(args.angle.rotary) / 2;
    const bool whole = half % N == 0;  // so that the partners of a chunk's elements are in one chunk
    const Angles angles = args.angle.of(args.length);
    const T* x = args.qkv + (batch * args.qkv_batch + place * args.qkv_place) + (from * dim + column);
    const int to_next_x = stride * dim;
    if (whole) {
        // The last threads of a token, which have fewer heads, compute the factors. There are at least 2 * chunks.
        const int task = (local + 1) * of_token * chunks - 1 - thread;
        const bool makes_rotation = task < 2 * chunks && active;
        const int begin = (task < chunks ? task : task - chunks) * N;
        ChunkRotation<N> factors;
#pragma unroll
        for (int i = 0; i < N; ++i) factors.own[i] = 1.0f, factors.cross[i] = 0.0f;
        const bool rotates = makes_rotation && begin < 2 * half, tables_known = tables_first<T>(angles);
        if (rotates && tables_known)
            load_chunk_rotation<float, N>(angles, angles.direct_row(batch, place), begin, adjacent, factors);
        fetch_heads(x, to_next_x, left, step, own, pitch);
        if (rotates && !tables_known) load_chunk_rotation<T, N>(angles, angles.row(batch, place, 0), begin, adjacent, factors);
        if (makes_rotation) {
            const void* weight = task < chunks ? args.q_weight : args.k_weight;
            float gain[N], of_other[N];
            load_gains<T, N>(weight, begin, begin + to_other_half(begin, half, adjacent), args.weight_fp32,
                             shift, gain, of_other);
            if (rotates) finish_chunk_rotation<N>(angles, begin, adjacent, factors);
#pragma unroll
            for (int i = 0; i < N; ++i)
                factors.own[i] *= gain[i], factors.cross[i] *= adjacent ? of_other[i ^ 1] : of_other[i];
            staged.put(task < chunks ? 0 : 1, begin / N, factors);
        }
    } else {
        // A word at a time, for q's heads and k's, again by the last threads of a token.
        constexpr int W = 4 / sizeof(T);
        const int apart = of_token * chunks * W, first = ((local + 1) * of_token * chunks - 1 - thread) * W;
        const bool asked = tables_first<T>(angles) && first < 2 * half && active;
        WordFactors<W> factors;
        if (asked) load_word_entries<float, W>(angles, angles.direct_row(batch, place), first, adjacent, factors);
        fetch_heads(x, to_next_x, left, step, own, pitch);
#pragma unroll 1
        for (int begin = first; begin < dim && active; begin += apart) {
            const bool rotates = begin < 2 * half;
            if (rotates && !(asked && begin == first)) {
                const i64 row = angles.row(batch, place, 0);
                if (sizeof(T) == 4 || (angles.flags & kTableFp32)) {
                    load_word_entries<float, W>(angles, row, begin, adjacent, factors);
                } else {
                    load_word_entries<T, W>(angles, row, begin, adjacent, factors);
                }
            }
            const int other = W == 1 && adjacent && rotates ? begin ^ 1 : begin + to_other_half(begin, half, adjacent);
            float gains[4][W];  // of q's word, of its partner word, and of k's
            load_gains<T, W>(args.q_weight, begin, other, args.weight_fp32, shift, gains[0], gains[1]);
            load_gains<T, W>(args.k_weight, begin, other, args.weight_fp32, shift, gains[2], gains[3]);
            if (rotates) {
                finish_word<W>(angles, begin, adjacent, factors);
            } else {
#pragma unroll
                for (int i = 0; i < W; ++i) factors.own[i] = 1.0f, factors.cross[i] = 0.0f;
            }
            const bool swap = adjacent && rotates;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
#pragma unroll
                for (int i = 0; i < W; ++i)
                    staged.put(part, begin + i, factors.own[i] * gains[2 * part][i],
                               factors.cross[i] * (swap ? gains[2 * part + 1][W - 1 - i] : gains[2 * part + 1][i]));
            }
        }
    }
    ptx::cp_async_wait<0>();

    if (part != kV && group < all_groups) {
#pragma unroll
        for (int i = 0; i < kFetchedHeads; ++i) {
            if (i >= heads) break;
            float square = 0.0f;
            if (i * step < left) {
                float u[N];
                unpack_u<T, N, SILU>(ptx::ld_shared_16(own + i * pitch), u);
#pragma unroll
                for (int e = 0; e < N; ++e) square += u[e] * u[e];
                if constexpr (SILU) put_floats<N>(own + i * pitch, plane, u);
            }
            squares[i * (threads + 1) + thread] = square;
        }
    }
    __syncthreads();
    {
        const float inverse = static_cast<float>(args.inverse_dim), epsilon = static_cast<float>(args.eps);
        const int normed = min(static_cast<int>(args.q_slots) + of_kv - first_group, of_token);
        const int count = all_groups * kFetchedHeads;
        // Four, two or one lanes add those of a head, depending on the number of threads.
        const int bits = threads >= 4 * count ? 2 : threads >= 2 * count ? 1 : 0;
        const int lane = thread & ((1 << bits) - 1);
        for (int base = 0; base < count; base += threads >> bits) {
            const int sum = base + (thread >> bits), i = sum % kFetchedHeads, of = sum / kFetchedHeads;
            const int slot = of - static_cast<int>(divided(of, args.by_groups)) * of_token;
            const bool exists = sum < count && slot < normed && i < heads;
            const float* row = squares + i * (threads + 1) + of * chunks;
            float square = 0.0f;
            if (exists) {
#pragma unroll 4
                for (int c = lane; c < chunks; c += 1 << bits) square += row[c];
            }
            if (bits >= 1) square += __shfl_xor_sync(0xffffffffu, square, 1);
            if (bits == 2) square += __shfl_xor_sync(0xffffffffu, square, 2);
            if (exists && lane == 0) rstds[sum] = rsqrtf(square * inverse + epsilon);
        }
    }
    __syncthreads();

    if (left <= 0) return;
    const int to_next = step * dim;
    if (part == kV) {
#pragma unroll
        for (int i = 0; i < kFetchedHeads; ++i) {
            if (i * step < left) {
                Raw<16> raw = ptx::ld_shared_16(own + i * pitch);
                if constexpr (SILU) {
                    float u[N];
                    unpack_u<T, N, SILU>(raw, u);
                    raw = pack<T, N>(u);
                }
                ptx::st<16>(y + i * to_next, raw);
            }
        }
        return;
    }
    ChunkRotation<N> rotation;
    staged.get(part == kQ ? 0 : 1, column / N, rotation);
    const float* rstd_of = rstds + group * kFetchedHeads;
    // Calls others(row, its own numbers, their partners) for every head, and writes the head. No branches in a batch of
    // heads without SILU, so that all its loads can be issued together.
    constexpr int kBatch = SILU ? 1 : 4;
    auto each_head = [&](auto others) {
#pragma unroll 1
        for (int i = 0; i * step < left; i += kBatch) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const bool exists = (i + j) * step < left;
                const int row = exists ? (i + j) * pitch : 0;
                const float rstd = rstd_of[exists ? i + j : 0];
                float u[N], other[N];
                if constexpr (SILU) {
                    get_floats<N>(own + row, plane, u);
                } else {
                    unpack<T, N>(ptx::ld_shared_16(own + row), u);
                }
                others(row, u, other);
#pragma unroll
                for (int e = 0; e < N; ++e) u[e] = (u[e] * rotation.own[e] + other[e] * rotation.cross[e]) * rstd;
                if (exists) ptx::st<16>(y, pack<T, N>(u));
                y += to_next;
            }
        }
    };
    if (whole) {
        const int to_partner = to_other_half(column, half, adjacent) / N * 16;
        each_head([&](int row, const float(&u)[N], float(&other)[N]) {
            if constexpr (SILU) {
                get_floats<N>(own + (row + to_partner), plane, other);
                if (adjacent) {
#pragma unroll
                    for (int e = 0; e < N; ++e) other[e] = u[e ^ 1];
                }
            } else {
                unpack_others<T>(ptx::ld_shared_16(own + (row + to_partner)), adjacent, other);
            }
        });
    } else if constexpr (SILU) {
        int to_partner[N];
#pragma unroll
        for (int e = 0; e < N; ++e) {
            const int there = column + e + to_other_half(column + e, half, adjacent);
            to_partner[e] = (group * chunks + there / N) * 16 + there % N / 4 * plane + there % 4 * 4;
        }
        each_head([&](int row, const float(&u)[N], float(&other)[N]) {
#pragma unroll
            for (int e = 0; e < N; ++e) {
                other[e] = *reinterpret_cast<const float*>(memory + (row + to_partner[e]));
                if (adjacent) other[e] = u[e ^ 1];
            }
        });
    } else {
        constexpr int kWord = 4 / sizeof(T);
        int to_partner[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
            to_partner[w] = thread * 16 + 4 * w +
                            to_other_half(column + w * kWord, half, adjacent) * static_cast<int>(sizeof(T));
        each_head([&](int row, const float(&)[N], float(&other)[N]) {
            Raw<16> raw;
#pragma unroll
            for (int w = 0; w < 4; ++w) raw.w[w] = *reinterpret_cast<const u32*>(memory + (row + to_partner[w]));
            unpack_others<T>(raw, adjacent, other);
        });
    }
}

template <typename T>
struct QkForwardAnyArguments {
    const T *qkv;
    const void *q_weight, *k_weight;
    T *q, *k, *v;
    QkvShape shape;
    i64 pairs, activated;
    AngleArguments angle;
};

// Any head size and alignment: a warp per (token, head) reads its head twice. lane_bits is 5, q_slots and kv_slots are
// the numbers of heads, `pairs` kHalves or kAdjacent.
template <typename T>
__global__ void __launch_bounds__(128, 4)
    qk_norm_rope_fwd_any(const __grid_constant__ QkForwardAnyArguments<T> args) {
    const QkvShape shape = args.shape;
    const u32 slots = static_cast<u32>(shape.q_slots + 2 * shape.kv_slots);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const u32 unit = blockIdx.x * (blockDim.x >> shape.lane_bits) + (threadIdx.x >> shape.lane_bits);
    const u32 token = divided(unit, shape.by_slots);
    if (token >= static_cast<u32>(shape.tokens)) return;
    const int batch = static_cast<int>(divided(token, shape.by_length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(shape.length));
    const HeadSlot slot(static_cast<int>(unit - token * slots), static_cast<int>(shape.q_slots),
                        static_cast<int>(shape.kv_slots), static_cast<int>(shape.q_heads),
                        static_cast<int>(shape.kv_heads));
    const int dim = static_cast<int>(shape.head_dim);
    const T* x = args.qkv + batch * shape.qkv_batch + place * shape.qkv_place +
                 dim * head_column(slot.part, slot.first, shape.group_magic, shape.q_extra, shape.kv_step,
                                   shape.k_first, shape.v_first);
    T* y = slot.part == kQ ? args.q : slot.part == kK ? args.k : args.v;
    y += (static_cast<i64>(token) * slot.heads + slot.first) * dim;
    auto u = [&](int i) {
        float value[1];
        unpack<T, 1>(ptx::ld_keep<sizeof(T)>(x + i), value);
        return args.activated ? silu<sizeof(T) == 2>(value[0]).value : value[0];
    };
    if (slot.part == kV) {
        for (int i = lane; i < dim; i += kWarp) store_one(y + i, u(i));
        return;
    }
    float square = 0.0f;
    for (int i = lane; i < dim; i += kWarp) square += u(i) * u(i);
    square = warp_reduce<Sum>(square);
    const float rstd = rsqrtf(square * static_cast<float>(shape.inverse_dim) + static_cast<float>(shape.eps));
    const void* weight = slot.part == kQ ? args.q_weight : args.k_weight;
    auto normed = [&](int i) {
        return u(i) * rstd * load_weight<T>(weight, i, shape.weight_fp32, static_cast<float>(shape.offset));
    };
    const Angles angles = args.angle.of(shape.length);
    const TokenRows rows(angles, batch, place);
    for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
        const PairPlace at(pair, 0, angles.rotary, static_cast<int>(args.pairs));
        Rotation<1> r;
        load_pair<T>(angles, rows, pair, r);
        float a[1] = {normed(at.in_0)}, b[1] = {normed(at.in_1)};
        rotate<1, kHalves>(r, a, b);
        store_one(y + at.out_0, a[0]);
        store_one(y + at.out_1, b[0]);
    }
    for (int i = angles.rotary + lane; i < dim; i += kWarp) store_one(y + i, normed(i));
}

}  // namespace rtk
