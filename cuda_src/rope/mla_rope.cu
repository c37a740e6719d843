// The key and value side of rotary embedding in multi-head latent attention. A head of kv is [k_nope | v]; k_pos has
// one rotary part for all heads. Forward:  k head = [k_nope | rotation(k_pos)],  v head = v.  Backward:  dkv head =
// [dk_nope | dv],  dk_pos = inverse rotation of the sum over heads of dk's rotary part. Arithmetic is fp32, rounded
// once; copies are exact. Strides are free except within a head. Rotations: rope/angles.cuh; `pairs`:
// rope/head_chunks.cuh.
#include "rope/head_chunks.cuh"

namespace rtk {

inline constexpr int kMlaHeads = 4;  // loads in flight per thread

struct MlaShape {
    i64 tokens, length, heads, nope, value_dim, pairs, kv_batch, kv_place, kv_head, pos_batch, pos_place, k_batch,
        k_place, k_head, v_batch, v_place, v_head;
};

template <typename T>
struct MlaForwardArguments {
    const T *kv, *k_pos;
    T *k, *v;
    MlaShape shape;
    AngleArguments angle;
};

// A warp per (token, kMlaHeads heads): its lanes copy vectors of VEC elements, and hold one pair of k_pos each.
template <typename T, int VEC>
__global__ void __launch_bounds__(128)
    mla_rope_kv_fwd(const __grid_constant__ MlaForwardArguments<T> args) {
    const MlaShape shape = args.shape;
    const u32 unit = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const u32 per_token = static_cast<u32>((shape.heads + kMlaHeads - 1) / kMlaHeads);
    const u32 token = unit / per_token;
    if (token >= static_cast<u32>(shape.tokens)) return;
    const int first = static_cast<int>(unit - token * per_token) * kMlaHeads;
    const int count = static_cast<int>(shape.heads) - first;  // kMlaHeads at most
    const int batch = static_cast<int>(token / static_cast<u32>(shape.length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(shape.length));
    const T* kv = args.kv + batch * shape.kv_batch + place * shape.kv_place + first * shape.kv_head;
    const T* k_pos = args.k_pos + batch * shape.pos_batch + place * shape.pos_place;
    T* k = args.k + batch * shape.k_batch + place * shape.k_place + first * shape.k_head;
    T* v = args.v + batch * shape.v_batch + place * shape.v_place + first * shape.v_head;

    for (int i = lane * VEC; i < shape.nope + shape.value_dim; i += kWarp * VEC) {
        Raw<sizeof(T) * VEC> raw[kMlaHeads];
#pragma unroll
        for (int h = 0; h < kMlaHeads; ++h)
            if (h < count) raw[h] = load_raw<T, VEC>(kv + h * shape.kv_head + i);
        T* to = i < shape.nope ? k + i : v + (i - shape.nope);
        const i64 step = i < shape.nope ? shape.k_head : shape.v_head;
#pragma unroll
        for (int h = 0; h < kMlaHeads; ++h)
            if (h < count) ptx::st<sizeof(T) * VEC>(to + h * step, raw[h]);
    }
    const Angles angles = args.angle.of(shape.length);
    const TokenRows rows(angles, batch, place);
    for (int pair = lane; pair < angles.rotary / 2; pair += kWarp) {
        const PairPlace at(pair, 0, angles.rotary, static_cast<int>(shape.pairs));
        Rotation<1> r;
        load_pair<T>(angles, rows, pair, r);
        float a[1] = {load_one(k_pos + at.in_0)}, b[1] = {load_one(k_pos + at.in_1)};
        rotate<1, kHalves>(r, a, b);
        for (int h = 0; h < kMlaHeads && h < count; ++h) {
            store_one(k + h * shape.k_head + shape.nope + at.out_0, a[0]);
            store_one(k + h * shape.k_head + shape.nope + at.out_1, b[0]);
        }
    }
}

inline constexpr int kMlaWarps = 4;

template <typename T>
struct MlaBackwardArguments {
    const T *dk, *dv;
    T *dkv, *dk_pos;
    MlaShape shape;
    AngleArguments angle;
};

// A block of kMlaWarps warps per token; warp w takes the heads w, w + kMlaWarps, ... and their sums are added in shared
// memory, in that order. `pairs` is the reverse of the forward's order, angle_flags has kInverse.
template <typename T, int VEC>
__global__ void __launch_bounds__(kMlaWarps* kWarp)
    mla_rope_kv_bwd(const __grid_constant__ MlaBackwardArguments<T> args) {
    const MlaShape shape = args.shape;
    __shared__ float sums[kMlaWarps][2][kWarp];
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int warp = static_cast<int>(threadIdx.x / kWarp);
    const u32 token = blockIdx.x;
    const int batch = static_cast<int>(token / static_cast<u32>(shape.length));
    const int place = static_cast<int>(token - batch * static_cast<u32>(shape.length));
    T* dkv = args.dkv + batch * shape.kv_batch + place * shape.kv_place;
    T* dk_pos = args.dk_pos + batch * shape.pos_batch + place * shape.pos_place;
    const T* dk = args.dk + batch * shape.k_batch + place * shape.k_place;
    const T* dv = args.dv + batch * shape.v_batch + place * shape.v_place;

    constexpr int kStep = kMlaWarps * kMlaHeads;
    for (int base = warp; base < shape.heads; base += kStep) {
        for (int i = lane * VEC; i < shape.nope + shape.value_dim; i += kWarp * VEC) {
            const T* from = i < shape.nope ? dk + i : dv + (i - shape.nope);
            const i64 step = i < shape.nope ? shape.k_head : shape.v_head;
            Raw<sizeof(T) * VEC> raw[kMlaHeads];
#pragma unroll
            for (int h = 0; h < kMlaHeads; ++h)
                if (base + h * kMlaWarps < shape.heads) raw[h] = load_raw<T, VEC>(from + (base + h * kMlaWarps) * step);
#pragma unroll
            for (int h = 0; h < kMlaHeads; ++h)
                if (base + h * kMlaWarps < shape.heads)
                    ptx::st<sizeof(T) * VEC>(dkv + (base + h * kMlaWarps) * shape.kv_head + i, raw[h]);
        }
    }
    const Angles angles = args.angle.of(shape.length);
    const TokenRows rows(angles, batch, place);
    const int half = angles.rotary / 2;
    for (int begin = 0; begin < half; begin += kWarp) {
        const int pair = begin + lane;
        const PairPlace at(pair, 0, angles.rotary, static_cast<int>(shape.pairs));
        float a[1] = {0.0f}, b[1] = {0.0f};
        if (pair < half) {
#pragma unroll 4
            for (int head = warp; head < shape.heads; head += kMlaWarps) {
                a[0] += load_one(dk + head * shape.k_head + shape.nope + at.in_0);
                b[0] += load_one(dk + head * shape.k_head + shape.nope + at.in_1);
            }
        }
        sums[warp][0][lane] = a[0];
        sums[warp][1][lane] = b[0];
        __syncthreads();
        if (warp == 0 && pair < half) {
            a[0] = b[0] = 0.0f;
#pragma unroll
            for (int w = 0; w < kMlaWarps; ++w) a[0] += sums[w][0][lane], b[0] += sums[w][1][lane];
            Rotation<1> r;
            load_pair<T>(angles, rows, pair, r);
            rotate<1, kHalves>(r, a, b);
            store_one(dk_pos + at.out_0, a[0]);
            store_one(dk_pos + at.out_1, b[0]);
        }
        __syncthreads();
    }
}

}  // namespace rtk
