// Reduces register pressure: makes the compiler compute values where they are used.
#pragma once
#include "ptx/forget.cuh"

namespace rtk {

// This thread's index, opaque to the compiler: values derived from it take no registers before this point.
RTK_DEVICE u32 this_thread() {
    Raw<4> raw = {threadIdx.x};
    ptx::forget(raw);
    return raw.w[0];
}

// In one instruction, unlike that of 64-bit numbers.
RTK_DEVICE u64 product(u32 a, u32 b) { return static_cast<u64>(a) * b; }

// A pointer with an origin hidden from the compiler: it then increments the pointer instead of recomputing it for each
// row.
template <typename T>
RTK_DEVICE T* settled(T* p) {
    const u64 bits = reinterpret_cast<u64>(p);
    Raw<8> raw = {static_cast<u32>(bits), static_cast<u32>(bits >> 32)};
    ptx::forget(raw);
    return reinterpret_cast<T*>(static_cast<u64>(raw.w[1]) << 32 | raw.w[0]);
}

}  // namespace rtk
