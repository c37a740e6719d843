// Split of a fused qkv projection into heads, RMS norm of every q and k head, rotary position embedding, transpose:
//     u = silu(x) or x;  n = u * rstd * (offset + weight),  rstd = 1/sqrt(mean(u^2) + eps);  out = rotation(n)
// v heads are copied (u). fp32 arithmetic, one rounding at each store. Rotations: rope/angles.cuh.
//
// qkv is [batch, length, columns] with any strides between batches and places; q, k, v come out dense, [batch, length,
// heads, head_dim]. Head h of q begins at column (h + q_extra * (h / group)) * head_dim, where group_magic =
// ceil(2^32 / group); head h of k and v at (first + kv_step * h) * head_dim. That covers both orders of heads: all of q,
// all of k, all of v; or for each kv head its group of q heads, k, v.
//
// Threads work in groups of 2^lane_bits lanes (Pieces). `slots` groups share a token: q_slots of them take the q heads
// slot, slot + q_slots, ..., then kv_slots each the k and the v heads, at most HEADS apiece, so that a thread needs one
// weight and one rotation.
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "rope/angles.cuh"

namespace rtk {

#define RTK_QKV_PARAMETERS                                                                                         \
    i64 tokens, i64 length, i64 qkv_batch, i64 qkv_place, i64 q_heads, i64 kv_heads, i64 q_slots, i64 kv_slots,    \
        i64 group_magic, i64 q_extra, i64 kv_step, i64 k_first, i64 v_first, i64 head_dim, i64 lane_bits,          \
        i64 weight_wide, double eps, double offset, double inverse_dim

inline constexpr int kQ = 0, kK = 1, kV = 2;

// What the groups of one slot do.
struct HeadSlot {
    int part;   // kQ, kK or kV
    int first;  // head
    int step;
    int heads;  // of this part

    RTK_DEVICE HeadSlot(int slot, int q_slots, int kv_slots, int q_heads, int kv_heads) {
        part = slot < q_slots ? kQ : slot < q_slots + kv_slots ? kK : kV;
        first = part == kQ ? slot : part == kK ? slot - q_slots : slot - q_slots - kv_slots;
        step = part == kQ ? q_slots : kv_slots;
        heads = part == kQ ? q_heads : kv_heads;
    }
};

// Column of qkv where a head begins, in heads.
RTK_DEVICE int head_column(int part, int head, i64 group_magic, i64 q_extra, i64 kv_step, i64 k_first, i64 v_first) {
    if (part == kQ)
        return head + static_cast<int>(q_extra) * static_cast<int>((static_cast<u64>(head) * group_magic) >> 32);
    return head * static_cast<int>(kv_step) + static_cast<int>(part == kK ? k_first : v_first);
}

// Sums N numbers over each group of `lanes` neighbouring lanes; the whole warp calls it.
template <int N>
RTK_DEVICE void group_sums(float (&v)[N], int lanes) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        if (distance < lanes) {
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], distance);
        }
    }
}

template <int N>
RTK_DEVICE void no_rotation(Rotation<N>& r) {
#pragma unroll
    for (int i = 0; i < N; ++i) r.own0[i] = r.own1[i] = 1.0f, r.cross0[i] = r.cross1[i] = 0.0f;
}

// unpack in a way the compiler cannot recognise: it would otherwise keep what it unpacked the first time, in twice the
// registers. `nothing` is zero, which only the host knows.
template <typename T, int N>
RTK_DEVICE void unpack_again(Raw<sizeof(T) * N> raw, u32 nothing, float (&f)[N]) {
    if constexpr (is_same<T, bf16>::value) {
#pragma unroll
        for (int i = 0; i < N; ++i) f[i] = __uint_as_float(__byte_perm(raw.w[i / 2], 0u, i % 2 ? 0x3244u : 0x1044u));
    } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(raw.w) / sizeof(u32)); ++i)
            if constexpr (is_same<T, fp16>::value) raw.w[i] ^= nothing;
        unpack<T, N>(raw, f);
    }
}

