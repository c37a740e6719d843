// Splits rows of a fused projection into heads of q, k and v, normalises and rotates heads of q and k, and writes the
// results: q, k and v dense, or k and v into caches at a position that is known on the device only.
//
//     u = x * rsqrt(mean(x^2) + eps) * weight         of each head of q and k, if they have a weight
//     a, b = a * cos - b * sin, b * cos + a * sin     of its pairs, if there are tables
//
// Arithmetic is fp32, rounded once. `lanes` lanes (a power of two) work on one head of one token: lane i on units i, i
// + lanes, ...; a unit is VEC pairs, namely elements (j, j + pairs) or, if `interleaved`, (2 j, 2 j + 1), and beyond
// the rotated part 2 * VEC elements. Token t of sequence b has position pos[b] + t; what does not fit into tables or
// caches is skipped (a key without an angle becomes NaN). Grid: token-heads / heads of a block.
#include "common/any_type.cuh"
#include "common/reduce.cuh"
#include "common/row_elements.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr i64 kInterleaved = 1, kAnglesDense = 2, kQNormFp32 = 4, kKNormFp32 = 8;

template <typename T>
struct QkvSplitArguments {
    const T* qkv;
    const void *q_weight, *k_weight, *cosines, *sines;
    const i32* pos;
    T *q, *k, *v;
    i64 tokens, length, q_heads, kv_heads, dim, qkv_stride, k_batch, k_token, k_head, v_batch, v_token, v_head,
        capacity, pairs, table_rows, cos_row, cos_column, sin_row, sin_column, angle_type, pos_step, first_position,
        lanes, flags;
    double eps;
};

template <typename T, int VEC>
__global__ void __launch_bounds__(256) qkv_split(const __grid_constant__ QkvSplitArguments<T> args) {
    ptx::wait_for_previous();
    ptx::launch_dependents();
    const int width = static_cast<int>(args.lanes), lane = static_cast<int>(threadIdx.x) & (width - 1);
    const u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / static_cast<u32>(width);  // fewer than 2^31 threads
    const u32 heads = static_cast<u32>(args.q_heads + 2 * args.kv_heads);
    const bool there = number < args.tokens * heads;
    const i64 token = there ? number / heads : 0, head = there ? number - static_cast<u32>(token) * heads : 0;
    const i64 batch = static_cast<u32>(token) / static_cast<u32>(args.length), place = token - batch * args.length;
    const i64 position = args.first_position + place + (args.pos != nullptr ? args.pos[batch * args.pos_step] : 0);
    const bool is_q = head < args.q_heads, is_v = head >= args.q_heads + args.kv_heads;
    const bool cached = !is_q && args.capacity >= 0;
    const T* const from = args.qkv + token * args.qkv_stride + head * args.dim;
    const void* const weight = is_v ? nullptr : is_q ? args.q_weight : args.k_weight;
    const int rotated = is_v || args.cosines == nullptr ? 0 : static_cast<int>(args.pairs);
    const int units = static_cast<int>((rotated + VEC - 1) / VEC + (args.dim - 2 * rotated + 2 * VEC - 1) / (2 * VEC));
    const int rotated_units = (rotated + VEC - 1) / VEC;
    const bool interleaved = args.flags & kInterleaved;
    const bool vectors = VEC > 1;

    // The two halves of a unit: where they begin, and how many elements of each exist.
    auto places = [&](int unit, int& first, int& second, int& count_a, int& count_b) {
        const int pair = unit * VEC;
        if (unit < rotated_units) {
            first = interleaved ? 2 * pair : pair;
            second = interleaved ? first + VEC : static_cast<int>(args.pairs) + pair;
            count_a = count_b = min(VEC, rotated - pair);
        } else {
            first = 2 * rotated + (unit - rotated_units) * 2 * VEC;
            second = first + VEC;
            count_a = min(VEC, static_cast<int>(args.dim) - first);
            count_b = min(VEC, max(static_cast<int>(args.dim) - second, 0));
        }
    };

    float rstd = 1.0f;
    if (args.q_weight != nullptr || args.k_weight != nullptr) {
        float sum = 0.0f;
        for (int unit = lane; there && weight != nullptr && unit < units; unit += width) {
            int first, second, count_a, count_b;
            places(unit, first, second, count_a, count_b);
            float a[VEC], b[VEC];
            load_elements<T, VEC>(from + first, count_a, vectors, a);
            load_elements<T, VEC>(from + second, count_b, vectors, b);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum += a[i] * a[i] + b[i] * b[i];
        }
        sum = warp_reduce<Sum>(sum, width);
        rstd = rsqrtf(sum / static_cast<float>(args.dim) + static_cast<float>(args.eps));
    }
    if (!there || (cached && (position < 0 || position >= args.capacity))) return;
    T* to = args.q + (token * args.q_heads + head) * args.dim;
    if (!is_q) {
        const i64 own = is_v ? head - args.q_heads - args.kv_heads : head - args.q_heads;
        const i64 at = cached ? position : place;
        to = is_v ? args.v + batch * args.v_batch + at * args.v_token + own * args.v_head
                  : args.k + batch * args.k_batch + at * args.k_token + own * args.k_head;
    }
    const bool known = position >= 0 && position < args.table_rows;
    for (int unit = lane; unit < units; unit += width) {
        int first, second, count_a, count_b;
        places(unit, first, second, count_a, count_b);
        float a[VEC], b[VEC];
        load_elements<T, VEC>(from + first, count_a, vectors, a);
        load_elements<T, VEC>(from + second, count_b, vectors, b);
        if (weight != nullptr) {
            float g[VEC], h[VEC];
            const bool fp32 = args.flags & (is_q ? kQNormFp32 : kKNormFp32);
            load_either<T, VEC>(weight, first, fp32, count_a, vectors, g);
            load_either<T, VEC>(weight, second, fp32, count_b, vectors, h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) a[i] *= rstd * g[i], b[i] *= rstd * h[i];
        }
        if (unit < rotated_units) {
            float both[2 * VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) both[i] = a[i], both[VEC + i] = b[i];
            float cosine[VEC], sine[VEC];
            const int pair = unit * VEC;
            if (known && (args.flags & kAnglesDense)) {
                const bool fp32 = args.angle_type == kAnyFp32;
                load_either<T, VEC>(args.cosines, position * args.cos_row + pair, fp32, VEC, true, cosine);
                load_either<T, VEC>(args.sines, position * args.sin_row + pair, fp32, VEC, true, sine);
            } else {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const bool here = known && i < count_a;
                    const int type = static_cast<int>(args.angle_type);
                    cosine[i] =
                        here ? load_any(args.cosines, type, position * args.cos_row + (pair + i) * args.cos_column)
                             : __uint_as_float(0x7fc00000u);
                    sine[i] = here ? load_any(args.sines, type, position * args.sin_row + (pair + i) * args.sin_column)
                                   : cosine[i];
                }
            }
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float x = interleaved ? both[2 * i] : a[i], y = interleaved ? both[2 * i + 1] : b[i];
                const float s = x * cosine[i] - y * sine[i], t = y * cosine[i] + x * sine[i];
                if (interleaved) {
                    both[2 * i] = s, both[2 * i + 1] = t;
                } else {
                    both[i] = s, both[VEC + i] = t;
                }
            }
#pragma unroll
            for (int i = 0; i < VEC; ++i) a[i] = both[i], b[i] = both[VEC + i];
        }
        store_elements<T, VEC>(to + first, count_a, vectors, a);
        store_elements<T, VEC>(to + second, count_b, vectors, b);
    }
}

}  // namespace rtk
