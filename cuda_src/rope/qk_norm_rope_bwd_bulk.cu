// Backward of the split, norm and rotation of qkv (rope/qk_norm_rope_bwd.cu says what is computed) for sm_90 and up.
//
// A persistent block loops over tokens (TokenWalk) that pass through shared memory (rope/token_ring.cuh). A stage has g
// of all heads, in the order q, k, v, then x of those that need it: x_stretches stretches of x_stretch_heads heads,
// kv_step heads apart in qkv. A consumer is several warps that share one token. Each of its groups of head_lanes lanes
// (kWarp / head_lanes groups per warp) has one slot (HeadSlot) of at most `max_heads` heads, and a lane two chunks of
// each: as in HeadChunks, or with kByElement its own and the one head_lanes further on, if there is one. partial:
// [blocks, 2, head_dim], q's sums and k's; null if not needed.
//
// The first HEAD_WARPS warps work on heads, as many of them as the consumers have. The others are helpers: the second
// and further ones, rotating_warps in all, compute rotations of tokens_together tokens at a time, each warp always for
// the same stages; the rest issue copies, each its share of a token's. With kMoreHeadWarps the helpers are a warpgroup
// that hands its registers to the others.
#include "common/block_sums.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "rope/qk_by_element.cuh"
#include "rope/token_ring.cuh"

namespace rtk {

// For 384 threads. With 144 registers each, a block of column_sum still fits; with silu or kByElement, which need more,
// it does not.
inline constexpr int kBulkRegisters = 144;
inline constexpr int kBulkMoreRegisters = 168;
// For 512 threads.
inline constexpr int kMoreHeadWarps = 12;
inline constexpr int kStartRegisters = 128;  // of all threads, at the start
inline constexpr int kHelperRegisters = 80;  // then of a helper
inline constexpr int kHeadRegisters = 144;   // and of a thread that works on heads

// Rotations in shared memory: 4 N floats per lane, four at a time so that lanes are adjacent.
template <int N>
RTK_DEVICE void put_rotation(u8* memory, int lane, int lanes, const Rotation<N>& r) {
    float4* to = reinterpret_cast<float4*>(memory) + lane;
    auto put = [&](int array, const float (&f)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            to[(array * N + i) / 4 * lanes] = make_float4(f[i], f[i + 1], f[i + 2], f[i + 3]);
    };
    put(0, r.own0), put(1, r.own1), put(2, r.cross0), put(3, r.cross1);
}

template <int N>
RTK_DEVICE void get_rotation(const u8* memory, int lane, int lanes, Rotation<N>& r) {
    const ptx::SharedAddress from = ptx::shared_address(memory + lane * 16);
    auto get = [&](int array, float (&f)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const Raw<16> four = ptx::ld_shared_16(from + (array * N + i) / 4 * lanes * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) f[i + j] = __uint_as_float(four.w[j]);
        }
    };
    get(0, r.own0), get(1, r.own1), get(2, r.cross0), get(3, r.cross1);
}

template <typename T>
struct QkBulkArguments : QkvGradients<T> {
    i64 tokens, length, inner, batch_inner, qkv_batch, qkv_place, q_heads, kv_heads, q_slots, kv_slots, max_heads,
        consumer_warps, consumers, stages, group_magic, q_extra, kv_step, k_first, v_first, x_extra, x_stretches,
        x_stretch_heads, head_dim, head_lanes, rotating_warps, tokens_together, neighbours, weight_fp32;
    double eps, offset;
    AngleArguments angle;
};

