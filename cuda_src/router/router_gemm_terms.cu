// Before and after the products of the router: splits operands into 16-bit terms, and sums partial results.
#include "common/reduce.cuh"
#include "gemm/terms.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kTermThreads = 128;
inline constexpr int kTermWidth = 8;  // elements a thread splits at once: 16 bytes of each term

// out[i] = term i of `in` ([rows, cols], rows `stride` apart), i < terms, as [terms, rows, pitch] with zeros from
// column cols to the pitch (a multiple of 8). Blocks: rows in x; in y, as many as share a row.
//
// For fp16 terms numbers are scaled by powers of two: by row (column_largest null), with the inverse in scale[row]; or
// by the largest magnitudes of the columns, which the caller of the product knows too.
template <typename In, typename T>
__global__ void __launch_bounds__(kTermThreads) router_split(const In* in, T* out, float* scale,
                                                             const float* column_largest, i64 rows, i64 cols,
                                                             i64 stride, i64 pitch, i64 terms, i64 aligned16) {
    __shared__ float warps[kTermThreads / kWarp];
    constexpr bool kScaled = is_same<T, fp16>::value;
    ptx::launch_dependents();
    const i64 row = blockIdx.x;
    in += row * stride;
    out += row * pitch;
    auto load = [&](int column, float(&value)[kTermWidth]) {
        if (aligned16) {
            load_keep<In, kTermWidth>(in + column, value);
        } else {
#pragma unroll
            for (int i = 0; i < kTermWidth; ++i) {
                float one[1] = {0.0f};
                if (column + i < cols) load_keep<In, 1>(in + column + i, one);
                value[i] = one[0];
            }
        }
    };
    float factor = 1.0f;
    if (kScaled && column_largest == nullptr) {
        float largest = 0.0f;
        for (int column = threadIdx.x * kTermWidth; column < cols; column += kTermThreads * kTermWidth) {
            float value[kTermWidth];
            load(column, value);
#pragma unroll
            for (float v : value) {
                const float magnitude = fabsf(v);
                if (magnitude < __uint_as_float(0x7f800000u)) largest = fmaxf(largest, magnitude);
            }
        }
        largest = warp_reduce<MaxMagnitude>(largest);
        if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = largest;
        __syncthreads();
#pragma unroll
        for (float other : warps) largest = fmaxf(largest, other);
        factor = fp16_factor(largest);
        if (threadIdx.x == 0 && blockIdx.y == 0) scale[row] = 1.0f / factor;
    }
    const int step = kTermThreads * kTermWidth * gridDim.y;
    for (int column = (blockIdx.y * kTermThreads + threadIdx.x) * kTermWidth; column < pitch; column += step) {
        float value[kTermWidth];
        load(column, value);
        if constexpr (kScaled) {
#pragma unroll
            for (int i = 0; i < kTermWidth; ++i) {
                if (column_largest != nullptr && column + i < cols) factor = fp16_factor(column_largest[column + i]);
                value[i] *= factor;
            }
        }
        for (int term = 0; term < terms; ++term) {
            Raw<16> packed;
#pragma unroll
            for (int i = 0; i < kTermWidth; i += 2) {
                float parts[2];
                u32 pair = packed_pair<T>(value[i], value[i + 1]);
                unpack<T, 2>(Raw<4>{{pair}}, parts);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const u32 bits = __float_as_uint(value[i + k]);
                    const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
                    if (!kScaled && finite && fabsf(parts[k]) == __uint_as_float(0x7f800000u)) {
                        // Finite, but nearest to bf16's infinity: truncate it instead, and let the next term hold the
                        // remainder.
                        parts[k] = __uint_as_float(bits & 0xffff0000u);
                        pair = (pair & (0xffff0000u >> (16 * k))) | (bits >> 16) << (16 * k);
                    }
                    value[i + k] = rest_of(value[i + k], parts[k]);
                }
                packed.w[i / 2] = pair;
            }
            ptx::st<16>(out + term * rows * pitch + column, packed);
        }
    }
}

// out[i] (+)= sum over s of partial[s][i] (+ bias[i % cols]) in the order of s, rounded once. partial is fp32
// [splits, step], step at least count. A thread owns four consecutive elements.
template <typename T>
__global__ void __launch_bounds__(256)
    router_sum(const float* partial, T* out, const float* bias, i64 count, i64 step, i64 cols, i64 splits,
               i64 accumulate, i64 aligned16) {
    const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 4;
    ptx::wait_for_previous();
    if (first >= count) return;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int here = aligned16 ? 4 : static_cast<int>(min(count - first, static_cast<i64>(4)));
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
        const float* from = partial + s * step + first;
        if (aligned16) {
            float part[4];
            load_keep<float, 4>(from, part);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += part[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < here) sum[i] += from[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= here) break;
        if (bias != nullptr) sum[i] += bias[(first + i) % cols];
        if (accumulate) {
            float before[1];
            unpack<T, 1>(ptx::ld_stream<sizeof(T)>(out + first + i), before);
            sum[i] += before[0];
        }
    }
    if (aligned16) {
        store<T, 4>(out + first, sum);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float one[1] = {sum[i]};
            if (i < here) store<T, 1>(out + first + i, one);
        }
    }
}

}  // namespace rtk
