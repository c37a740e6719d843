// Heads of one new token per sequence, from a merged projection [batch, q heads + 2 kv heads, dim]: RMS norm of q and k
// heads (optional), rotation, then q is written densely, and keys and values to row slots[b] of sequence b of the cache.
//     n = x * rstd * (offset + weight),  rstd = 1/sqrt(mean(x^2) + eps)
// fp32, rounded once. Tokens whose slot is outside of the cache write no key and no value.
//
// One warp per token and head; a lane has up to four pairs of elements: those that are rotated together, then neighbours
// of the rest. The kernel may start before the previous one has ended.
#include "common/any_type.cuh"
#include "common/reduce.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kHeadPairs = 4;  // of a lane

// `tables`: cos and sin have an angle for each element, not for each pair. `types`: of cos and sin, of the norm weights.
template <typename T>
__global__ void __launch_bounds__(128)
    decode_heads(const T* qkv, const void* q_weight, const void* k_weight, const void* cosines, const void* sines,
                 const i32* slots, T* q, T* k_cache, T* v_cache, i64 tokens, i64 q_heads, i64 kv_heads, i64 dim_, i64 rotary_,
                 i64 qkv_row, i64 angle_row, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head,
                 i64 capacity, i64 tables, i64 interleaved, i64 angle_type, i64 weight_type, double eps, double offset) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 heads = q_heads + 2 * kv_heads;
    const i64 warp = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (warp >= tokens * heads) return;
    const int token = static_cast<int>(warp / heads), head = static_cast<int>(warp - token * heads);
    const int dim = static_cast<int>(dim_), half = static_cast<int>(rotary_) / 2;
    const bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
    const T* const x = qkv + token * qkv_row + static_cast<i64>(head) * dim;
    T* y = q + (token * q_heads + head) * dim;
    if (!is_q) {
        const i64 slot = slots[token];
        if (slot < 0 || slot >= capacity) return;
        y = is_v ? v_cache + token * v_batch + slot * v_row + (head - q_heads - kv_heads) * v_head
                 : k_cache + token * k_batch + slot * k_row + (head - q_heads) * k_head;
    }
    // Elements of pair p.
    auto first_of = [&](int p) { return p < half ? (interleaved ? 2 * p : p) : 2 * p; };
    auto second_of = [&](int p) { return p < half ? (interleaved ? 2 * p + 1 : p + half) : 2 * p + 1; };
    // The previous kernel may have written x after this one started: no read-only loads.
    auto value = [&](int i) {
        float v[1];
        unpack<T, 1>(Raw<2>{{*reinterpret_cast<const u16*>(x + i)}}, v);
        return v[0];
    };
    float a[kHeadPairs], b[kHeadPairs], square = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeadPairs; ++j) {
        const int p = lane + kWarp * j;
        a[j] = b[j] = 0.0f;
        if (2 * p < dim) a[j] = value(first_of(p)), b[j] = value(second_of(p));
        square += a[j] * a[j] + b[j] * b[j];
    }
    const void* const weight = is_v ? nullptr : is_q ? q_weight : k_weight;
    float rstd = 1.0f;
    if (weight != nullptr)
        rstd = rsqrtf(warp_reduce<Sum>(square) / static_cast<float>(dim) + static_cast<float>(eps));
#pragma unroll
    for (int j = 0; j < kHeadPairs; ++j) {
        const int p = lane + kWarp * j, first = first_of(p), second = second_of(p);
        if (2 * p >= dim) continue;
        if (weight != nullptr) {
            a[j] *= rstd * (static_cast<float>(offset) + load_any(weight, static_cast<int>(weight_type), first));
            b[j] *= rstd * (static_cast<float>(offset) + load_any(weight, static_cast<int>(weight_type), second));
        }
        float out[2] = {a[j], b[j]};
        if (!is_v && p < half) {
            const i64 at = token * angle_row;
            auto angle = [&](const void* table, int i) { return load_any(table, static_cast<int>(angle_type), at + i); };
            const int of_first = tables ? first : p, of_second = tables ? second : p;
            out[0] = a[j] * angle(cosines, of_first) - b[j] * angle(sines, of_first);
            out[1] = b[j] * angle(cosines, of_second) + a[j] * angle(sines, of_second);
        }
        store<T, 1>(y + first, reinterpret_cast<const float(&)[1]>(out[0]));
        store<T, 1>(y + second, reinterpret_cast<const float(&)[1]>(out[1]));
    }
}

}  // namespace rtk
