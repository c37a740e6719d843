// Normalisation to e4m3 codes with one scale per row, after dividing by a smoothing number per column: z = v /
// max(smooth, 1e-30) in fp32, v as in norm/norm_fp8.cu, one scale for all z of a row (recipe: common/fp8_scale.cuh).
// For calibration, it also collects the largest finite |v| of every column.
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "norm/norm_fp8_stats.cuh"

namespace rtk {

// Raises a magnitude in memory that other blocks raise too: non-negative floats are ordered like their bits, and a
// maximum does not depend on the order of updates.
RTK_DEVICE void raise(float* place, float v) { atomicMax(reinterpret_cast<int*>(place), __float_as_int(v)); }

// A block works on rows blockIdx.x, + gridDim.x, ... and reads each up to four times, all but the first from caches:
// for the statistics, for the maxima, for the codes. `max_abs` (may be null) [cols] starts as 0; its maxima are
// collected in `shared` (cols numbers, each thread its own columns) if `gather`, else written row by row. These may be
// null: residual and sum, weight, bias, mean (then nothing is centred), y, max_abs. Rows and vectors allow accesses of
// VEC elements.
template <typename T, int VEC>
__global__ void __launch_bounds__(256, 2)
    norm_fp8_smooth(const T* x, const T* residual, const void* weight, const void* bias, const float* smooth, e4m3* q,
                    float* scale, float* rstd, float* mean, T* y, T* sum, float* max_abs, i64 rows, i64 cols, i64 x_stride,
                    i64 residual_stride, i64 weight_fp32, i64 pow2, i64 gather, double eps, double offset) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ GroupScratch<1> scratch;
    float* columns = reinterpret_cast<float*>(shared);
    const RowGroup group(static_cast<i64>(blockDim.x));
    const float count = static_cast<float>(static_cast<int>(cols));
    const i64 begin = static_cast<i64>(group.thread) * VEC, pitch = static_cast<i64>(group.threads) * VEC;
    auto reduce = [&](float v, int phase) { return group_reduce<Sum, false>(v, group, scratch, phase); };
    if (gather != 0)
        for (i64 column = begin; column < cols; column += pitch)
#pragma unroll
            for (int i = 0; i < VEC; ++i) columns[column + i] = 0.0f;

    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* x_row = x + row * x_stride;
        const T* residual_row = residual == nullptr ? nullptr : residual + row * residual_stride;
        __syncthreads();  // before the scratch is used again
        const RowStatistics found =
            row_statistics<T, VEC, true, 4>(x_row, residual_row, residual == nullptr ? nullptr : sum + row * cols, cols,
                                            count, static_cast<float>(eps), mean != nullptr, group.thread,
                                            group.threads, reduce);
        // With 0 for the mean and -0 for the bias the values have the bits of x * rstd * gain.
        auto normalised = [&](i64 column, float(&v)[VEC]) {
            float gain[VEC], shift[VEC];
            auto raw = load_raw<T, VEC>(x_row + column);
            if (residual_row != nullptr) raw = add_rounded<T, VEC>(raw, load_raw<T, VEC>(residual_row + column));
            unpack<T, VEC>(raw, v);
            load_any_gain<T, VEC>(weight, weight_fp32 != 0, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) shift[i] = -0.0f;
            if (bias != nullptr) load_any_gain<T, VEC>(bias, weight_fp32 != 0, column, 0.0f, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = (v[i] - found.mean) * found.rstd * gain[i] + shift[i];
        };
        auto smoothed = [&](i64 column, float(&v)[VEC]) {
            float by[VEC];
            load_keep<float, VEC>(smooth + column, by);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = v[i] / fmaxf(by[i], 1e-30f);
        };
        float largest = 0.0f;
#pragma unroll 1
        for (i64 column = begin; column < cols; column += pitch) {
            float v[VEC];
            normalised(column, v);
            if (max_abs != nullptr) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    if (gather != 0) {
                        columns[column + i] = max_finite(columns[column + i], v[i]);
                    } else {
                        raise(max_abs + column + i, max_finite(0.0f, v[i]));
                    }
                }
            }
            smoothed(column, v);
            largest = fmaxf(largest, finite_amax(v));
        }
        largest = group_reduce<MaxNumber, false>(largest, group, scratch, 0);
        const float own = fp8_scale<e4m3>(largest, pow2 != 0), inverse = __frcp_rn(own);
        if (group.thread == 0) {
            scale[row] = own;
            rstd[row] = found.rstd;
            if (mean != nullptr) mean[row] = found.mean;
        }
#pragma unroll 1
        for (i64 column = begin; column < cols; column += pitch) {
            float v[VEC];
            normalised(column, v);
            if (y != nullptr) store<T, VEC>(y + row * cols + column, v);
            smoothed(column, v);
            ptx::st<VEC>(q + row * cols + column, quantized<e4m3>(v, inverse));
        }
    }
    if (gather != 0)
        for (i64 column = begin; column < cols; column += pitch)
#pragma unroll
            for (int i = 0; i < VEC; ++i) raise(max_abs + column + i, columns[column + i]);
}

}  // namespace rtk
