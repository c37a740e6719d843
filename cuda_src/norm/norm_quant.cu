// RMS normalisation whose result leaves as e4m3 codes, one scale per 128 columns of a row; and 1/rms alone, for kernels
// that need it before they start (norm/norm_quant_tile.cu).  v = h * rstd * (offset + weight) is quantised from fp32
// (recipe: common/fp8_scale.cuh); rstd = 1/sqrt(mean(h^2) + eps); h = x, or the rounded sum x + residual, which is then
// an output too. Inputs have any row stride; outputs are dense.
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "norm/common.cuh"
#include "ptx/forget.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// The row in registers: thread i of a RowGroup owns the 16-byte pieces i, i + threads, ... (CHUNKS of them), so
// cols <= CHUNKS * VEC * threads_per_row. The kLanes neighbouring lanes of a group of 128 belong to one row:
// threads_per_row is a multiple of kLanes. The scale of row m, group j goes to scale[m * scale_row + j * scale_group].
// residual and sum, weight, and y may be null.
template <typename T, typename W, int CHUNKS>
__global__ void __launch_bounds__(512)
    rms_norm_fp8_row(const T* x, const T* residual, const W* weight, e4m3* q, float* scale, float* rstd_out, T* y,
                     T* sum, i64 rows, i64 cols, i64 x_stride, i64 residual_stride, i64 threads_per_row, i64 scale_row,
                     i64 scale_group, i64 pow2, double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T), kGroup = 128, kLanes = kGroup / VEC;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const bool weighted = weight != nullptr;
    x += row * x_stride + column;
    weight += column;

    Raw<16> raw[CHUNKS];
    WideRaw<W, VEC> gains[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        clear(gains[c]);
        if (column + c * pitch < end) {
            raw[c] = load_raw<T, VEC>(x + c * pitch);
            if (weighted) gains[c] = load_keep_raw<W, VEC>(weight + c * pitch);
        }
    }
    if (residual != nullptr) {
        residual += row * residual_stride + column;
        sum += row * cols + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (column + c * pitch < end) {
                raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
                ptx::st<16>(sum + c * pitch, raw[c]);
            }
        }
    }
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
        ptx::forget(raw[c]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) square += h[i] * h[i];
    }
    square = group_reduce<Sum, false>(square, group, scratch, 0);
    const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
    const float base = weighted ? static_cast<float>(offset) : 1.0f;
    if (group.thread == 0 && row < rows) rstd_out[row] = rstd;
    q += row * cols + column;
    scale += row * scale_row + column / kGroup * scale_group;
    const i64 scale_pitch = pitch / kGroup * scale_group;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const bool inside = column + c * pitch < end;
        float v[VEC], gain[VEC];
        unpack<T, VEC>(raw[c], v);
        unpack_wide<W, VEC>(gains[c], gain);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = v[i] * rstd * (gain[i] + base);
        const float own = fp8_scale<e4m3>(warp_reduce<MaxNumber>(inside ? finite_amax(v) : 0.0f, kLanes), pow2 != 0);
        if (inside) {
            if (group.thread % kLanes == 0) scale[c * scale_pitch] = own;
            ptx::st<VEC>(q + c * pitch, quantized<e4m3>(v, __frcp_rn(own)));
            if (y != nullptr) store<T, VEC>(y + row * cols + column + c * pitch, v);
        }
    }
}

// 1/rms of every row, and the sum if there is a residual.
template <typename T, int VEC>
__global__ void __launch_bounds__(512)
    rms_norm_fp8_rstd(const T* x, const T* residual, T* sum, float* rstd_out, i64 rows, i64 cols, i64 x_stride,
                      i64 residual_stride, i64 threads_per_row, double eps) {
    constexpr int kInFlight = 4;
    __shared__ GroupScratch<1> scratch;
    ptx::launch_dependents();
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 end = row < rows ? cols : 0;
    const i64 pitch = static_cast<i64>(group.threads) * VEC;
    x += row * x_stride;
    if (residual != nullptr) residual += row * residual_stride, sum += row * cols;
    float square = 0.0f;
    for (i64 first = static_cast<i64>(group.thread) * VEC; first < end; first += pitch * kInFlight) {
        Raw<sizeof(T) * VEC> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            clear(raw[k]);
            if (first + k * pitch < end) raw[k] = load_raw<T, VEC>(x + first + k * pitch);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (residual != nullptr && first + k * pitch < end) {
                raw[k] = add_rounded<T, VEC>(raw[k], load_raw<T, VEC>(residual + first + k * pitch));
                ptx::st<sizeof(T) * VEC>(sum + first + k * pitch, raw[k]);
            }
            float h[VEC];
            unpack<T, VEC>(raw[k], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square += h[i] * h[i];
        }
    }
    square = group_reduce<Sum, false>(square, group, scratch, 0);
    if (group.thread == 0 && row < rows)
        rstd_out[row] = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
}

}  // namespace rtk
