// Backward of the split, norm and rotation of qkv (rope/qk_norm_rope.cuh).
//
// With g the gradient of a q or k head and a its inverse rotation (angle_flags has kInverse):
//     du = rstd * a * gain - u * (rstd^3 / dim) * sum(u * a * gain),   dweight += u * rstd * a
// and dx = du, or du * silu'(x). v heads pass g on. dq, dk, dv have any strides except within a head; dqkv has its own.
#include "common/block_sums.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "rope/qk_by_element.cuh"

namespace rtk {

// Two tokens' g and x of a block of THREADS threads in shared memory. Each thread has its own 16-byte chunks: waiting
// for its own copies is enough and no barrier is needed. (RowRing with compile-time offsets.)
template <int HEADS, int THREADS>
struct HeadRing {
    static constexpr int kPitch = THREADS * 16;
    static constexpr int kHead = 4 * kPitch;       // chunks a and b of g, then of x
    static constexpr int kStage = HEADS * kHead;
    static constexpr int kBytes = 2 * kStage;
    ptx::SharedAddress slot;  // this thread's, of the stage that is read
    int to_fetched_stage;                // from there to the stage that is filled: kStage or -kStage

    RTK_DEVICE explicit HeadRing(u8* memory)
        : slot(ptx::shared_address(memory + threadIdx.x * 16 + kStage)), to_fetched_stage(-kStage) {}

    RTK_DEVICE void copy(int head, int chunk, const void* source) const {
        ptx::cp_async_16(slot + (to_fetched_stage + head * kHead + chunk * kPitch), source);
    }

    template <typename T>
    RTK_DEVICE void read(int head, int chunk, float (&f)[16 / sizeof(T)]) const {
        unpack<T, 16 / sizeof(T)>(ptx::ld_shared_16(slot + (head * kHead + chunk * kPitch)), f);
    }

    // Bytes from the start of the memory to chunk a of g of a head that is read.
    RTK_DEVICE int g_at(int head) const {
        return (to_fetched_stage < 0 ? kStage : 0) + head * kHead + static_cast<int>(threadIdx.x) * 16;
    }

    // Swaps the stages: the filled one is read next.
    RTK_DEVICE void next_stage() {
        slot = slot + to_fetched_stage;
        to_fetched_stage = -to_fetched_stage;
    }
};

// u of a chunk.
template <typename T, int N, bool SILU, typename Ring>
RTK_DEVICE void read_u(const Ring& ring, int head, int chunk, float (&u)[N]) {
    ring.template read<T>(head, chunk, u);
    if constexpr (SILU) {
#pragma unroll
        for (int i = 0; i < N; ++i) u[i] = silu<sizeof(T) == 2>(u[i]).value;
    }
}

// Turns the gradient after the inverse rotation into that of x, for a chunk, and adds to dweight. With SILU x is read
// again, which is cheaper than registers for u and the slope.
template <typename T, int N, bool SILU, typename Ring>
RTK_DEVICE void finish(const Ring& ring, int head, int chunk, bool normed, float rstd, float pull,
                       const float (&gain)[N], float (&u)[N], float (&g)[N], float (&dweight)[N]) {
    float slope[SILU ? N : 1];
    if constexpr (SILU) {
        ring.template read<T>(head, chunk, u);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const Silu of_x = silu<sizeof(T) == 2>(u[i]);
            u[i] = of_x.value;
            slope[i] = of_x.slope;
        }
    }
    if (normed) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            g[i] *= rstd;
            dweight[i] += g[i] * u[i];
            g[i] = g[i] * gain[i] - u[i] * pull;
        }
    }
    if constexpr (SILU) {
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] *= slope[i];
    }
}

template <typename T>
struct QkBackwardArguments : QkvGradients<T> {
    i64 walkers, inner, batch_inner, neighbours;
    QkvShape shape;
    AngleArguments angle;
};

