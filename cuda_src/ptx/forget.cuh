// What the compiler shall not know, for the sake of registers and addresses. No instructions.
#pragma once
#include "common/abi.cuh"
#include "ptx/ldst.cuh"

namespace rtk::ptx {

// Makes the compiler forget how it got these bits, so that it unpacks them again where they are used again instead of
// keeping the unpacked values in two to four times the registers.
template <int B>
RTK_DEVICE void forget(Raw<B>& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw.w) / sizeof(u32)); ++i) asm volatile("" : "+r"(raw.w[i]));
}

// The same for a number: what follows from it is worked out where it is used.
RTK_DEVICE void forget(u32& number) { asm volatile("" : "+r"(number)); }

// The same for an address: accesses around it are known distances from it, instead of each one's own sum.
RTK_DEVICE void forget(const u8*& address) { asm volatile("" : "+l"(address)); }

// The same, and not before `known` is: what is loaded from there is not loaded ahead of it.
RTK_DEVICE void forget(const u8*& address, float known) { asm volatile("" : "+l"(address) : "f"(known)); }

// A number to be kept in a register, not worked out again where it is used again.
RTK_DEVICE void keep(float& number) {
    u32 bits = __float_as_uint(number);
    asm volatile("" : "+r"(bits));
    number = __uint_as_float(bits);
}

}  // namespace rtk::ptx
