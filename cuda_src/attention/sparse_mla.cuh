// Shared by sparse_mla.cu and sparse_mla_sm90.cu: latents of 656 bytes, and sinks, each one more score in the softmax of
// a head, without a value.
#pragma once
#include "attention/softmax_state.cuh"

namespace rtk {

inline constexpr int kCodedBytes = 656;  // 512 e4m3 codes, four fp32 scales, 64 bf16 columns

// times: factor of the result; log: its log-sum-exp.
RTK_DEVICE void add_sink(float sink, float& times, float& log) {
    const float highest = fmaxf(log, sink);
    if (highest == negative_infinity()) return;
    const float own = ptx::ex2((log - highest) * kLog2e), total = own + ptx::ex2((sink - highest) * kLog2e);
    times *= own / total;
    log = highest + log2f(total) * kLn2;
}

}  // namespace rtk
