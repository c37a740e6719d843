// Forward of the split, norm and rotation of qkv: rope/qk_norm_rope.cuh says what is computed and who does what.
#include "rope/fetch_heads.cuh"
#include "rope/qk_norm_rope.cuh"

namespace rtk {

inline constexpr int kQkThreads = 192;  // of a block, at most
inline constexpr int kQkBlocks = 6;     // of that size on a multiprocessor, that registers must suffice for

// The factors of a token's q heads and of its k heads in shared memory, by chunks of a head.
template <int N>
struct StagedTurns {
    u8* memory;
    int lanes;

    RTK_DEVICE Raw<16>& word(int part, int i, int chunk) const {
        return reinterpret_cast<Raw<16>*>(memory)[(part * (N / 2) + i) * lanes + chunk];
    }

    RTK_DEVICE void put(int part, int chunk, const Turn<N>& turn) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            Raw<16> four;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                four.w[j] = __float_as_uint(4 * i < N ? turn.own[(4 * i + j) % N] : turn.cross[(4 * i + j) % N]);
            word(part, i, chunk) = four;
        }
    }

    RTK_DEVICE void get(int part, int chunk, Turn<N>& turn) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const Raw<16> four = word(part, i, chunk);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                (4 * i < N ? turn.own : turn.cross)[(4 * i + j) % N] = __uint_as_float(four.w[j]);
        }
    }
};

