// Split of a fused qkv projection into heads, RMS norm of every q and k head, rotary position embedding, transpose:
//     u = silu(x) or x;  n = u * rstd * (offset + weight),  rstd = 1/sqrt(mean(u^2) + eps);  out = rotation(n)
// v heads are copied (u). Arithmetic is fp32, rounded once at each store. Rotations: rope/angles.cuh.
//
// qkv is [batch, length, columns] with any strides between batches and positions; q, k, v are dense, [batch, length,
// heads, head_dim]. Head h of q begins at column (h + q_extra * (h / group)) * head_dim, where group_magic = ceil(2^32
// / group); head h of k and v at (first + kv_step * h) * head_dim. That covers both orders of heads: all of q, all of
// k, all of v; or for each kv head its group of q heads, k, v.
//
// Threads work in groups of 2^lane_bits lanes: in the forward with one 16-byte chunk of a head each, in the backward
// with two (HeadChunks). `slots` groups share a token: q_slots of them take the q heads slot, slot + q_slots, ... (the
// forward has its own order), then kv_slots each the k and the v heads, so that a thread needs one weight and one
// rotation.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "ptx/forget.cuh"
#include "rope/head_chunks.cuh"

namespace rtk {

struct QkvShape {
    i64 tokens, length, qkv_batch, qkv_place, q_heads, kv_heads, q_slots, kv_slots, group_magic, q_extra, kv_step,
        k_first, v_first, head_dim, lane_bits, weight_fp32, by_slots, by_length;
    double eps, offset, inverse_dim;
};

// The first arguments of the backward; dqkv has its own strides.
template <typename T>
struct QkvGradients {
    const T *dq, *dk, *dv, *qkv;
    const void *q_weight, *k_weight;
    T *dqkv;
    float *partial;
    i64 dq_batch, dq_place, dq_head, dk_batch, dk_place, dk_head, dv_batch, dv_place, dv_head, dqkv_batch, dqkv_place;
};

inline constexpr int kQ = 0, kK = 1, kV = 2;

// The work of the groups of one slot.
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

// Tokens in the memory order of qkv: `inner` batches of a position side by side, or positions of a batch. Advances in
// steps of a fixed size, without a division each.
struct TokenWalk {
    int token, outer, at, step, step_outer, step_at, inner;

    RTK_DEVICE TokenWalk(int first, int step, int inner)
        : token(first), outer(first / inner), at(first - outer * inner), step(step), step_outer(step / inner),
          step_at(step - step_outer * inner), inner(inner) {}
    RTK_DEVICE void advance() {
        token += step;
        outer += step_outer;
        at += step_at;
        if (at >= inner) at -= inner, ++outer;
    }
    RTK_DEVICE int batch(bool batch_inner) const { return batch_inner ? at : outer; }
    RTK_DEVICE int place(bool batch_inner) const { return batch_inner ? outer : at; }
};

// Column of qkv where a head begins, in heads.
RTK_DEVICE int head_column(int part, int head, i64 group_magic, i64 q_extra, i64 kv_step, i64 k_first, i64 v_first) {
    if (part == kQ)
        return head + static_cast<int>(q_extra) * static_cast<int>((static_cast<u64>(head) * group_magic) >> 32);
    return head * static_cast<int>(kv_step) + static_cast<int>(part == kK ? k_first : v_first);
}

// Sums N numbers over each group of `lanes` neighbouring lanes; the whole warp calls this.
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

// The same for groups of any size: this lane is number `lane` of its group. Every lane of a group gets the same bits.
template <int N>
RTK_DEVICE void sums_of_group(float (&v)[N], int lane, int lanes) {
    if ((lanes & (lanes - 1)) == 0) {
        group_sums<N>(v, lanes);
        return;
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        if (distance < lanes) {
            const bool inside = lane + distance < lanes;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float other = __shfl_down_sync(0xffffffffu, v[i], distance);
                if (inside) v[i] += other;
            }
        }
    }
    const int first = static_cast<int>(threadIdx.x) % kWarp - lane;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __shfl_sync(0xffffffffu, v[i], first);
}

// A parameter as a float, converted here once and not again at each use, in loops too.
RTK_DEVICE float converted_to_float(double parameter) {
    Raw<4> bits;
    bits.w[0] = __float_as_uint(static_cast<float>(parameter));
    ptx::forget(bits);
    return __uint_as_float(bits.w[0]);
}

template <int N>
RTK_DEVICE void no_rotation(Rotation<N>& r) {
#pragma unroll
    for (int i = 0; i < N; ++i) r.own0[i] = r.own1[i] = 1.0f, r.cross0[i] = r.cross1[i] = 0.0f;
}

struct Silu {
    float value, slope;
};

template <bool kFast>
RTK_DEVICE Silu silu(float x) {
    const float s = sigmoid<kFast>(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
}

template <typename T, int N, bool SILU>
RTK_DEVICE void unpack_u(const Raw<sizeof(T) * N>& raw, float (&u)[N]) {
    unpack<T, N>(raw, u);
    if constexpr (SILU) {
#pragma unroll
        for (int i = 0; i < N; ++i) u[i] = silu<sizeof(T) == 2>(u[i]).value;
    }
}

// (offset + weight) of N columns from `a` on and of N from `b` on, or ones without a weight. Columns are multiples of N;
// pointers are aligned to 16.
template <typename T, int N>
RTK_DEVICE void load_gains(const void* weight, int a, int b, bool weight_fp32, float offset, float (&of_a)[N],
                           float (&of_b)[N]) {
    // Added in each branch separately: otherwise the loads of one branch wait for registers of the other, and so for
    // earlier loads.
    auto add_offset = [&] {
#pragma unroll
        for (int i = 0; i < N; ++i) of_a[i] += offset, of_b[i] += offset;
    };
    if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < N; ++i) of_a[i] = of_b[i] = 1.0f;
    } else if (weight_fp32) {
        load_keep<float, N>(static_cast<const float*>(weight) + a, of_a);
        load_keep<float, N>(static_cast<const float*>(weight) + b, of_b);
        add_offset();
    } else {
        load_keep<T, N>(static_cast<const T*>(weight) + a, of_a);
        load_keep<T, N>(static_cast<const T*>(weight) + b, of_b);
        add_offset();
    }
}

}  // namespace rtk
