// What the epilogue of gemm_sm90.cu does, in the bits of an argument, and its activations.
#pragma once
#include "common/math.cuh"
#include "common/vec.cuh"

namespace rtk {

// Mirrored in rtkernels/ops/gemm/sm90_limits.py.
enum ElementKind : u32 { kBf16 = 0, kFp16 = 1, kFp32 = 2, kInt32 = 3, kE4m3 = 4, kE5m2 = 5 };
enum ActKind : u32 { kNoAct = 0, kReluAct = 1, kSiluAct = 2, kGeluTanhAct = 3, kGeluAct = 4 };

// Bit fields that say what the epilogue does.
struct EpilogueFlags {
    u32 bits;

    RTK_DEVICE u32 out() const { return bits & 15u; }
    RTK_DEVICE u32 bias() const { return bits >> 4 & 3u; }
    RTK_DEVICE u32 add() const { return bits >> 6 & 3u; }
    RTK_DEVICE u32 act() const { return bits >> 8 & 15u; }
    RTK_DEVICE bool accumulate() const { return bits >> 12 & 1u; }
    RTK_DEVICE bool copy_engine() const { return bits >> 13 & 1u; }  // TMA can store the results, and no further step is needed
    RTK_DEVICE bool copy_engine_adds() const { return bits >> 14 & 1u; }
    RTK_DEVICE bool loop_scales_a() const { return bits >> 15 & 1u; }
    RTK_DEVICE bool loop_scales_b() const { return bits >> 16 & 1u; }
    RTK_DEVICE bool aligned() const { return bits >> 17 & 1u; }  // rows of out and add, to four elements
    RTK_DEVICE bool factors() const { return bits >> 18 & 1u; }  // sums are multiplied, or a bias is added
    RTK_DEVICE bool engine_scales_a() const { return bits >> 24 & 1u; }
    RTK_DEVICE bool engine_scales_b() const { return bits >> 25 & 1u; }
    RTK_DEVICE bool shift_a() const { return bits >> 26 & 1u; }  // rows are odd multiples of 8 bytes apart
    RTK_DEVICE bool shift_b() const { return bits >> 27 & 1u; }
    RTK_DEVICE bool starts() const { return bits >> 28 & 1u; }  // accumulators start from an fp32 result
    RTK_DEVICE u32 register_act() const { return bits >> 20 & 15u; }  // of a gate, or before results are quantised
};

// The activation, in its fast version, because accumulators of tensor cores are no more exact: x, relu(x), gelu(x), or
// x * sigmoid(x * (linear + cubic * x^2)) for silu and tanh gelu. One formula for both keeps the unrolled code small.
struct Activation {
    u32 kind;
    float linear, cubic;

    RTK_DEVICE explicit Activation(u32 act)
        : kind(act), linear(act == kSiluAct ? 1.0f : 1.5957691216057308f),
          cubic(act == kSiluAct ? 0.0f : 1.5957691216057308f * 0.044715f) {}

    RTK_DEVICE float operator()(float x) const {
        if (kind == kNoAct) return x;
        if (kind == kReluAct) return x <= 0.0f ? 0.0f : x;
        if (kind == kGeluAct) return x * normal<true>(x).below;
        const float u = kind == kSiluAct ? x : x * (linear + cubic * (x * x));  // silu must not compute 0 * inf
        return sigmoid_gate<true>(x, u).product;
    }
};

}  // namespace rtk