template <typename T, int N, bool SILU>
RTK_DEVICE void unpack_u(const Raw<sizeof(T) * N>& raw, float (&u)[N]) {
    unpack<T, N>(raw, u);
    if constexpr (SILU) {
#pragma unroll
        for (int i = 0; i < N; ++i) u[i] = sigmoid_gate<sizeof(T) == 2>(u[i], u[i]).product;
    }
}

// silu'(x) = s * (1 + x * (1 - s))
template <bool kFast>
RTK_DEVICE float silu_slope(float x) {
    const float s = sigmoid_gate<kFast>(x, x).sigmoid;
    return s + sigmoid_gate<kFast>(x * s, -x).product;
}

// (offset + weight) of N columns, or ones without a weight. Columns are a multiple of N; pointers are aligned to 16.
template <typename T, int N>
RTK_DEVICE void load_gain(const void* weight, int column, bool wide, float offset, float (&gain)[N]) {
    if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < N; ++i) gain[i] = 1.0f;
        return;
    }
    load_entries<T, N>(weight, column, wide ? kTableWide : 0, gain);
#pragma unroll
    for (int i = 0; i < N; ++i) gain[i] += offset;
}

// One flat index over (token, slot).
template <typename T, int PAIRS, bool SILU, int HEADS>
__global__ void __launch_bounds__(128, 5)
    qk_norm_rope_fwd(const T* qkv, const void* q_weight, const void* k_weight, T* q, T* k, T* v, RTK_QKV_PARAMETERS,
                     RTK_ANGLE_PARAMETERS) {
    constexpr int N = 16 / sizeof(T);
    const u32 slots = static_cast<u32>(q_slots + 2 * kv_slots);
    const int lanes = 1 << lane_bits;
    const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const u32 group = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const u32 token = group / slots;
    const int batch = static_cast<int>(token / static_cast<u32>(length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(length));
    const HeadSlot slot(static_cast<int>(group - token * slots), static_cast<int>(q_slots),
                        static_cast<int>(kv_slots), static_cast<int>(q_heads), static_cast<int>(kv_heads));
    const int dim = static_cast<int>(head_dim);
    const Pieces<N, PAIRS> own(lane, 0, static_cast<int>(rotary), (dim - static_cast<int>(rotary)) / N);
    const int heads = token < static_cast<u32>(tokens) && own.any ? slot.heads : 0;
    const T* x = qkv + batch * qkv_batch + place * qkv_place;

    Raw<16> a[HEADS], b[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const int head = slot.first + i * slot.step;
        clear(a[i]), clear(b[i]);
        if (head < heads) {
            const int column = dim * head_column(slot.part, head, group_magic, q_extra, kv_step, k_first, v_first);
            a[i] = load_raw<T, N>(x + column + own.in_a);
            b[i] = load_raw<T, N>(x + column + own.in_b);
        }
    }
    const float epsilon = static_cast<float>(eps);
    const float shift = static_cast<float>(offset);
    // The rotation with the weights multiplied into it; lanes beside the rotary part rotate by nothing, so that the
    // lanes of a warp stay together.
    Rotation<N> r;
    if (heads > 0 && slot.part != kV) {
        if (own.rotated) {
            load_rotation<T, N, PAIRS == kAdjacent>(RTK_ANGLES, batch, place, lane, r);
        } else {
            no_rotation(r);
        }
        const void* weight = slot.part == kQ ? q_weight : k_weight;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float gain[N];
            load_gain<T, N>(weight, half == 0 ? own.in_a : own.in_b, weight_wide, shift, gain);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (PAIRS == kAdjacent) {
                    const int pair = half * (N / 2) + i / 2;
                    (i % 2 == 0 ? r.own0 : r.own1)[pair] *= gain[i];
                    (i % 2 == 0 ? r.cross1 : r.cross0)[pair] *= gain[i];
                } else {
                    (half == 0 ? r.own0 : r.own1)[i] *= gain[i];
                    (half == 0 ? r.cross1 : r.cross0)[i] *= gain[i];
                }
            }
        }
    }

    float square[HEADS];
    float kept_a[SILU ? HEADS : 1][N], kept_b[SILU ? HEADS : 1][N];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        float(&fa)[N] = kept_a[SILU ? i : 0];
        float(&fb)[N] = kept_b[SILU ? i : 0];
        unpack_u<T, N, SILU>(a[i], fa);
        unpack_u<T, N, SILU>(b[i], fb);
        square[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) square[i] += fa[j] * fa[j] + fb[j] * fb[j];
    }
    group_sums<HEADS>(square, lanes);

    const float inverse = static_cast<float>(inverse_dim);
    const u32 nothing = static_cast<u32>(lane_bits) >> 8;
    T* y = slot.part == kQ ? q : slot.part == kK ? k : v;
    y += static_cast<i64>(token) * slot.heads * dim;
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const int head = slot.first + i * slot.step;
        if (head < heads) {
                if (SILU || slot.part != kV) {
                float(&fa)[N] = kept_a[SILU ? i : 0];
                float(&fb)[N] = kept_b[SILU ? i : 0];
                if constexpr (!SILU) {
                    unpack_again<T, N>(a[i], nothing, fa);
                    unpack_again<T, N>(b[i], nothing, fb);
                }
                if (slot.part != kV) {
                    const float rstd = rsqrtf(square[i] * inverse + epsilon);
#pragma unroll
                    for (int j = 0; j < N; ++j) fa[j] *= rstd, fb[j] *= rstd;
                    rotate<N, PAIRS>(r, fa, fb);
                }
                a[i] = pack<T, N>(fa);
                b[i] = pack<T, N>(fb);
            }
            ptx::st<16>(y + head * dim + own.out_a, a[i]);
            ptx::st<16>(y + head * dim + own.out_b, b[i]);
        }
    }
}

