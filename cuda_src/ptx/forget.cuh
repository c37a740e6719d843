// Hides values from the compiler, to control registers and addresses. No instructions.
#pragma once
#include "common/abi.cuh"
#include "ptx/ldst.cuh"

namespace rtk::ptx {

// Hides the origin of these bits, so that the compiler unpacks them again at each use instead of keeping the unpacked
// values in two to four times the registers.
template <int B>
RTK_DEVICE void forget(Raw<B>& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw.w) / sizeof(u32)); ++i) asm volatile("" : "+r"(raw.w[i]));
}

// The same for a number: values derived from it are computed where they are used.
RTK_DEVICE void forget(u32& number) { asm volatile("" : "+r"(number)); }

// The same for an address: accesses around it use known offsets, instead of computing each address separately.
RTK_DEVICE void forget(const u8*& address) { asm volatile("" : "+l"(address)); }

// The same, with a dependency on `known`: loads from this address are not moved before it.
RTK_DEVICE void forget(const u8*& address, float known) { asm volatile("" : "+l"(address) : "f"(known)); }

// A number that is kept in a register, not recomputed at its next use.
RTK_DEVICE void keep(float& number) {
    u32 bits = __float_as_uint(number);
    asm volatile("" : "+r"(bits));
    number = __uint_as_float(bits);
}

}  // namespace rtk::ptx
