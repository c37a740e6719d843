// Shared memory accessed by 32-bit addresses: cheaper to keep and to advance than generic pointers.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk::ptx {

using SharedAddress = u32;  // the host emulator has a pointer here: only add byte offsets to it

RTK_DEVICE SharedAddress shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// The next multiple of kBytes, a power of two.
template <u32 kBytes>
RTK_DEVICE SharedAddress aligned_up(SharedAddress address) {
    return (address + (kBytes - 1)) & ~(kBytes - 1);
}

// 16 bytes, 16-byte aligned.
RTK_DEVICE Raw<16> ld_shared_16(SharedAddress address) {
    Raw<16> r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                 : "r"(address)
                 : "memory");
    return r;
}

// 8 bytes, 8-byte aligned.
RTK_DEVICE Raw<8> ld_shared_8(SharedAddress address) {
    Raw<8> r;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(address) : "memory");
    return r;
}

// 2 bytes, 2-byte aligned.
RTK_DEVICE void st_shared_2(SharedAddress address, u32 half) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(half)) : "memory");
}

// 4 bytes, 4-byte aligned.
RTK_DEVICE void st_shared_4(SharedAddress address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// 8 bytes, 8-byte aligned.
RTK_DEVICE void st_shared_8(SharedAddress address, const Raw<8>& r) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(r.w[0]), "r"(r.w[1]) : "memory");
}

RTK_DEVICE void st_shared_16(SharedAddress address, const Raw<16>& r) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r.w[0]), "r"(r.w[1]), "r"(r.w[2]),
                 "r"(r.w[3])
                 : "memory");
}

// Declares that these bytes may be uninitialised although they will be read. Costs nothing; the emulator fills them.
RTK_DEVICE void leave_undefined(SharedAddress, u32) {}

}  // namespace rtk::ptx
