// Random numbers by Philox 4x32-10 with a seed that the host knows (`key` and `offset`), or that is on the device
// (`seed`), so that a captured graph which draws a new seed draws new numbers. A thread produces four neighbours, the
// words of one counter, which is their position: the result depends only on the seed and the number of elements, not on
// the launch. All arithmetic is fp32, rounded once to T. Grid: any.
#include "common/vec.cuh"
#include "common/philox.cuh"

namespace rtk {

// The `kind` arguments (rtkernels/ops/random/philox.py).
inline constexpr int kUniform = 0, kNormal = 1, kExponential = 2, kBernoulli = 3;

// The error of the fast logarithm, 2^-21 near 1, is invisible in two bytes for all but one logarithm in a thousand.
template <typename T>
RTK_DEVICE float logarithm(float x) {
    return sizeof(T) == 2 ? __logf(x) : logf(x);
}

template <typename T>
RTK_DEVICE void draw(const RandomWords& words, int kind, float a, float b, float (&v)[4]) {
    if (kind == kNormal) {  // Box-Muller; a: mean, b: deviation
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            // Next to 1 the fast logarithm may be 0 or positive, and its root would be NaN.
            const float square = fmaxf(-2.0f * logarithm<T>(open_unit(words.w[i])), 0x1p-126f), radius = square * rsqrtf(square);
            float sine, cosine;
            sincospif(2.0f * unit(words.w[i + 1]), &sine, &cosine);  // of half angles: nothing to reduce
            v[i] = a + b * (radius * cosine);
            v[i + 1] = a + b * (radius * sine);
        }
        return;
    }
    const float inverse = 1.0f / a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (kind == kUniform) {  // [a, b), also after rounding
            v[i] = a + (b - a) * unit(words.w[i]);
            if (round_to<T>(v[i]) >= b) v[i] = a;
        } else if (kind == kExponential) {  // a: rate; never 0, also after rounding
            v[i] = fmaxf(-logarithm<T>(open_unit(words.w[i])) * inverse, is_same<T, fp16>::value ? 0x1p-24f : 0x1p-126f);
        } else {  // a: probability of 1
            v[i] = unit(words.w[i]) < a ? 1.0f : 0.0f;
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(256)
    random_fill(T* out, const i64* seed, i64 n, i64 kind, double a, double b, i64 aligned, i64 known_key, i64 offset) {
    const u64 key = static_cast<u64>(seed == nullptr ? known_key : *seed);
    const i64 vectors = ceil_div(n, 4), step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
        float v[4];
        const RandomWords words = philox(key, static_cast<u64>(i), static_cast<u64>(offset));
        draw<T>(words, static_cast<int>(kind), static_cast<float>(a), static_cast<float>(b), v);
        if (aligned && i * 4 + 4 <= n) {
            store<T, 4>(out + i * 4, v);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float one[1] = {v[k]};
                if (i * 4 + k < n) store<T, 1>(out + i * 4 + k, one);
            }
        }
    }
}

// y = x * scale where a random number is below `keep`, else x * 0; mask says where. x, y and mask have one layout,
// dense.
template <typename T>
__global__ void __launch_bounds__(256)
    random_dropout(const T* x, T* y, u8* mask, const i64* seed, i64 n, double keep, double scale, i64 aligned, i64 known_key,
                   i64 offset) {
    const u64 key = static_cast<u64>(seed == nullptr ? known_key : *seed);
    const float limit = static_cast<float>(keep), factor = static_cast<float>(scale);
    const i64 vectors = ceil_div(n, 4), step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
        const RandomWords words = philox(key, static_cast<u64>(i), static_cast<u64>(offset));
        float v[4];
        if (aligned && i * 4 + 4 <= n) {
            load_stream<T, 4>(x + i * 4, v);
            Raw<4> flags;
            flags.w[0] = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const bool kept = unit(words.w[k]) < limit;
                v[k] = v[k] * (kept ? 1.0f : 0.0f) * factor;
                flags.w[0] |= kept ? 1u << (k * 8) : 0u;
            }
            store<T, 4>(y + i * 4, v);
            ptx::st<4>(mask + i * 4, flags);
        } else {
            for (int k = 0; k < 4 && i * 4 + k < n; ++k) {
                float one[1];
                load_stream<T, 1>(x + i * 4 + k, one);
                const bool kept = unit(words.w[k]) < limit;
                one[0] = one[0] * (kept ? 1.0f : 0.0f) * factor;
                store<T, 1>(y + i * 4 + k, one);
                mask[i * 4 + k] = kept;
            }
        }
    }
}

}  // namespace rtk
