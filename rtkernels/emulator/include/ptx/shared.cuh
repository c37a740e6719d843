// Host version of cuda_src/ptx/shared.cuh.
#pragma once
#include "ptx/ldst.cuh"

namespace rtk::ptx {

using SharedAddress = u8*;

RTK_DEVICE SharedAddress shared_address(const void* p) { return static_cast<u8*>(const_cast<void*>(p)); }
template <u32 kBytes>
RTK_DEVICE SharedAddress aligned_up(SharedAddress address) {
    return address + (-reinterpret_cast<u64>(address) & (kBytes - 1));
}
RTK_DEVICE Raw<16> ld_shared_16(SharedAddress address) { return ld_keep<16>(address); }
RTK_DEVICE Raw<8> ld_shared_8(SharedAddress address) { return ld_keep<8>(address); }
RTK_DEVICE void st_shared_2(SharedAddress address, u32 half) { st<2>(address, Raw<2>{{half}}); }
RTK_DEVICE void st_shared_4(SharedAddress address, u32 word) { st<4>(address, Raw<4>{{word}}); }
RTK_DEVICE void st_shared_8(SharedAddress address, const Raw<8>& r) { st<8>(address, r); }
RTK_DEVICE void st_shared_16(SharedAddress address, const Raw<16>& r) { st<16>(address, r); }

RTK_DEVICE void leave_undefined(SharedAddress first, u32 bytes) { emu::leave_undefined(first, bytes); }

}  // namespace rtk::ptx
