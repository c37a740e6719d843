// Helpers shared by the normalisation kernels.
#pragma once
#include "common/vec.cuh"

namespace rtk {

// (offset + weight) of N columns, or ones without a weight.
template <typename W, int N>
RTK_DEVICE void load_gain(const W* weight, i64 column, float offset, float (&gain)[N]) {
    if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < N; ++i) gain[i] = 1.0f;
        return;
    }
    load_keep<W, N>(weight + column, gain);
#pragma unroll
    for (int i = 0; i < N; ++i) gain[i] += offset;
}

}  // namespace rtk
