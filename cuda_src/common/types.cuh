// The storage types of the library: bits only, no arithmetic. All arithmetic happens in fp32 after conversion
// (common/convert.cuh). Having our own types keeps the CUDA toolkit headers out of every compilation.
#pragma once
#include "common/abi.cuh"

namespace rtk {

struct alignas(2) bf16 {
    u16 bits;
};
struct alignas(2) fp16 {
    u16 bits;
};
struct e4m3 {  // 1-4-3, no infinity, largest finite 448, NaN 0x7f
    u8 bits;
};
struct e5m2 {  // 1-5-2, IEEE-like, largest finite 57344
    u8 bits;
};

template <typename F8>
struct fp8_traits;
template <>
struct fp8_traits<e4m3> {
    static constexpr float kMax = 448.0f;
};
template <>
struct fp8_traits<e5m2> {
    static constexpr float kMax = 57344.0f;
};

}  // namespace rtk
