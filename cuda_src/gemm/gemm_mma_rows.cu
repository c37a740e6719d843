// Helper kernels of the mma.sync product, for groups and quantised results.
//
// gemm_spans: turns labels[row], the group of each row or -1, into the first row and the end of each group:
// spans[2][count], zeroed before; the rows of a group are contiguous. A thread owns a row; grid: any.
//
// gemm_quantize: quantises an fp32 result, [rows, columns] dense, with one scale per row (span 0), per 128 or per 16
// columns. A block owns a row. Recipes: common/fp8_scale.cuh (e4m3, e5m2; int8 likewise with 127 for the largest code
// and rounding to nearest even), gemm/nvfp4_codes.cuh (16 columns). Rows that belong to no group are left alone.
#include "common/fp8_scale.cuh"
#include "gemm/gemm_mma_finish.cuh"
#include "gemm/gemm_mma_tiles.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <int kThreads>
__global__ void __launch_bounds__(kThreads) gemm_spans(const i32* labels, i32* spans, i64 rows, i64 count) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    const i64 step = static_cast<i64>(gridDim.x) * kThreads;
    for (i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; row < rows; row += step) {
        const i32 label = labels[row];
        if (label < 0 || label >= count) continue;
        if (row == 0 || labels[row - 1] != label) spans[label] = static_cast<i32>(row);
        if (row + 1 == rows || labels[row + 1] != label) spans[count + label] = static_cast<i32>(row + 1);
    }
}

inline constexpr int kTypeInt8 = 8;  // behind those of MmaType

template <int kThreads>
RTK_DEVICE float largest_of_block(float amax) {
    __shared__ float of_warps[kThreads / kWarp];
    for (int other = kWarp / 2; other > 0; other /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, other));
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = amax;
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / kWarp; ++i) all = fmaxf(all, of_warps[i]);
    return all;
}

RTK_DEVICE u32 code_of(float v, int type) {
    if (type == kTypeE4m3) return to_fp8x2<e4m3>(v, 0.0f) & 0xffu;
    if (type == kTypeE5m2) return to_fp8x2<e5m2>(v, 0.0f) & 0xffu;
    return static_cast<u32>(static_cast<i32>(rintf(fminf(fmaxf(v, -127.0f), 127.0f)))) & 0xffu;
}

RTK_DEVICE float scale_of(float amax, int type) {
    if (type == kTypeE4m3) return fp8_scale<e4m3>(amax, false);
    if (type == kTypeE5m2) return fp8_scale<e5m2>(amax, false);
    return fmaxf(amax / 127.0f, kScaleFloor);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    gemm_quantize(const float* whole, void* out, void* out_scale, const i32* bounds, i64 rows, i64 columns, i64 out_pitch,
                  i64 out_group, i64 scale_pitch, i64 scale_group, i64 span, i64 type, i64 group_kind, i64 group_count) {
    ptx::launch_dependents();
    ptx::wait_for_previous();
    const i64 group = blockIdx.x / rows, row = blockIdx.x - group * rows;
    if (group_kind == kGroupMasked && row >= bounds[group]) return;
    if (group_kind == kGroupRows && row >= bounds[group_count - 1]) return;
    if (group_kind == kGroupSpans && (bounds[row] < 0 || bounds[row] >= group_count)) return;  // labels
    const float* from = whole + static_cast<i64>(blockIdx.x) * columns;
    const int thread = static_cast<int>(threadIdx.x), code = static_cast<int>(type);
    if (span == 16) {
        u8* to = static_cast<u8*>(out) + (group * out_group + row * out_pitch) / 2;
        u8* scales = static_cast<u8*>(out_scale) + group * scale_group + row * scale_pitch;
        for (i64 first = thread * 16; first < columns; first += kThreads * 16) {
            const int exist = static_cast<int>(min(columns - first, static_cast<i64>(16)));
            float amax = 0.0f;
            for (int i = 0; i < exist; ++i) amax = max_finite(amax, from[first + i]);
            const u32 scale = nvfp4_scale(amax);
            scales[first / 16] = static_cast<u8>(scale);
            const float inverse = nvfp4_inverse(scale);
            for (int i = 0; i < exist; i += 2) {
                const float next = i + 1 < exist ? from[first + i + 1] : 0.0f;
                to[(first + i) / 2] =
                    static_cast<u8>(e2m1_code(from[first + i] * inverse) | e2m1_code(next * inverse) << 4);
            }
        }
        return;
    }
    u8* to = static_cast<u8*>(out) + group * out_group + row * out_pitch;
    float* scales = static_cast<float*>(out_scale) + group * scale_group;
    if (span == 0) {
        float amax = 0.0f;
        for (i64 i = thread; i < columns; i += kThreads) amax = max_finite(amax, from[i]);
        const float scale = scale_of(largest_of_block<kThreads>(amax), code), inverse = inverse_scale(scale);
        if (thread == 0) scales[row] = scale;
        for (i64 i = thread; i < columns; i += kThreads) to[i] = static_cast<u8>(code_of(from[i] * inverse, code));
        return;
    }
    const int lane = thread % kWarp;
    for (i64 first = thread / kWarp * 128; first < columns; first += kThreads / kWarp * 128) {
        float v[4], amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i] = first + lane + i * kWarp < columns ? from[first + lane + i * kWarp] : 0.0f;
            amax = max_finite(amax, v[i]);
        }
        for (int other = kWarp / 2; other > 0; other /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, other));
        const float scale = scale_of(amax, code), inverse = inverse_scale(scale);
        if (lane == 0) scales[first / 128 * scale_pitch + row] = scale;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + lane + i * kWarp < columns)
                to[first + lane + i * kWarp] = static_cast<u8>(code_of(v[i] * inverse, code));
    }
}

}  // namespace rtk
