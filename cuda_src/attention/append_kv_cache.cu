// Appends new keys and values to a KV cache, paged or contiguous. Keys are rotated first if angles are given; both are
// quantised if the cache is 8-bit. Arithmetic is fp32 and each element is rounded once.
//
// One warp per token and head, two neighbouring elements per lane and step; grid: warps in x, keys and values in y.
// Token l of sequence b goes to position lengths[b] + l, or to slots[b * length + l] (page * page size + offset;
// negative: skip the token). Tokens that do not fit into the cache are skipped. Neighbours of a head are `step` elements
// apart in the cache.
#include "attention/codes.cuh"
#include "common/any_type.cuh"

namespace rtk {

// Two values as elements or codes of the cache.
template <typename T, int CODES>
RTK_DEVICE void store_pair(u8* cache, i64 at, i64 step, float first, float second, float inverse_scale) {
    if constexpr (CODES == kSameType) {
        const float values[2] = {first, second};
        T* const to = reinterpret_cast<T*>(cache) + at;
        if (step == 1) {
            store<T, 2>(to, values);
        } else {
            store<T, 1>(to, reinterpret_cast<const float(&)[1]>(values[0]));
            store<T, 1>(to + step, reinterpret_cast<const float(&)[1]>(values[1]));
        }
    } else {
        Raw<2> raw;
        if constexpr (CODES == kCodesE4m3) {
            raw.w[0] = to_fp8x2<e4m3>(first * inverse_scale, second * inverse_scale);
        } else {
            // NaN becomes 0, as in a float-to-integer conversion.
            const int a = min(max(__float2int_rn(first * inverse_scale), -127), 127);
            const int b = min(max(__float2int_rn(second * inverse_scale), -127), 127);
            raw.w[0] = (static_cast<u32>(a) & 0xffu) | (static_cast<u32>(b) & 0xffu) << 8;
        }
        if (step == 1) {
            ptx::st<2>(cache + at, raw);
        } else {
            cache[at] = static_cast<u8>(raw.w[0]), cache[at + step] = static_cast<u8>(raw.w[0] >> 8);
        }
    }
}

template <typename T, int CODES>
__global__ void __launch_bounds__(256)
    append_kv_cache(const T* k, const T* v, u8* k_cache, u8* v_cache, const i32* lengths, const i32* table, const i32* slots,
                    const i32* positions, const void* cosines, const void* sines, const float* k_scale, const float* v_scale,
                    i64 tokens, i64 length, i64 heads, i64 d_k, i64 d_v, i64 capacity, i64 page_size, i64 table_row,
                    i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 k_cache_page,
                    i64 k_cache_row, i64 k_cache_head, i64 k_cache_step, i64 v_cache_page, i64 v_cache_row,
                    i64 v_cache_head, i64 v_cache_step, i64 k_scale_head, i64 v_scale_head, i64 angles, i64 angle_row, i64 angle_type, i64 interleaved) {
    const bool values = blockIdx.y == 1;
    const i64 warp = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (warp >= tokens * heads) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 head = warp % heads, token = warp / heads, batch = token / length;
    const i64 position = positions != nullptr ? positions[token] : lengths == nullptr ? 0 : lengths[batch] + token % length;

    i64 page = batch, place = position;
    if (slots != nullptr) {
        if (slots[token] < 0) return;
        page = slots[token] / page_size, place = slots[token] % page_size;
        if (page >= capacity) return;  // pages of the cache
    } else {
        if (position < 0 || position >= capacity) return;  // positions of a sequence
        if (table != nullptr) page = table[batch * table_row + position / page_size], place = position % page_size;
    }
    const T* const from = values ? v + batch * v_batch + token % length * v_row + head * v_head
                                 : k + batch * k_batch + token % length * k_row + head * k_head;
    u8* const cache = values ? v_cache : k_cache;
    const i64 first = values ? page * v_cache_page + place * v_cache_row + head * v_cache_head
                             : page * k_cache_page + place * k_cache_row + head * k_cache_head;
    const i64 step = values ? v_cache_step : k_cache_step;
    const float* const scale = values ? v_scale : k_scale;
    const float inverse = scale == nullptr ? 1.0f : 1.0f / scale[head * (values ? v_scale_head : k_scale_head)];
    const int width = static_cast<int>(values ? d_v : d_k);
    const int half = values || cosines == nullptr ? 0 : static_cast<int>(angles);  // pairs that are rotated

    for (int d = 2 * lane; d < width; d += 2 * kWarp) {
        float x[2];
        load_keep<T, 2>(from + d, x);
        if (d < 2 * half) {
            float y[2] = {x[1], x[0]};  // partners
            int angle[2] = {d / 2, d / 2};
            bool lower[2] = {true, false};
            if (interleaved == 0) {
                load_keep<T, 2>(from + (d < half ? d + half : d - half), y);
                lower[0] = lower[1] = d < half;
                angle[0] = d < half ? d : d - half, angle[1] = angle[0] + 1;
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const i64 at = position * angle_row + angle[c];
                const float cosine = load_any(cosines, static_cast<int>(angle_type), at);
                const float sine = load_any(sines, static_cast<int>(angle_type), at);
                x[c] = lower[c] ? x[c] * cosine - y[c] * sine : x[c] * cosine + y[c] * sine;
            }
        }
        store_pair<T, CODES>(cache, first + d * step, step, x[0], x[1], inverse);
    }
}

}  // namespace rtk