// Any head size and alignment: a warp per (token, head) reads its head twice. lane_bits is 5, q_slots and kv_slots are
// the numbers of heads, `pairs` kHalves or kAdjacent.
template <typename T, bool SILU>
__global__ void __launch_bounds__(128)
    qk_norm_rope_fwd_any(const T* qkv, const void* q_weight, const void* k_weight, T* q, T* k, T* v,
                         RTK_QKV_PARAMETERS, i64 pairs, RTK_ANGLE_PARAMETERS) {
    const u32 slots = static_cast<u32>(q_slots + 2 * kv_slots);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const u32 unit = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const u32 token = unit / slots;
    if (token >= static_cast<u32>(tokens)) return;
    const int batch = static_cast<int>(token / static_cast<u32>(length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(length));
    const HeadSlot slot(static_cast<int>(unit - token * slots), static_cast<int>(q_slots), static_cast<int>(kv_slots),
                        static_cast<int>(q_heads), static_cast<int>(kv_heads));
    const int dim = static_cast<int>(head_dim);
    const T* x = qkv + batch * qkv_batch + place * qkv_place +
                 dim * head_column(slot.part, slot.first, group_magic, q_extra, kv_step, k_first, v_first);
    T* y = slot.part == kQ ? q : slot.part == kK ? k : v;
    y += (static_cast<i64>(token) * slot.heads + slot.first) * dim;
    auto u = [&](int i) {
        float value[1];
        unpack_u<T, 1, SILU>(ptx::ld_keep<sizeof(T)>(x + i), value);
        return value[0];
    };
    if (slot.part == kV) {
        for (int i = lane; i < dim; i += kWarp) store_one(y + i, u(i));
        return;
    }
    float square = 0.0f;
    for (int i = lane; i < dim; i += kWarp) square += u(i) * u(i);
    square = warp_reduce<Sum>(square);
    const float rstd = rsqrtf(square * static_cast<float>(inverse_dim) + static_cast<float>(eps));
    const void* weight = slot.part == kQ ? q_weight : k_weight;
    auto normed = [&](int i) {
        return u(i) * rstd * load_weight<T>(weight, i, weight_wide, static_cast<float>(offset));
    };
    const Angles angles = RTK_ANGLES;
    const TokenRows rows(angles, batch, place);
    for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
        const PairPlace at(pair, 0, angles.rotary, static_cast<int>(pairs));
        Rotation<1> r;
        load_pair<T>(angles, rows, pair, r);
        float a[1] = {normed(at.in_0)}, b[1] = {normed(at.in_1)};
        rotate<1, kHalves>(r, a, b);
        store_one(y + at.out_0, a[0]);
        store_one(y + at.out_1, b[0]);
    }
    for (int i = angles.rotary + lane; i < dim; i += kWarp) store_one(y + i, normed(i));
}

