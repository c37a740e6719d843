#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE u64 mad_wide(u32 a, u32 b, u64 c) { return static_cast<u64>(a) * b + c; }
RTK_DEVICE u32 mul_hi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }

}  // namespace rtk::ptx
