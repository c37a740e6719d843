// Zeros for elements that do not exist.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk {

// Not `= {}`: for a member of an array the compiler loads that from a table in global memory, before the real loads.
template <int B>
RTK_DEVICE void clear(Raw<B>& raw) {
#pragma unroll
    for (u32& word : raw.w) word = 0;
}

}  // namespace rtk