// Persistent: the groups of the whole grid form `walkers` sets of `slots` groups. Each set takes one token at a time,
// so a group keeps its slot, its weight and its part of dweight. g and x of the next token are copied to shared memory
// meanwhile. A lane has two chunks (LaneChunks). partial: [blocks, 2, head_dim], q's sums and k's; null if not needed.
template <typename T, int PAIRS, bool SILU, int HEADS, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    qk_norm_rope_bwd(const __grid_constant__ QkBackwardArguments<T> args) {
    const QkvShape shape = args.shape;
    constexpr int N = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u8 part_of_group[THREADS];
    HeadRing<HEADS, THREADS> ring(memory);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait next to this one
    const int slots = static_cast<int>(shape.q_slots + 2 * shape.kv_slots);
    const int lanes = 1 << shape.lane_bits;
    const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const int group_in_block = static_cast<int>(threadIdx.x) >> shape.lane_bits;
    const int group = static_cast<int>((blockIdx.x * THREADS + threadIdx.x) >> shape.lane_bits);
    const int walker = group / slots;
    const HeadSlot slot(group - walker * slots, static_cast<int>(shape.q_slots), static_cast<int>(shape.kv_slots),
                        static_cast<int>(shape.q_heads), static_cast<int>(shape.kv_heads));
    const int step = static_cast<int>(args.walkers);
    const bool by_batch = args.batch_inner != 0;
    const int dim = static_cast<int>(shape.head_dim);
    const int owners = (dim / N + 1) / 2;  // lanes of a group that have chunks
    const LaneChunks<N, PAIRS> own(lane, owners, static_cast<int>(args.angle.rotary), dim, lane < owners);
    const bool adjacent = args.neighbours != 0;
    const int end = walker < step && own.any ? static_cast<int>(shape.tokens) : 0;
    const bool normed = slot.part != kV;
    const bool needs_x = SILU || normed;

    const T* g = slot.part == kQ ? args.dq : slot.part == kK ? args.dk : args.dv;
    const i64 g_batch = slot.part == kQ ? args.dq_batch : slot.part == kK ? args.dk_batch : args.dv_batch;
    const i64 g_place = slot.part == kQ ? args.dq_place : slot.part == kK ? args.dk_place : args.dv_place;
    const i64 g_head = slot.part == kQ ? args.dq_head : slot.part == kK ? args.dk_head : args.dv_head;
    g += slot.first * g_head + own.in_a;
    const T* qkv = args.qkv + own.in_a;
    T* dqkv = args.dqkv + own.in_a;
    const i64 g_step = slot.step * g_head;
    const int to_b = own.in_b - own.in_a;
    const int count = (slot.heads - slot.first + slot.step - 1) / slot.step;  // heads of this thread
    int column[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i)
        column[i] = dim * head_column(slot.part, slot.first + i * slot.step, shape.group_magic, shape.q_extra,
                                      shape.kv_step, shape.k_first, shape.v_first);

    TokenWalk next(walker, step, static_cast<int>(args.inner));
    auto fetch = [&] {
        if (next.token < end) {
            const i64 batch = next.batch(by_batch), place = next.place(by_batch);
            const T* from = g + batch * g_batch + place * g_place;
            const T* x = qkv + batch * shape.qkv_batch + place * shape.qkv_place;
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
        next.advance();
    };

    // Lanes that only take part in the reductions still read chunks to which nothing is copied.
    const bool both = walker + static_cast<i64>(step) < end;  // stages get filled
#pragma unroll
    for (int i = 0; i < 2 * HEADS; ++i) {
        const bool copied = both && i % HEADS < count;
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk)
            if (!copied || (chunk >= 2 && !needs_x))
                *reinterpret_cast<Raw<16>*>(memory + i * ring.kHead + chunk * ring.kPitch + threadIdx.x * 16) =
                    Raw<16>{};
    }
    fetch();

    float gain_a[N], gain_b[N], dweight_a[N], dweight_b[N];
#pragma unroll
    for (int i = 0; i < N; ++i) gain_a[i] = gain_b[i] = dweight_a[i] = dweight_b[i] = 0.0f;
    if (normed && own.any) {
        const void* weight = slot.part == kQ ? args.q_weight : args.k_weight;
        load_gains<T, N>(weight, own.in_a, own.in_b, shape.weight_fp32, static_cast<float>(shape.offset), gain_a, gain_b);
        if (own.lacks_b()) {
#pragma unroll
            for (int i = 0; i < N; ++i) gain_b[i] = 0.0f;
        }
    }
    OtherWords others_a, others_b;
    if constexpr (PAIRS == kByElement) {
        auto words_of = [&](int column, int begin) {
            return OtherWords::of<T>(column, static_cast<int>(args.angle.rotary) / 2, adjacent, [&](int element) {
                const int chunk = element / N, in_b = chunk >= owners;
                return in_b * ring.kPitch + (chunk - in_b * owners - lane) * 16 +
                       element % N * static_cast<int>(sizeof(T)) - begin;
            });
        };
        others_a = words_of(own.in_a, 0), others_b = words_of(own.in_b, ring.kPitch);
    }

    const Angles angles = args.angle.of(shape.length);
    const float epsilon = static_cast<float>(shape.eps);
    const float inverse = static_cast<float>(shape.inverse_dim);
    Rotation<N> r;
    no_rotation(r);
    // Every group of a warp runs as many rounds as the one with the most tokens, because they share the reductions.
    TokenWalk at(walker, step, static_cast<int>(args.inner));
    const int rounds = static_cast<int>(shape.tokens + step - 1) / step;
    for (int round = 0; round < rounds; ++round) {
        if constexpr (PAIRS == kByElement) __syncwarp();  // others have read what is overwritten now
        ring.next_stage();
        fetch();
        const bool active = at.token < end;
        if constexpr (PAIRS == kByElement) {
            if (active && normed) {
                // Hidden from the compiler, otherwise values that depend on the elements alone would fill the registers
                // meanwhile.
                u32 a = static_cast<u32>(own.in_a), b = static_cast<u32>(own.in_b);
                ptx::forget(a), ptx::forget(b);
                load_rotation_by_element<T, N>(angles, at.batch(by_batch), at.place(by_batch), static_cast<int>(a),
                                               static_cast<int>(b), adjacent, r);
            }
        } else if (active && own.rotated && normed) {
            load_rotation<T, N, PAIRS == kAdjacent>(angles, at.batch(by_batch), at.place(by_batch), lane, r);
        }
        ptx::cp_async_wait<1>();
        if constexpr (PAIRS == kByElement) __syncwarp();
        const i64 batch = at.batch(by_batch), place = at.place(by_batch);
        T* to = dqkv + batch * args.dqkv_batch + place * args.dqkv_place;
        // One head after the other, not unrolled: other warps fill the gaps, and registers are scarce.
#pragma unroll 1
        for (int i = 0; i < HEADS; ++i) {
            float ga[N], gb[N], ua[N], ub[N], sums[2] = {0.0f, 0.0f};  // of u^2 and u * a * gain
            ring.template read<T>(i, 0, ga);
            ring.template read<T>(i, 1, gb);
            if constexpr (PAIRS == kByElement) {
                if (normed && own.any) {
                    const u8* words = memory + ring.g_at(i);
                    rotate_by_element<T, N>(words, others_a, adjacent, r.own0, r.cross0, ga);
                    rotate_by_element<T, N>(words + ring.kPitch, others_b, adjacent, r.own1, r.cross1, gb);
                }
            } else {
                if (normed) rotate<N, PAIRS>(r, ga, gb);
            }
            read_u<T, N, SILU>(ring, i, 2, ua);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sums[0] += ua[j] * ua[j];
                sums[1] += ga[j] * gain_a[j] * ua[j];
            }
            read_u<T, N, SILU>(ring, i, 3, ub);
            if (own.lacks_b()) {
#pragma unroll
                for (int j = 0; j < N; ++j) ub[j] = 0.0f;
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sums[0] += ub[j] * ub[j];
                sums[1] += gb[j] * gain_b[j] * ub[j];
            }
            group_sums<2>(sums, lanes);
            if (active && i < count) {
                const float rstd = rsqrtf(sums[0] * inverse + epsilon);
                const float pull = sums[1] * inverse * rstd * rstd * rstd;
                T* dx = to + dim * head_column(slot.part, slot.first + i * slot.step, shape.group_magic,
                                               shape.q_extra, shape.kv_step,
                                               shape.k_first, shape.v_first);
                finish<T, N, SILU>(ring, i, 2, normed, rstd, pull, gain_a, ua, ga, dweight_a);
                store<T, N>(dx, ga);
                finish<T, N, SILU>(ring, i, 3, normed, rstd, pull, gain_b, ub, gb, dweight_b);
                if (!own.lacks_b()) store<T, N>(dx + to_b, gb);
            }
        }
        at.advance();
    }

    if (args.partial == nullptr) return;
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory) + group_in_block * dim;  // [groups, head_dim]
    if (lane == 0) part_of_group[group_in_block] = static_cast<u8>(walker < step ? slot.part : kV);
    if (own.any) {
        put_sums(sums + own.in_a, dweight_a);
        if (!own.lacks_b()) put_sums(sums + own.in_b, dweight_b);
    }
    __syncthreads();
    sums = reinterpret_cast<float*>(memory);
    const int groups = THREADS >> shape.lane_bits;
    float* partial = args.partial + static_cast<i64>(blockIdx.x) * 2 * dim;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * dim; i += THREADS) {
        const int part = i < dim ? kQ : kK;
        const int from = i < dim ? i : i - dim;
        float total = 0.0f;
        for (int j = 0; j < groups; ++j)
            if (part_of_group[j] == part) total += sums[j * dim + from];
        partial[i] = total;
    }
}