// A block has the groups of one token, blockIdx.x (as qkv lies in memory: `inner` batches of a place side by side, or
// places of a batch), or a part of them, blockIdx.y: what depends on the token is worked out once per warp. A lane has one
// chunk of each of its heads. They all are on their way to shared memory at once, so that registers do not limit how much
// is; the lane then reads its own, and those with the other elements of its pairs. One warp meanwhile works out what the
// elements are multiplied with; if it can, it has asked for that before its heads, behind which it would queue up.
//
// The q heads are sets of set_heads, each the work of set_slots groups: set_columns heads lie from set to set in qkv.
// Group `at` of a set has its heads at, at + set_slots, ..., which are evenly spaced (by q_step heads) in qkv. Shared
// memory: `most` chunks of each thread, then StagedTurns.
template <typename T, bool SILU>
__global__ void __launch_bounds__(kQkThreads, SILU ? kQkBlocks - 1 : kQkBlocks)
    qk_norm_rope_fwd(const T* qkv, const void* q_weight, const void* k_weight, T* q, T* k, T* v, i64 length,
                     i64 qkv_batch, i64 qkv_place, i64 q_heads, i64 kv_heads, i64 q_slots, i64 kv_slots, i64 set_slots,
                     i64 set_heads, i64 set_columns, i64 q_step, i64 q_extra, i64 kv_step, i64 k_first, i64 v_first,
                     i64 head_dim, i64 lane_bits, i64 groups, i64 most, i64 pairs, i64 weight_wide, i64 by_set,
                     i64 by_group, i64 inner, i64 by_inner, i64 batch_inner, double eps, double offset,
                     double inverse_dim, RTK_ANGLE_PARAMETERS) {
    constexpr int N = 16 / sizeof(T);
    constexpr int kBatch = SILU ? 2 : 4;  // heads at a time, for independent instructions
    extern __shared__ __align__(16) u8 memory[];
    const int lanes = 1 << lane_bits;
    const int column = (static_cast<int>(threadIdx.x) & (lanes - 1)) * N;
    const int group = static_cast<int>(threadIdx.x) >> lane_bits;
    const u32 outer = divided(blockIdx.x, by_inner);
    const u32 rest = blockIdx.x - outer * static_cast<u32>(inner);
    const int batch = static_cast<int>(batch_inner ? rest : outer), place = static_cast<int>(batch_inner ? outer : rest);
    const u32 token = batch * static_cast<u32>(length) + place;
    const int dim = static_cast<int>(head_dim);
    const int of_kv = static_cast<int>(kv_slots);

    int at = group + static_cast<int>(blockIdx.y) * static_cast<int>(groups);
    int from, head, step, stride, left;  // column in heads, head; from one to the next of both; heads that are left
    int part = kQ;
    if (at < static_cast<int>(q_slots)) {
        const int set = static_cast<int>(divided(at, by_set));
        step = static_cast<int>(set_slots);
        at -= set * step;
        head = set * static_cast<int>(set_heads) + at;
        from = set * static_cast<int>(set_columns) + at +
               static_cast<int>(q_extra) * static_cast<int>(divided(at, by_group));
        stride = static_cast<int>(q_step);
        left = static_cast<int>(set_heads) - at;
    } else {
        at -= static_cast<int>(q_slots);
        part = at < of_kv ? kK : kV;
        if (part == kV) at -= of_kv;
        head = at;
        step = of_kv;
        from = at * static_cast<int>(kv_step) + static_cast<int>(part == kK ? k_first : v_first);
        stride = step * static_cast<int>(kv_step);
        left = static_cast<int>(kv_heads) - at;
    }
    if (group >= static_cast<int>(groups) || column >= dim) left = 0;
    const int pitch = static_cast<int>(blockDim.x) * 16;
    const ptx::SharedAddress own = ptx::shared_address(memory + threadIdx.x * 16);
    const StagedTurns<N> staged{memory + static_cast<int>(most) * pitch, lanes};
    const bool adjacent = pairs == kAdjacent;
    const int half = static_cast<int>(rotary) / 2;
    // From a column to the other element of its pair; nothing where that is in the same chunk or there is none.
    auto to_other = [&](int begin) { return adjacent || begin >= 2 * half ? 0 : begin < half ? half : -half; };
    // The last threads, which have fewer heads, work out the factors. A block has at least 2 * lanes.
    const int task = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    const int begin = (task & (lanes - 1)) * N;
    const bool turns = task < 2 * lanes && begin < dim;
    const Angles angles = RTK_ANGLES;
    Turn<N> made;
#pragma unroll
    for (int i = 0; i < N; ++i) made.own[i] = 1.0f, made.cross[i] = 0.0f;
    const bool rotates = turns && begin < 2 * half, early = tables_first<T>(angles);
    if (rotates && early) load_turn<float, N>(angles, angles.direct_row(batch, place), begin, adjacent, made);
    {
        const T* x = qkv + (batch * qkv_batch + place * qkv_place) + (from * dim + column);
        const i64 to_next = stride * dim;
        fetch_heads(x, to_next, left, step, own, pitch);
    }
    if (rotates && !early) load_turn<T, N>(angles, angles.row(batch, place, 0), begin, adjacent, made);
    if (turns) {
        const void* weight = task < lanes ? q_weight : k_weight;
        float gain[N], of_other[N];
        load_gains<T, N>(weight, begin, begin + to_other(begin), weight_wide, static_cast<float>(offset), gain, of_other);
        if (rotates) finish_turn<N>(angles, begin, adjacent, made);
#pragma unroll
        for (int i = 0; i < N; ++i) made.own[i] *= gain[i], made.cross[i] *= adjacent ? of_other[i ^ 1] : of_other[i];
        staged.put(task < lanes ? 0 : 1, begin / N, made);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();

    Turn<N> turn;
    staged.get(part == kQ ? 0 : 1, column < dim ? column / N : 0, turn);
    const int other_lane = static_cast<int>(threadIdx.x % kWarp) + to_other(column) / N;
    const int to_partner = to_other(column) / N * 16;
    const float inverse = converted_once(inverse_dim), epsilon = converted_once(eps);
    T* y = part == kQ ? q : part == kK ? k : v;
    y += static_cast<i64>(token) * (static_cast<int>(part == kQ ? q_heads : kv_heads) * dim) + (head * dim + column);
    const i64 to_next = step * dim;
    ptx::SharedAddress slot = own;
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(most); i += kBatch) {
        if (__all_sync(0xffffffffu, left <= 0)) break;
        float square[kBatch];
        float kept[SILU ? kBatch : 1][N];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            Raw<16> raw;
            clear(raw);
            if (j * step < left) raw = ptx::ld_shared_16(slot + j * pitch);
            float(&u)[N] = kept[SILU ? j : 0];
            unpack_u<T, N, SILU>(raw, u);
            square[j] = 0.0f;
#pragma unroll
            for (int e = 0; e < N; ++e) square[j] += u[e] * u[e];
        }
        group_sums<kBatch>(square, lanes);
        float rstd[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) rstd[j] = rsqrtf(square[j] * inverse + epsilon);
        // No branches here: the loads of all heads can then be asked for together.
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const bool exists = j * step < left;
            Raw<16> raw;
            float u[N], other[N];
            if constexpr (SILU) {
#pragma unroll
                for (int e = 0; e < N; ++e) {
                    u[e] = kept[j][e];
                    other[e] = adjacent ? kept[j][e ^ 1] : __shfl_sync(0xffffffffu, kept[j][e], other_lane);
                }
                raw = pack<T, N>(u);
            } else {
                Raw<16> partner;
                clear(raw), clear(partner);
                if (exists) {
                    raw = ptx::ld_shared_16(slot + j * pitch);
                    partner = ptx::ld_shared_16(slot + (j * pitch + to_partner));
                }
                unpack<T, N>(raw, u);
                unpack_others<T>(partner, adjacent, other);
            }
#pragma unroll
            for (int e = 0; e < N; ++e) u[e] = (u[e] * turn.own[e] + other[e] * turn.cross[e]) * rstd[j];
            const Raw<16> turned = pack<T, N>(u);
#pragma unroll
            for (int w = 0; w < 4; ++w) raw.w[w] = part == kV ? raw.w[w] : turned.w[w];
            if (exists) {
                ptx::st<16>(y, raw);
                y += to_next;
            }
        }
        slot = slot + kBatch * pitch;
        left -= kBatch * step;
    }
}

// Any head size and alignment: a warp per (token, head) reads its head twice. lane_bits is 5, q_slots and kv_slots are
// the numbers of heads, `pairs` kHalves or kAdjacent.
template <typename T, bool SILU>
__global__ void __launch_bounds__(128, 4)
    qk_norm_rope_fwd_any(const T* qkv, const void* q_weight, const void* k_weight, T* q, T* k, T* v,
                         RTK_QKV_PARAMETERS, i64 pairs, RTK_ANGLE_PARAMETERS) {
    const u32 slots = static_cast<u32>(q_slots + 2 * kv_slots);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const u32 unit = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const u32 token = divided(unit, by_slots);
    if (token >= static_cast<u32>(tokens)) return;
    const int batch = static_cast<int>(divided(token, by_length));
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

}  // namespace rtk
