// Host version of cuda_src/ptx/forget.cuh: a no-op here.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk::ptx {

template <int B>
RTK_DEVICE void forget(Raw<B>&) {}
RTK_DEVICE void forget(u32&) {}
RTK_DEVICE void forget(const u8*&) {}
RTK_DEVICE void forget(const u8*&, float) {}
RTK_DEVICE void keep(float&) {}

}  // namespace rtk::ptx