// ---- backward ---------------------------------------------------------------------------------------------------
//
// With g the gradient of a q or k head and a its inverse rotation (angle_flags has kInverse):
//     du = rstd * a * gain - u * (rstd^3 / dim) * sum(u * a * gain),   dweight += u * rstd * a
// and dx = du, or du * silu'(x). v heads pass g on. dq, dk, dv have any strides but in the head; dqkv has its own.

#define RTK_QKV_GRADIENT_PARAMETERS                                                                                \
    const T *dq, const T *dk, const T *dv, const T *qkv, const void *q_weight, const void *k_weight, T *dqkv,      \
        float *partial, i64 dq_batch, i64 dq_place, i64 dq_head, i64 dk_batch, i64 dk_place, i64 dk_head,          \
        i64 dv_batch, i64 dv_place, i64 dv_head, i64 dqkv_batch, i64 dqkv_place

// Tokens in steps of a fixed size, without a division each.
struct TokenWalk {
    int token, batch, place;

    RTK_DEVICE TokenWalk(int first, int length) : token(first), batch(first / length), place(first - batch * length) {}
    // step = step_batch * length + step_place
    RTK_DEVICE void advance(int step, int step_batch, int step_place, int length) {
        token += step;
        batch += step_batch;
        place += step_place;
        if (place >= length) place -= length, ++batch;
    }
};

// Two tokens' g and x of a block of THREADS threads in shared memory, each thread's own 16-byte chunks: waiting for its
// own copies is enough and no barrier is needed. (RowRing with every offset known to the compiler.)
template <int HEADS, int THREADS>
struct HeadRing {
    static constexpr int kPitch = THREADS * 16;
    static constexpr int kHead = 4 * kPitch;       // chunks a and b of g, then of x
    static constexpr int kStage = HEADS * kHead;
    static constexpr int kBytes = 2 * kStage;
    ptx::SharedAddress slot;  // this thread's, of the stage that is read
    int ahead;                // from there to the stage that is filled: kStage or -kStage

    RTK_DEVICE explicit HeadRing(u8* memory)
        : slot(ptx::shared_address(memory + threadIdx.x * 16 + kStage)), ahead(-kStage) {}

    RTK_DEVICE void copy(int head, int chunk, const void* source) const {
        ptx::cp_async_16(slot + (ahead + head * kHead + chunk * kPitch), source);
    }

    template <typename T>
    RTK_DEVICE void read(int head, int chunk, float (&f)[16 / sizeof(T)]) const {
        unpack<T, 16 / sizeof(T)>(ptx::ld_shared_16(slot + (head * kHead + chunk * kPitch)), f);
    }

    // What was filled is read next.
    RTK_DEVICE void turn() {
        slot = slot + ahead;
        ahead = -ahead;
    }
};

// g * silu'(x) of a chunk; x is read again, which is cheaper than the registers to keep it in.
template <typename T, int N, typename Ring>
RTK_DEVICE void times_slope(const Ring& ring, int head, int chunk, float (&g)[N]) {
    float x[N];
    ring.template read<T>(head, chunk, x);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= silu_slope<sizeof(T) == 2>(x[i]);
}

