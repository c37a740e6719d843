// y = act(gate) * up * channel_scale for gate and up in NVFP4, in one pass: they are dequantised in registers, exactly
// as dequantize_nvfp4 does; y is stored as fp32, as 8-bit codes or as NVFP4 (common/row_output.cuh), and additionally
// as fp32 if `kept`.
//
// A RowGroup owns a row, thread i of it the columns [i * N, i * N + N) of each stretch of threads * N; the N columns of a thread
// share a scale. Grid: rows / groups of a block.
#include "act/activate_any.cuh"
#include "common/row_output.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr i64 kGateSwizzled = 1, kUpSwizzled = 2, kFactorFp32 = 4;  // flags

// `valid` values of a row in NVFP4 from `column` on. The number of columns is even: two share a byte.
template <int N>
RTK_DEVICE void load_nvfp4(const u8* codes, i64 stride, const u8* scales, const float* global_scale, bool swizzled, i64 row,
                           i64 column, i64 cols, int valid, float (&v)[N]) {
    float step = 0.0f;
    if (valid > 0) {
        const i64 blocks = (cols + 15) / 16, block = column / 16;
        step = e4m3_value(scales[swizzled ? swizzled_place(row, block, blocks) : row * blocks + block]);
        if (global_scale != nullptr) step *= *global_scale;
    }
    const u8* const from = codes + row * stride + column / 2;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const u32 pair = i < valid ? from[i / 2] : 0u;
        v[i] = e2m1_value(pair) * step, v[i + 1] = e2m1_value(pair >> 4) * step;
    }
}

template <int FORMAT, bool ALIGNED>
__global__ void __maxnreg__(128)
    glu_nvfp4(const u8* gate, const u8* gate_scales, const float* gate_global, const u8* up, const u8* up_scales,
              const float* up_global, const void* channel_scale, const float* quant_scale, u32* amax, void* out, void* kept,
              void* scale_out, float* global_out, i64 rows, i64 cols, i64 gate_stride, i64 up_stride, i64 threads_per_row,
              i64 flags, i64 quant, i64 act, double number, double floor) {
    constexpr int N = kPerThread<float, FORMAT>;
    ptx::wait_for_previous();
    ptx::launch_dependents();
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    RowOutput<float, FORMAT, ALIGNED> output(out, kept, scale_out, global_out, quant_scale, amax, cols, quant, number, floor);
    auto make_y = [&](i64 column, int valid, float(&y)[N]) {
        float v[N];
        load_nvfp4<N>(gate, gate_stride, gate_scales, gate_global, flags & kGateSwizzled, row, column, cols, valid, y);
        load_nvfp4<N>(up, up_stride, up_scales, up_global, flags & kUpSwizzled, row, column, cols, valid, v);
        activate_any<false, false>(static_cast<int>(act), false, y);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= act == kSwigluOai ? partner<SwigluOai>(v[i]).value : v[i];
        if (channel_scale != nullptr) {
            load_either<bf16, N>(channel_scale, column, flags & kFactorFp32, valid, false, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= v[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = i < valid ? y[i] : 0.0f;
    };
    output.finish(group, scratch, 0, row, row < rows, row < rows ? cols : 0, 0, output.span(), amax, make_y);
}

}  // namespace rtk