template <typename T>
struct QkBackwardAnyArguments : QkvGradients<T> {
    i64 pairs, activated;
    QkvShape shape;
    AngleArguments angle;
};

// Any head size and alignment: the warps of the grid loop over (token, head), each with its own sums of dweight in
// shared memory, [warps, 2, head_dim]. lane_bits is 5, q_slots and kv_slots are the numbers of heads.
template <typename T>
__global__ void __launch_bounds__(128, 4)
    qk_norm_rope_bwd_any(const __grid_constant__ QkBackwardAnyArguments<T> args) {
    const QkvShape shape = args.shape;
    extern __shared__ __align__(16) u8 memory[];
    float* sums = reinterpret_cast<float*>(memory);
    const u32 slots = static_cast<u32>(shape.q_slots + 2 * shape.kv_slots);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int warps = static_cast<int>(blockDim.x / kWarp);
    const int dim = static_cast<int>(shape.head_dim);
    float* my_sums = sums + threadIdx.x / kWarp * 2 * dim;
    for (int i = lane; i < 2 * dim; i += kWarp) my_sums[i] = 0.0f;
    __syncwarp();
    const Angles angles = args.angle.of(shape.length);
    const float shift = static_cast<float>(shape.offset);
    for (i64 unit = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp; unit < shape.tokens * slots;
         unit += static_cast<i64>(gridDim.x) * warps) {
        const u32 token = static_cast<u32>(unit) / slots;
        const int batch = static_cast<int>(token / static_cast<u32>(shape.length));
        const int place = static_cast<int>(token - batch * static_cast<u32>(shape.length));
        const HeadSlot slot(static_cast<int>(static_cast<u32>(unit) - token * slots), static_cast<int>(shape.q_slots),
                            static_cast<int>(shape.kv_slots), static_cast<int>(shape.q_heads),
                            static_cast<int>(shape.kv_heads));
        const i64 column =
            dim * head_column(slot.part, slot.first, shape.group_magic, shape.q_extra, shape.kv_step, shape.k_first,
                              shape.v_first);
        const T* x = args.qkv + batch * shape.qkv_batch + place * shape.qkv_place + column;
        T* dx = args.dqkv + batch * args.dqkv_batch + place * args.dqkv_place + column;
        const T* g = args.dv + batch * args.dv_batch + place * args.dv_place + slot.first * args.dv_head;
        if (slot.part == kQ) g = args.dq + batch * args.dq_batch + place * args.dq_place + slot.first * args.dq_head;
        if (slot.part == kK) g = args.dk + batch * args.dk_batch + place * args.dk_place + slot.first * args.dk_head;
        auto u = [&](int i) {
            float value[1];
            unpack<T, 1>(ptx::ld_keep<sizeof(T)>(x + i), value);
            return args.activated ? silu<sizeof(T) == 2>(value[0]).value : value[0];
        };
        auto put = [&](int i, float du) {
            if (args.activated) du *= silu<sizeof(T) == 2>(load_one(x + i)).slope;
            store_one(dx + i, du);
        };
        if (slot.part == kV) {
            for (int i = lane; i < dim; i += kWarp) put(i, load_one(g + i));
            continue;
        }
        const void* weight = slot.part == kQ ? args.q_weight : args.k_weight;
        const TokenRows rows(angles, batch, place);
        // Calls f(element, its gradient after the inverse rotation) for every element.
        auto each = [&](auto f) {
            for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
                const PairPlace where(pair, 0, angles.rotary, static_cast<int>(args.pairs));
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
            product += a * load_weight<T>(weight, i, shape.weight_fp32, shift) * value;
        });
        square = warp_reduce<Sum>(square);
        product = warp_reduce<Sum>(product);
        const float rstd = rsqrtf(square * static_cast<float>(shape.inverse_dim) + static_cast<float>(shape.eps));
        const float pull = product * static_cast<float>(shape.inverse_dim) * rstd * rstd * rstd;
        float* into = my_sums + (slot.part == kQ ? 0 : dim);
        each([&](int i, float a) {
            const float value = u(i);
            into[i] += a * rstd * value;
            put(i, a * rstd * load_weight<T>(weight, i, shape.weight_fp32, shift) - value * pull);
        });
    }
    if (args.partial == nullptr) return;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 2 * dim; i += static_cast<int>(blockDim.x)) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += sums[w * 2 * dim + i];
        args.partial[static_cast<i64>(blockIdx.x) * 2 * dim + i] = total;
    }
}

}  // namespace rtk