// Persistent: the groups of the whole grid form `teams` teams of `slots` groups that each take one token at a time, so
// a group keeps its slot, its weight and its part of dweight. g and x of the next token are on their way to shared
// memory meanwhile. partial: [blocks, 2, head_dim], q's sums and k's; null when not wanted.
template <typename T, int PAIRS, bool SILU, int HEADS, int THREADS>
__global__ void __launch_bounds__(THREADS)
    qk_norm_rope_bwd(RTK_QKV_GRADIENT_PARAMETERS, i64 teams, RTK_QKV_PARAMETERS, RTK_ANGLE_PARAMETERS) {
    constexpr int N = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u8 part_of_group[THREADS];
    HeadRing<HEADS, THREADS> ring(memory);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait beside this one
    const int slots = static_cast<int>(q_slots + 2 * kv_slots);
    const int lanes = 1 << lane_bits;
    const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const int group_in_block = static_cast<int>(threadIdx.x) >> lane_bits;
    const int group = static_cast<int>((blockIdx.x * THREADS + threadIdx.x) >> lane_bits);
    const int team = group / slots;
    const HeadSlot slot(group - team * slots, static_cast<int>(q_slots), static_cast<int>(kv_slots),
                        static_cast<int>(q_heads), static_cast<int>(kv_heads));
    const int step = static_cast<int>(teams);
    const int span = static_cast<int>(length);
    const int step_batch = step / span, step_place = step - step_batch * span;
    const int dim = static_cast<int>(head_dim);
    const Pieces<N, kHalves> own(lane, 0, static_cast<int>(rotary), (dim - static_cast<int>(rotary)) / N);
    const int end = team < step && own.any ? static_cast<int>(tokens) : 0;
    const bool normed = slot.part != kV;
    const bool needs_x = SILU || normed;

    const T* g = slot.part == kQ ? dq : slot.part == kK ? dk : dv;
    const i64 g_batch = slot.part == kQ ? dq_batch : slot.part == kK ? dk_batch : dv_batch;
    const i64 g_place = slot.part == kQ ? dq_place : slot.part == kK ? dk_place : dv_place;
    const i64 g_head = slot.part == kQ ? dq_head : slot.part == kK ? dk_head : dv_head;
    g += slot.first * g_head + own.in_a;
    qkv += own.in_a;
    dqkv += own.in_a;
    const i64 g_step = slot.step * g_head;
    const int to_b = own.in_b - own.in_a;
    const int count = (slot.heads - slot.first + slot.step - 1) / slot.step;  // heads of this thread
    int column[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i)
        column[i] = dim * head_column(slot.part, slot.first + i * slot.step, group_magic, q_extra, kv_step, k_first,
                                      v_first);

    TokenWalk next(team, span);
    auto fetch = [&] {
        if (next.token < end) {
            const T* from = g + next.batch * g_batch + next.place * g_place;
            const T* x = qkv + next.batch * qkv_batch + next.place * qkv_place;
#pragma unroll
            for (int i = 0; i < HEADS; ++i) {
                if (i < count) {
                    ring.copy(i, 0, from);
                    ring.copy(i, 1, from + to_b);
                    from += g_step;
                    if (needs_x) {
                        ring.copy(i, 2, x + column[i]);
                        ring.copy(i, 3, x + column[i] + to_b);
                    }
                }
            }
        }
        ptx::cp_async_commit();
        next.advance(step, step_batch, step_place, span);
    };

    // Slots nothing is copied to are read all the same, by lanes that only take part in the reductions.
#pragma unroll
    for (int i = 0; i < 2 * HEADS * 4; ++i)
        *reinterpret_cast<Raw<16>*>(memory + i * ring.kPitch + threadIdx.x * 16) = Raw<16>{};
    fetch();

    const float shift = static_cast<float>(offset);
    float gain_a[N], gain_b[N], dweight_a[N], dweight_b[N];
#pragma unroll
    for (int i = 0; i < N; ++i) gain_a[i] = gain_b[i] = dweight_a[i] = dweight_b[i] = 0.0f;
    if (normed && own.any) {
        const void* weight = slot.part == kQ ? q_weight : k_weight;
        load_gain<T, N>(weight, own.in_a, weight_wide, shift, gain_a);
        load_gain<T, N>(weight, own.in_b, weight_wide, shift, gain_b);
    }

    const Angles angles = RTK_ANGLES;
    const float epsilon = static_cast<float>(eps);
    const float inverse = static_cast<float>(inverse_dim);
    Rotation<N> r;
    no_rotation(r);
    // Every group of a warp makes as many rounds as the one with most tokens: they share the reductions.
    TokenWalk at(team, span);
    const int rounds = static_cast<int>(tokens + step - 1) / step;
    for (int round = 0; round < rounds; ++round) {
        ring.turn();
        fetch();
        const bool active = at.token < end;
        if (active && own.rotated && normed)
            load_rotation<T, N, PAIRS == kAdjacent>(angles, at.batch, at.place, lane, r);
        ptx::cp_async_wait<1>();
        T* to = dqkv + at.batch * dqkv_batch + at.place * dqkv_place;
        // One head after the other, not unrolled: other warps fill the gaps, and the registers are few.
#pragma unroll 1
        for (int i = 0; i < HEADS; ++i) {
            float ga[N], gb[N], xa[N], xb[N], sums[2] = {0.0f, 0.0f};  // of u^2 and u * a * gain
            ring.template read<T>(i, 0, ga);
            ring.template read<T>(i, 1, gb);
            ring.template read<T>(i, 2, xa);
            ring.template read<T>(i, 3, xb);
            if constexpr (SILU) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    xa[j] = sigmoid_gate<sizeof(T) == 2>(xa[j], xa[j]).product;
                    xb[j] = sigmoid_gate<sizeof(T) == 2>(xb[j], xb[j]).product;
                }
            }
            if (normed) rotate<N, PAIRS>(r, ga, gb);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sums[0] += xa[j] * xa[j];
                sums[1] += ga[j] * gain_a[j] * xa[j];
                sums[0] += xb[j] * xb[j];
                sums[1] += gb[j] * gain_b[j] * xb[j];
            }
            group_sums<2>(sums, lanes);
            if (active && i < count) {
                if (normed) {
                    const float rstd = rsqrtf(sums[0] * inverse + epsilon);
                    const float pull = sums[1] * inverse * rstd * rstd * rstd;
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        ga[j] *= rstd;
                        gb[j] *= rstd;
                        dweight_a[j] += ga[j] * xa[j];
                        dweight_b[j] += gb[j] * xb[j];
                        ga[j] = ga[j] * gain_a[j] - xa[j] * pull;
                        gb[j] = gb[j] * gain_b[j] - xb[j] * pull;
                    }
                }
                if constexpr (SILU) {
                    times_slope<T, N>(ring, i, 2, ga);
                    times_slope<T, N>(ring, i, 3, gb);
                }
                T* dx = to + dim * head_column(slot.part, slot.first + i * slot.step, group_magic, q_extra, kv_step,
                                               k_first, v_first);
                store<T, N>(dx, ga);
                store<T, N>(dx + to_b, gb);
            }
        }
        at.advance(step, step_batch, step_place, span);
    }

    if (partial == nullptr) return;
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory) + group_in_block * dim;  // [groups, head_dim]
    if (lane == 0) part_of_group[group_in_block] = static_cast<u8>(team < step ? slot.part : kV);
    if (own.any) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            *reinterpret_cast<float4*>(sums + own.in_a + i) =
                make_float4(dweight_a[i], dweight_a[i + 1], dweight_a[i + 2], dweight_a[i + 3]);
            *reinterpret_cast<float4*>(sums + own.in_b + i) =
                make_float4(dweight_b[i], dweight_b[i + 1], dweight_b[i + 2], dweight_b[i + 3]);
        }
    }
    __syncthreads();
    sums = reinterpret_cast<float*>(memory);
    const int groups = THREADS >> lane_bits;
    partial += static_cast<i64>(blockIdx.x) * 2 * dim;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * dim; i += THREADS) {
        const int part = i < dim ? kQ : kK;
        const int from = i < dim ? i : i - dim;
        float total = 0.0f;
        for (int j = 0; j < groups; ++j)
            if (part_of_group[j] == part) total += sums[j * dim + from];
        partial[i] = total;
    }
}

