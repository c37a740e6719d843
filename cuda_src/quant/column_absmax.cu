// out[c] = largest finite |x[r, c] * column_factor[c] * row_factor[r]| over r, 0 if there is none; either factor may be
// absent. Two kernels: each block takes some rows of some columns and writes a row of `partial`; column_max takes the
// maximum of those, or turns it into the scale of an fp8 recipe (common/fp8_scale.cuh). Maxima do not depend on order.
#include "common/fp8_scale.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"
#include "common/amax.cuh"

namespace rtk {

inline constexpr int kAbsmaxWarps = 8;

// Collects the maxima of VEC columns from `column` on, over rows first, first + kAbsmaxWarps, ... below `end`, in
// `max_abs`.
template <int VEC, typename T>
RTK_DEVICE void absmax_of_columns(const T* x, const float* row_factor, const float* column_factor, i64 first, i64 end,
                                  i64 stride, i64 column, u64 policy, float (&max_abs)[VEC]) {
    constexpr int kInFlight = VEC == 1 ? 4 : 8;
    constexpr bool kPacked = VEC > 1 && sizeof(T) > 1;
    float times[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        max_abs[i] = 0.0f;
        times[i] = column_factor == nullptr ? 1.0f : column_factor[column + i];
    }
    u32 words[VEC * sizeof(T) >= 4 ? VEC * sizeof(T) / 4 : 1];
#pragma unroll
    for (u32& word : words) word = 0;
    const bool plain = row_factor == nullptr && column_factor == nullptr;
    const T* p = x + first * stride + column;
    for (i64 row = first; row < end; row += kAbsmaxWarps * kInFlight) {
        Raw<sizeof(T) * VEC> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k, p += kAbsmaxWarps * stride) {
            clear(raw[k]);
            if (row + k * kAbsmaxWarps < end) raw[k] = load_raw<T, VEC>(p, policy);
        }
        if (kPacked && plain) {
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                if constexpr (kPacked) {
#pragma unroll
                    for (int w = 0; w < static_cast<int>(sizeof(words) / 4); ++w)
                        words[w] = WordMax<T>::larger(words[w], WordMax<T>::finite(raw[k].w[w]));
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const i64 here = row + k * kAbsmaxWarps;
                float factor[1] = {1.0f}, v[VEC];
                if (row_factor != nullptr && here < end) load_keep<float, 1>(row_factor + here, factor);
                unpack<T, VEC>(raw[k], v);
                // Rows that do not exist count as zeros, whatever the column's factor is.
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    if (here < end) max_abs[i] = max_finite(max_abs[i], v[i] * times[i] * factor[0]);
            }
        }
    }
    if constexpr (kPacked) {
        if (plain) {
#pragma unroll
            for (int w = 0; w < static_cast<int>(sizeof(words) / 4); ++w) {
                float v[WordMax<T>::kPerWord];
                WordMax<T>::unpacked(words[w], v);
#pragma unroll
                for (int i = 0; i < WordMax<T>::kPerWord; ++i) max_abs[w * WordMax<T>::kPerWord + i] = v[i];
            }
        }
    }
}

template <int VEC, typename T>
RTK_DEVICE void absmax_block(const T* x, const float* row_factor, const float* column_factor, float* partial, i64 rows,
                             i64 cols, i64 stride, i64 rows_per_block, i64 column_tiles, u64 policy,
                             float* shared) {
    constexpr int kWidth = kWarp * VEC;
    const u32 split = blockIdx.x / static_cast<u32>(column_tiles);
    const i64 first_column = static_cast<i64>(blockIdx.x - split * static_cast<u32>(column_tiles)) * kWidth;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 column = first_column + lane * VEC, first = split * rows_per_block;
    float max_abs[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) max_abs[i] = 0.0f;
    if (column < cols)
        absmax_of_columns<VEC>(x, row_factor, column_factor, first + warp, min(first + rows_per_block, rows), stride,
                               column, policy, max_abs);
    // Number i of a lane goes to line i, where lanes are adjacent.
#pragma unroll
    for (int i = 0; i < VEC; ++i) shared[(warp * VEC + i) * kWarp + lane] = max_abs[i];
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < kWidth; c += kAbsmaxWarps * kWarp) {
        const int place = c % VEC * kWarp + c / VEC;
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < kAbsmaxWarps; ++w) all = fmaxf(all, shared[w * kWidth + place]);
        if (first_column + c < cols) partial[split * cols + first_column + c] = all;
    }
}

// Blocks are numbered along the columns first; `partial` has one row per split of the rows. `aligned16`: rows allow
// 16-byte accesses. `evict_first`: L2 should evict them first.
template <typename T>
__global__ void __launch_bounds__(kAbsmaxWarps* kWarp)
    column_absmax(const T* x, const float* row_factor, const float* column_factor, float* partial, i64 rows, i64 cols,
                  i64 x_stride, i64 rows_per_block, i64 column_tiles, i64 aligned16, i64 evict_first) {
    constexpr int N = 16 / sizeof(T);
    __shared__ float shared[kAbsmaxWarps * kWarp * N];
    const u64 policy = ptx::l2_policy(evict_first != 0);
    if (aligned16 != 0) {
        absmax_block<N>(x, row_factor, column_factor, partial, rows, cols, x_stride, rows_per_block, column_tiles, policy,
                        shared);
    } else {
        absmax_block<1>(x, row_factor, column_factor, partial, rows, cols, x_stride, rows_per_block, column_tiles, policy,
                        shared);
    }
}

// What column_max computes from a maximum.
struct AbsMax {
    RTK_DEVICE static float of(float max_abs, bool) { return max_abs; }
};
struct ScaleE4m3 {
    RTK_DEVICE static float of(float max_abs, bool pow2) { return fp8_scale<e4m3>(max_abs, pow2); }
};
struct ScaleE5m2 {
    RTK_DEVICE static float of(float max_abs, bool pow2) { return fp8_scale<e5m2>(max_abs, pow2); }
};

// out[c] from the largest of partial[r, c] over `rows` rows. A block owns 32 columns, its warps every 8th row.
template <typename Result>
__global__ void __launch_bounds__(kAbsmaxWarps* kWarp)
    column_max(const float* partial, float* out, i64 rows, i64 cols, i64 pow2) {
    __shared__ float shared[kAbsmaxWarps][kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 column = static_cast<i64>(blockIdx.x) * kWarp + lane;
    const float* next = partial + warp * cols + column;
    float max_abs = 0.0f;
    ptx::wait_for_previous();
    if (column < cols) {
#pragma unroll 8
        for (i64 row = warp; row < rows; row += kAbsmaxWarps, next += kAbsmaxWarps * cols) max_abs = fmaxf(max_abs, *next);
    }
    shared[warp][lane] = max_abs;
    __syncthreads();
    if (warp != 0 || column >= cols) return;
#pragma unroll
    for (int w = 0; w < kAbsmaxWarps; ++w) max_abs = fmaxf(max_abs, shared[w][lane]);
    out[column] = Result::of(max_abs, pow2 != 0);
}

}  // namespace rtk
