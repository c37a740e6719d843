// The sink of a head: one more score in its softmax, without a value.
#pragma once
#include "attention/softmax_state.cuh"

namespace rtk {

// Of a result whose factor is `times` and whose log-sum-exp is `log`.
RTK_DEVICE void add_sink(float sink, float& times, float& log) {
    const float highest = fmaxf(log, sink);
    if (highest == negative_infinity()) return;
    const float own = ptx::ex2((log - highest) * kLog2e), total = own + ptx::ex2((sink - highest) * kLog2e);
    times *= own / total;
    log = highest + log2f(total) * kLn2;
}

}  // namespace rtk