template <typename T, int PAIRS, bool SILU, int HEAD_WARPS>
__global__ void __maxnreg__(HEAD_WARPS == kMoreHeadWarps  ? kStartRegisters
                            : SILU || PAIRS == kByElement ? kBulkMoreRegisters
                                                          : kBulkRegisters)
    qk_norm_rope_bwd_bulk(const __grid_constant__ QkBulkArguments<T> args) {
    constexpr int N = 16 / sizeof(T);
    constexpr bool kPassesRegisters = HEAD_WARPS == kMoreHeadWarps;
    extern __shared__ __align__(128) u8 memory[];
    ptx::launch_dependents();
    const int dim = static_cast<int>(args.head_dim), head_bytes = dim * static_cast<int>(sizeof(T));
    const int lanes = static_cast<int>(args.head_lanes), warp_groups = kWarp / lanes;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
    const int warp_lane = static_cast<int>(threadIdx.x) % kWarp;
    const int of_q = static_cast<int>(args.q_heads), of_kv = static_cast<int>(args.kv_heads);
    const int g_heads = of_q + 2 * of_kv, x_heads = static_cast<int>(args.x_stretches * args.x_stretch_heads);
    const int consumer_count = static_cast<int>(args.consumers), warps = static_cast<int>(args.consumer_warps);
    const int work_warps = consumer_count * warps;
    const int consumer_groups = warps * warp_groups, rounds = static_cast<int>(args.max_heads);
    const TokenRing ring{memory, static_cast<int>(args.stages), (g_heads + x_heads) * head_bytes, 16 * N * lanes};

    const int grid = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
    const int mine = (static_cast<int>(args.tokens) - first + grid - 1) / grid;  // tokens of this block
    const bool by_batch = args.batch_inner != 0, adjacent = args.neighbours != 0;
    const int lane = warp_lane % lanes;

    // The copying warp initialises the barriers first and does not wait for the others. Those load small operands
    // meanwhile: weights and the first rotations would queue behind the tokens.
    const int helper = warp - HEAD_WARPS, helpers = static_cast<int>(blockDim.x) / kWarp - HEAD_WARPS;
    const int threads = (work_warps + helpers) * kWarp;  // that do anything
    if (helper >= 0) {
        if constexpr (kPassesRegisters) ptx::registers_give<kHelperRegisters>();
        const int rotators = static_cast<int>(args.rotating_warps), together = static_cast<int>(args.tokens_together);
        if (helper == 0 || helper > rotators) {  // copies
            const int copier = helper == 0 ? 0 : helper - rotators, copiers = helpers - rotators;
            if (copier == 0) {
                if (warp_lane < ring.stages) {
                    ptx::mbarrier_init(ring.full(warp_lane), 2);
                    ptx::mbarrier_init(ring.empty(warp_lane), static_cast<u32>(warps));
                }
                ptx::mbarrier_fence_init();
                __syncwarp();
                ptx::named_barrier_arrive(1, threads);
                if (copiers > 1) ptx::named_barrier_arrive(2, copiers * kWarp);
            } else {
                ptx::named_barrier_arrive(1, threads);
                ptx::named_barrier_sync(2, copiers * kWarp);
            }
            const u64 policy = ptx::l2_last();
            TokenWalk walk(first, grid, static_cast<int>(args.inner));
            RingStage at(0);
            const int dq_copies = args.dq_head == args.head_dim ? 1 : of_q;
            const int dk_copies = args.dk_head == args.head_dim ? 1 : of_kv;
            const int dv_copies = args.dv_head == args.head_dim ? 1 : of_kv;
            const int copies = dq_copies + dk_copies + dv_copies + static_cast<int>(args.x_stretches);
            struct Copy {
                const T* from;
                i64 batch, place;  // strides
                int to, bytes;
            };
            auto find_copy = [&](int nth) -> Copy {
                if (nth < dq_copies)
                    return {args.dq + nth * args.dq_head, args.dq_batch, args.dq_place, nth * head_bytes,
                            (dq_copies == 1 ? of_q : 1) * head_bytes};
                if ((nth -= dq_copies) < dk_copies)
                    return {args.dk + nth * args.dk_head, args.dk_batch, args.dk_place, (of_q + nth) * head_bytes,
                            (dk_copies == 1 ? of_kv : 1) * head_bytes};
                if ((nth -= dk_copies) < dv_copies)
                    return {args.dv + nth * args.dv_head, args.dv_batch, args.dv_place, (of_q + of_kv + nth) * head_bytes,
                            (dv_copies == 1 ? of_kv : 1) * head_bytes};
                nth -= dv_copies;
                const int heads = static_cast<int>(args.x_stretch_heads);
                return {args.qkv + static_cast<i64>(nth * static_cast<int>(args.kv_step)) * dim, args.qkv_batch,
                        args.qkv_place,
                        (g_heads + nth * heads) * head_bytes, heads * head_bytes};
            };
            auto copy = [&](const Copy& c, i64 batch, i64 place, int stage) {
                ptx::bulk_load(ptx::shared_address(ring.heads(stage) + c.to),
                               c.from + (batch * c.batch + place * c.place), c.bytes, ring.full(stage), policy);
            };
            // Computed before the loop: tokens of small heads arrive faster than one warp computes addresses.
            const int own_number = warp_lane * copiers + copier;
            const Copy own_copy = find_copy(own_number);
            for (int j = 0; j < mine; ++j) {
                const i64 batch = walk.batch(by_batch), place = walk.place(by_batch);
                ptx::mbarrier_wait(ring.empty(at.stage), at.phase ^ 1u);
                if (warp_lane == 0 && copier == 0) {
                    ring.result(at.stage) = batch * args.dqkv_batch + place * args.dqkv_place;
                    ptx::mbarrier_arrive_expect(ring.full(at.stage), ring.heads_bytes);
                }
                __syncwarp();
                if (own_number < copies) copy(own_copy, batch, place, at.stage);
#pragma unroll 1
                for (int p = own_number + kWarp * copiers; p < copies; p += kWarp * copiers)
                    copy(find_copy(p), batch, place, at.stage);
                walk.advance();
                at.advance(1, ring.stages);
            }
        } else {  // rotations
            // Groups of lanes have neighbouring tokens, so that the latencies of their table loads overlap.
            const Angles angles = args.angle.of(args.length);
            const int group = warp_lane / lanes, step = rotators * together;
            const int own_token = (helper - 1) * together + group;
            TokenWalk walk(first + own_token * grid, step * grid, static_cast<int>(args.inner));
            RingStage at(own_token);
            const bool rotated = lane < static_cast<int>(args.angle.rotary) / 2 / N;
            Rotation<N> r;
            no_rotation(r);
            for (int j = 0; j < mine; j += step) {
                const bool active = group < together && j + own_token < mine;
                if constexpr (PAIRS == kByElement) {
                    u32 a = static_cast<u32>(lane * N), b = static_cast<u32>((lane + lanes) * N);
                    // Otherwise values that depend on them alone fill registers; likewise below.
                    if constexpr (SILU || kPassesRegisters) ptx::forget(a), ptx::forget(b);
                    if (active)
                        load_rotation_by_element<T, N>(angles, walk.batch(by_batch), walk.place(by_batch),
                                                       static_cast<int>(a), static_cast<int>(b), adjacent, r);
                } else if (active && rotated) {
                    u32 chunk = static_cast<u32>(lane);
                    if constexpr (PAIRS == kAdjacent && kPassesRegisters) ptx::forget(chunk);
                    load_rotation<T, N, PAIRS == kAdjacent>(angles, walk.batch(by_batch), walk.place(by_batch),
                                                            static_cast<int>(chunk), r);
                }
                if (j == 0) ptx::named_barrier_sync(1, threads);
                if (active) {
                    ptx::mbarrier_wait(ring.empty(at.stage), at.phase ^ 1u);
                    put_rotation(ring.rotation(at.stage), lane, lanes, r);
                }
                __syncwarp();
                if (active && lane == 0) ptx::mbarrier_arrive(ring.full(at.stage));
                walk.advance();
                at.advance(step, ring.stages);
            }
        }
        return;
    }

    if constexpr (kPassesRegisters) ptx::registers_take<kHeadRegisters>();
    if (warp >= work_warps) return;
    const int consumer = warp / warps;
    const bool in_group = warp_lane / lanes < warp_groups;  // the last lanes of a warp may be idle
    const int group = (warp - consumer * warps) * warp_groups + (in_group ? warp_lane / lanes : 0);
    const HeadSlot slot(group, static_cast<int>(args.q_slots), static_cast<int>(args.kv_slots), of_q, of_kv);
    const bool normed = slot.part != kV;
    const bool only_v = !SILU && __all_sync(0xffffffffu, !normed);  // a warp that issues copies
    const LaneChunks<N, PAIRS> own(lane, lanes, static_cast<int>(args.angle.rotary), dim, in_group);
    const int in_a = own.in_a, to_b = own.in_b - own.in_a;
    const int b_bytes = to_b * static_cast<int>(sizeof(T));
    OtherWords others_a, others_b;
    if constexpr (PAIRS == kByElement) {
        auto words_of = [&](int column) {
            return OtherWords::of<T>(column, static_cast<int>(args.angle.rotary) / 2, adjacent,
                                     [&](int element) { return (element - column) * static_cast<int>(sizeof(T)); });
        };
        others_a = words_of(in_a), others_b = words_of(own.in_b);
    }

    float gain_a[N], gain_b[N], dweight_a[N], dweight_b[N];
#pragma unroll
    for (int i = 0; i < N; ++i) gain_a[i] = gain_b[i] = dweight_a[i] = dweight_b[i] = 0.0f;
    if (normed && own.any) {
        const void* weight = slot.part == kQ ? args.q_weight : args.k_weight;
        load_gains<T, N>(weight, in_a, in_a + to_b, args.weight_fp32, static_cast<float>(args.offset), gain_a, gain_b);
        if (own.lacks_b()) {
#pragma unroll
            for (int i = 0; i < N; ++i) gain_b[i] = 0.0f;
        }
    }
    for (int i = static_cast<int>(threadIdx.x); i < rounds * consumer_groups; i += work_warps * kWarp) {
        const int of = i / rounds;
        const HeadSlot slot(of, static_cast<int>(args.q_slots), static_cast<int>(args.kv_slots), of_q, of_kv);
        const int head = slot.first + (i - of * rounds) * slot.step;
        HeadPlace here{0, 0, 0, 0};
        if (of < static_cast<int>(args.q_slots + 2 * args.kv_slots) && head < slot.heads) {
            here.exists = 1;
            here.g = (head + (slot.part == kQ ? 0 : slot.part == kK ? of_q : of_q + of_kv)) * head_bytes;
            if (SILU || slot.part != kV)
                here.x = (g_heads + head_column(slot.part, head, args.group_magic, args.x_extra,
                                                args.kv_step - args.q_extra + args.x_extra, args.k_first,
                                                args.v_first)) * head_bytes;
            here.result = dim * head_column(slot.part, head, args.group_magic, args.q_extra, args.kv_step,
                                            args.k_first, args.v_first);
        }
        ring.places()[i] = here;
    }
    const float epsilon = converted_to_float(args.eps), inverse = 1.0f / static_cast<float>(dim);
    const ptx::SharedAddress places = ptx::shared_address(ring.places() + group * rounds);
    Rotation<N> r;
    no_rotation(r);
    ptx::named_barrier_sync(1, threads);
    RingStage at(consumer);
    for (int j = consumer; j < mine; j += consumer_count) {
        ptx::mbarrier_wait(ring.full(at.stage), at.phase);
        T* to = args.dqkv + (ring.result(at.stage) + in_a);
        const ptx::SharedAddress stage =
            ptx::shared_address(ring.heads(at.stage)) + in_a * static_cast<int>(sizeof(T));
        if (own.rotated && !only_v) get_rotation(ring.rotation(at.stage), lane, lanes, r);
#pragma unroll 1
        for (int i = 0; i < rounds && only_v; ++i) {
            const Raw<16> where = ptx::ld_shared_16(places + 16 * i);  // HeadPlace
            if (where.w[3] == 0 || !own.any) continue;
            const ptx::SharedAddress g_at = stage + static_cast<int>(where.w[0]);
            T* dx = to + static_cast<int>(where.w[2]);
            ptx::st<16>(dx, ptx::ld_shared_16(g_at));
            if (!own.lacks_b()) ptx::st<16>(dx + to_b, ptx::ld_shared_16(g_at + b_bytes));
        }
#pragma unroll 1
        for (int i = 0; i < rounds && !only_v; ++i) {
            const Raw<16> where = ptx::ld_shared_16(places + 16 * i);  // HeadPlace
            const ptx::SharedAddress g_at = stage + static_cast<int>(where.w[0]);
            const ptx::SharedAddress x_at = stage + static_cast<int>(where.w[1]);
            // Also computed for v's heads, and discarded: the warps then have no branch that depends on the part.
            float ga[N], gb[N], ua[N], ub[N];
            unpack<T, N>(ptx::ld_shared_16(g_at), ga);
            unpack<T, N>(ptx::ld_shared_16(g_at + b_bytes), gb);
            if constexpr (PAIRS == kByElement) {
                const u8* words = ring.heads(at.stage) + (in_a * static_cast<int>(sizeof(T)) +
                                                          static_cast<int>(where.w[0]));
                rotate_by_element<T, N>(words, others_a, adjacent, r.own0, r.cross0, ga);
                rotate_by_element<T, N>(words + b_bytes, others_b, adjacent, r.own1, r.cross1, gb);
            }
            unpack_u<T, N, SILU>(ptx::ld_shared_16(x_at), ua);
            unpack_u<T, N, SILU>(ptx::ld_shared_16(x_at + b_bytes), ub);
            if constexpr (PAIRS != kByElement) rotate<N, PAIRS>(r, ga, gb);
            float squares[2] = {0.0f, 0.0f}, products[2] = {0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < N; ++e) {
                squares[0] += ua[e] * ua[e];
                squares[1] += ub[e] * ub[e];
                products[0] += ga[e] * gain_a[e] * ua[e];
                products[1] += gb[e] * gain_b[e] * ub[e];
            }
            if (own.lacks_b()) squares[1] = products[1] = 0.0f;
            float sums[2] = {squares[0] + squares[1], products[0] + products[1]};
            if (!own.any) sums[0] = sums[1] = 0.0f;
            sums_of_group<2>(sums, lane, lanes);
            const float rstd = rsqrtf(sums[0] * inverse + epsilon);
            const float pull = sums[1] * inverse * rstd * rstd * rstd;
            if (where.w[3] == 0 || !own.any) continue;
#pragma unroll
            for (int e = 0; e < N; ++e) {
                ga[e] *= rstd, gb[e] *= rstd;
                dweight_a[e] += ga[e] * ua[e], dweight_b[e] += gb[e] * ub[e];
                ga[e] = ga[e] * gain_a[e] - ua[e] * pull;
                gb[e] = gb[e] * gain_b[e] - ub[e] * pull;
            }
            T* dx = to + static_cast<int>(where.w[2]);
            if constexpr (SILU) {  // x is read again, which is cheaper than registers for the slope
                unpack<T, N>(ptx::ld_shared_16(x_at), ua);
                unpack<T, N>(ptx::ld_shared_16(x_at + b_bytes), ub);
                if (!normed) {
                    unpack<T, N>(ptx::ld_shared_16(g_at), ga);
                    unpack<T, N>(ptx::ld_shared_16(g_at + b_bytes), gb);
                }
#pragma unroll
                for (int e = 0; e < N; ++e) {
                    ga[e] *= silu<sizeof(T) == 2>(ua[e]).slope;
                    gb[e] *= silu<sizeof(T) == 2>(ub[e]).slope;
                }
            }
            Raw<16> a = pack<T, N>(ga), b = pack<T, N>(gb);
            if (!SILU && !normed) a = ptx::ld_shared_16(g_at), b = ptx::ld_shared_16(g_at + b_bytes);
            ptx::st<16>(dx, a);
            if (!own.lacks_b()) ptx::st<16>(dx + to_b, b);
        }
        __syncwarp();
        if (warp_lane == 0) ptx::mbarrier_arrive(ring.empty(at.stage));
        at.advance(consumer_count, ring.stages);
    }

    if (args.partial == nullptr) return;
    ptx::named_barrier_sync(1, work_warps * kWarp);
    float* sums = reinterpret_cast<float*>(memory) + (consumer * consumer_groups + group) * dim + in_a;
    if (own.any) {
        put_sums(sums, dweight_a);
        if (!own.lacks_b()) put_sums(sums + to_b, dweight_b);
    }
    ptx::named_barrier_sync(1, work_warps * kWarp);
    float* partial = args.partial + static_cast<i64>(blockIdx.x) * 2 * dim;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * dim; i += work_warps * kWarp) {
        const bool of_k = i >= dim;
        const int begin = of_k ? static_cast<int>(args.q_slots) : 0;
        const int end = of_k ? static_cast<int>(args.q_slots + args.kv_slots) : static_cast<int>(args.q_slots);
        const float* column = reinterpret_cast<const float*>(memory) + (of_k ? i - dim : i);
        float total = 0.0f;
        for (int t = 0; t < consumer_count; ++t) {
#pragma unroll 8
            for (int s = begin; s < end; ++s) total += column[(t * consumer_groups + s) * dim];
        }
        partial[i] = total;
    }
}

}  // namespace rtk
