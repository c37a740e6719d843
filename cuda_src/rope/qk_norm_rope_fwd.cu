// Forward of the split, norm and rotation of qkv: rope/qk_norm_rope.cuh says what is computed and who does what.
#include "rope/qk_norm_rope.cuh"

namespace rtk {

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

// One flat index over (token, slot).
template <typename T, int PAIRS, bool SILU, int HEADS>
__global__ void __launch_bounds__(128, SILU ? 4 : 5)
    qk_norm_rope_fwd(const T* qkv, const void* q_weight, const void* k_weight, T* q, T* k, T* v, RTK_QKV_PARAMETERS,
                     RTK_ANGLE_PARAMETERS) {
    constexpr int N = 16 / sizeof(T);
    const u32 slots = static_cast<u32>(q_slots + 2 * kv_slots);
    const int lanes = 1 << lane_bits;
    const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const u32 group = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const u32 token = divided(group, by_slots);
    const int batch = static_cast<int>(divided(token, by_length));
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