// Any head size and alignment: the warps of the grid walk over (token, head), each with its own sums of dweight in
// shared memory, [warps, 2, head_dim]. lane_bits is 5, q_slots and kv_slots are the numbers of heads.
template <typename T, bool SILU>
__global__ void __launch_bounds__(128)
    qk_norm_rope_bwd_any(RTK_QKV_GRADIENT_PARAMETERS, i64 pairs, RTK_QKV_PARAMETERS, RTK_ANGLE_PARAMETERS) {
    extern __shared__ __align__(16) u8 memory[];
    float* sums = reinterpret_cast<float*>(memory);
    const u32 slots = static_cast<u32>(q_slots + 2 * kv_slots);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int warps = static_cast<int>(blockDim.x / kWarp);
    const int dim = static_cast<int>(head_dim);
    float* my_sums = sums + threadIdx.x / kWarp * 2 * dim;
    for (int i = lane; i < 2 * dim; i += kWarp) my_sums[i] = 0.0f;
    __syncwarp();
    const Angles angles = RTK_ANGLES;
    const float shift = static_cast<float>(offset);
    for (i64 unit = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp; unit < tokens * slots;
         unit += static_cast<i64>(gridDim.x) * warps) {
        const u32 token = static_cast<u32>(unit) / slots;
        const int batch = static_cast<int>(token / static_cast<u32>(length));
        const int place = static_cast<int>(token - batch * static_cast<u32>(length));
        const HeadSlot slot(static_cast<int>(static_cast<u32>(unit) - token * slots), static_cast<int>(q_slots),
                            static_cast<int>(kv_slots), static_cast<int>(q_heads), static_cast<int>(kv_heads));
        const i64 column =
            dim * head_column(slot.part, slot.first, group_magic, q_extra, kv_step, k_first, v_first);
        const T* x = qkv + batch * qkv_batch + place * qkv_place + column;
        T* dx = dqkv + batch * dqkv_batch + place * dqkv_place + column;
        const T* g = slot.part == kQ   ? dq + batch * dq_batch + place * dq_place + slot.first * dq_head
                     : slot.part == kK ? dk + batch * dk_batch + place * dk_place + slot.first * dk_head
                                       : dv + batch * dv_batch + place * dv_place + slot.first * dv_head;
        auto u = [&](int i) {
            float value[1];
            unpack_u<T, 1, SILU>(ptx::ld_keep<sizeof(T)>(x + i), value);
            return value[0];
        };
        auto put = [&](int i, float du) {
            if constexpr (SILU) du *= silu_slope<sizeof(T) == 2>(load_one(x + i));
            store_one(dx + i, du);
        };
        if (slot.part == kV) {
            for (int i = lane; i < dim; i += kWarp) put(i, load_one(g + i));
            continue;
        }
        const void* weight = slot.part == kQ ? q_weight : k_weight;
        const TokenRows rows(angles, batch, place);
        // Calls f(element, gradient there after the inverse rotation) for every element.
        auto each = [&](auto f) {
            for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
                const PairPlace where(pair, 0, angles.rotary, static_cast<int>(pairs));
                Rotation<1> r;
                load_pair<T>(angles, rows, pair, r);
                float a[1] = {load_one(g + where.in_0)}, b[1] = {load_one(g + where.in_1)};
                rotate<1, kHalves>(r, a, b);
                f(where.in_0, a[0]);
                f(where.in_1, b[0]);
            }
            for (int i = angles.rotary + lane; i < dim; i += kWarp) f(i, load_one(g + i));
        };
        float square = 0.0f, product = 0.0f;
        each([&](int i, float a) {
            const float value = u(i);
            square += value * value;
            product += a * load_weight<T>(weight, i, weight_wide, shift) * value;
        });
        square = warp_reduce<Sum>(square);
        product = warp_reduce<Sum>(product);
        const float rstd = rsqrtf(square * static_cast<float>(inverse_dim) + static_cast<float>(eps));
        const float pull = product * static_cast<float>(inverse_dim) * rstd * rstd * rstd;
        float* into = my_sums + (slot.part == kQ ? 0 : dim);
        each([&](int i, float a) {
            const float value = u(i);
            into[i] += a * rstd * value;
            put(i, a * rstd * load_weight<T>(weight, i, weight_wide, shift) - value * pull);
        });
    }
    if (partial == nullptr) return;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 2 * dim; i += static_cast<int>(blockDim.x)) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += sums[w * 2 * dim + i];
        partial[static_cast<i64>(blockIdx.x) * 2 * dim + i] = total;
    }
}

}  // namespace rtk
