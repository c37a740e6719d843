// Appends new keys and values to a KV cache, paged or contiguous. Keys are rotated first if angles are given; both are
// quantised if the cache is 8-bit. Arithmetic is fp32 and each element is rounded once.
//
// One warp per token and head, two neighbouring elements per lane and step; grid: warps in x, keys and values in y.
// Token l of sequence b goes to place lengths[b] + l, or to slots[b * length + l] (page * page size + offset; negative:
// skip the token). Tokens without a place in the cache are skipped, also those of a page that the cache does not have.
// The rotation is that of positions[b * length + l], or of the place, at most the last row of angles. Neighbours of a
// head are `step` elements apart in the cache.
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

template <typename T>
struct AppendArguments {
    const T *k, *v;
    u8 *k_cache, *v_cache;
    const i32 *lengths, *table, *slots, *positions;
    const void *cosines, *sines;
    const float *k_scale, *v_scale;
    i64 tokens, length, heads, d_k, d_v, capacity, pages, page_size, table_row, k_batch, k_row, k_head, v_batch, v_row, v_head,
        k_cache_page, k_cache_row, k_cache_head, k_cache_step, v_cache_page, v_cache_row, v_cache_head, v_cache_step,
        k_scale_head, v_scale_head, angles, angle_row, angle_rows, angle_type, interleaved;
};

template <typename T, int CODES>
__global__ void __launch_bounds__(256) append_kv_cache(const __grid_constant__ AppendArguments<T> args) {
    const bool values = blockIdx.y == 1;
    const i64 warp = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (warp >= args.tokens * args.heads) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 head = warp % args.heads, token = warp / args.heads, batch = token / args.length;
    i64 page = batch, place = args.lengths == nullptr ? 0 : args.lengths[batch] + token % args.length;
    const i64 position = args.positions == nullptr ? place : args.positions[token];
    if (args.slots != nullptr) {
        if (args.slots[token] < 0) return;
        page = args.slots[token] / args.page_size, place = args.slots[token] % args.page_size;
    } else {
        if (place < 0 || place >= args.capacity) return;  // places of a sequence
        if (args.table != nullptr)
            page = args.table[batch * args.table_row + place / args.page_size], place = place % args.page_size;
    }
    if (page < 0 || page >= args.pages) return;
    const T* const from = values
                              ? args.v + batch * args.v_batch + token % args.length * args.v_row + head * args.v_head
                              : args.k + batch * args.k_batch + token % args.length * args.k_row + head * args.k_head;
    u8* const cache = values ? args.v_cache : args.k_cache;
    const i64 first = values ? page * args.v_cache_page + place * args.v_cache_row + head * args.v_cache_head
                             : page * args.k_cache_page + place * args.k_cache_row + head * args.k_cache_head;
    const i64 step = values ? args.v_cache_step : args.k_cache_step;
    const float* const scale = values ? args.v_scale : args.k_scale;
    const float inverse =
        scale == nullptr ? 1.0f : 1.0f / scale[head * (values ? args.v_scale_head : args.k_scale_head)];
    const int width = static_cast<int>(values ? args.d_v : args.d_k);
    const int half = values || args.cosines == nullptr ? 0 : static_cast<int>(args.angles);  // pairs that are rotated
    const i64 angles = min(max(position, static_cast<i64>(0)), args.angle_rows - 1) * args.angle_row;

    for (int d = 2 * lane; d < width; d += 2 * kWarp) {
        float x[2];
        load_keep<T, 2>(from + d, x);
        if (d < 2 * half) {
            float y[2] = {x[1], x[0]};  // partners
            int angle[2] = {d / 2, d / 2};
            bool lower[2] = {true, false};
            if (args.interleaved == 0) {
                load_keep<T, 2>(from + (d < half ? d + half : d - half), y);
                lower[0] = lower[1] = d < half;
                angle[0] = d < half ? d : d - half, angle[1] = angle[0] + 1;
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const i64 at = angles + angle[c];
                const float cosine = load_any(args.cosines, static_cast<int>(args.angle_type), at);
                const float sine = load_any(args.sines, static_cast<int>(args.angle_type), at);
                x[c] = lower[c] ? x[c] * cosine - y[c] * sine : x[c] * cosine + y[c] * sine;
            }
        }
        store_pair<T, CODES>(cache, first + d * step, step, x[0], x[1], inverse);
    }
}

}  // namespace rtk
