// Gated linear units and their gradients as fp8 codes with one scale per row, after each column was divided (forward)
// or multiplied (gradients) by its own number, shared by all rows or by an expert's. Recipe: common/fp8_scale.cuh.
//
// A warp works on a row, four columns per lane at a time, and goes over it twice: for the scale, then for the codes.
// The second time it is in L1 or L2.
#include "act/glu_fp8_generic.cuh"
#include "common/fp8_scale.cuh"

namespace rtk {

// Raises the value in memory to |v| if v is finite. A maximum does not depend on the order of updates.
RTK_DEVICE void raise(float* max_abs, float v) {
    const u32 bits = __float_as_uint(max_finite(0.0f, v));
    if (bits > __float_as_uint(*max_abs)) atomicMax(reinterpret_cast<u32*>(max_abs), bits);
}

// smooth: [experts, columns of the result], or null. Without dy the result is y [rows, cols], and `max_abs` collects
// the largest |act(gate) * up| of each column, before the weight. With dy, the result is the gradient of [gate | up],
// [rows, 2 * cols]; dx (of the inputs' type) is the unscaled gradient, dweight (of the weight's type) that of the
// weight, and `max_abs` collects the largest |gradient * factor| of each column, `factor` having one number per row. q,
// dx, dweight and max_abs may be null; `max_abs` must hold zeros.
template <bool FP32>
__global__ void __launch_bounds__(256)
    glu_fp8_smooth(const void* dy, const void* gate, const void* up, const void* weight, const void* counts,
                   const float* smooth, const float* factor, e4m3* q, float* scale, void* dx, void* dweight,
                   float* max_abs, i64 rows, i64 cols, i64 dy_stride, i64 gate_stride, i64 up_stride, i64 weight_type,
                   i64 experts, i64 count_width, i64 pow2, i64 check, i64 act, i64 type, i64 words) {
    extern __shared__ __align__(16) u8 memory[];
    const ExpertTable table(memory, counts, count_width, experts, rows);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const int lane = static_cast<int>(threadIdx.x % kWarp), halves = dy == nullptr ? 1 : 2;
    const void* other = up != nullptr ? up : gate;  // without up, it follows gate in each row
    const i64 other_first = up != nullptr ? 0 : cols, width = halves * cols;
    const bool in_words = words != 0, out_words = cols % kFour == 0;
    const i64 end = counts == nullptr ? rows : table.entry[table.experts].row;
    const i64 step = static_cast<i64>(gridDim.x) * (blockDim.x / kWarp);
#pragma unroll 1
    for (i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp; row < end; row += step) {
        const i64 line = counts == nullptr ? 0 : expert_of(table, static_cast<u32>(row)) * width;
        const float w = load_weight(weight, static_cast<int>(weight_type), row);
        const float by = factor == nullptr ? 1.0f : factor[row];
        float largest = 0.0f, sum = 0.0f, inverse = 0.0f;
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
            for (int half = 0; half < halves; ++half) {
                const int kind = dy == nullptr ? kForward : kGateGradient + half;
#pragma unroll 1
                for (i64 column = lane * kFour; column < cols; column += kWarp * kFour) {
                    const int here = static_cast<int>(min(cols - column, static_cast<i64>(kFour)));
                    float v[kFour], u[kFour], d[kFour];
                    const Four<FP32> raw[3] = {
                        load_four<FP32>(gate, row * gate_stride + column, in_words, here),
                        load_four<FP32>(other, row * up_stride + other_first + column, in_words, here),
                        load_four<FP32>(dy, row * dy_stride + column, in_words, dy == nullptr ? 0 : here)};
                    convert_four<FP32>(raw[0], static_cast<int>(type), v);
                    convert_four<FP32>(raw[1], static_cast<int>(type), u);
                    convert_four<FP32>(raw[2], static_cast<int>(type), d);
                    const float part = apply_any<!FP32>(static_cast<int>(act), [&](int) { return kind; }, v, u, d,
                                                        dy == nullptr ? 1.0f : w);
                    const i64 place = half * cols + column;
                    if (pass == 0) {
                        sum += part;
                        if (max_abs != nullptr) {
#pragma unroll
                            for (int i = 0; i < kFour; ++i)
                                if (i < here) raise(max_abs + line + place + i, v[i] * by);
                        }
                        if (dx != nullptr) {
                            const i64 element = row * width + place;
                            if constexpr (FP32) {
                                store_four(static_cast<float*>(dx) + element, out_words, here, v);
                            } else if (type == kBf16) {
                                store_four(static_cast<bf16*>(dx) + element, out_words, here, v);
                            } else {
                                store_four(static_cast<fp16*>(dx) + element, out_words, here, v);
                            }
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kFour; ++i) {
                        const float s = smooth == nullptr || i >= here ? 1.0f : smooth[line + place + i];
                        v[i] *= dy == nullptr ? w * __frcp_rn(fmaxf(s, kScaleFloor)) : s;
                        if (i < here) largest = max_finite(largest, v[i]);
                    }
                    if (pass == 1) {
#pragma unroll
                        for (int i = 0; i < kFour; ++i) v[i] *= inverse;
                        store_four(q + row * width + place, out_words, here, v);
                    }
                }
            }
            if (pass == 1) break;
#pragma unroll
            for (int offset = kWarp / 2; offset > 0; offset /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
                sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            }
            const float own = fp8_scale<e4m3>(largest, pow2 != 0), total[1] = {sum};
            inverse = __frcp_rn(own);
            if (lane == 0 && scale != nullptr) scale[row] = own;
            if (lane == 0 && dweight != nullptr) {
                if (weight_type == kFp32) {
                    store<float, 1>(static_cast<float*>(dweight) + row, total);
                } else if (weight_type == kBf16) {
                    store<bf16, 1>(static_cast<bf16*>(dweight) + row, total);
                } else {
                    store<fp16, 1>(static_cast<fp16*>(dweight) + row, total);
                }
            }
            if (q == nullptr) break;
        }
    }
}

}  // namespace rtk
