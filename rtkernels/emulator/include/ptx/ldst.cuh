// Host version of cuda_src/ptx/ldst.cuh. One access of B bytes, whole and aligned, as the hardware checks it.
#pragma once
#include "common/abi.cuh"

namespace rtk {

template <int B>
struct Raw {
    static_assert(B == 1 || B == 2 || B == 4 || B == 8 || B == 16, "one access is 1, 2, 4, 8 or 16 bytes");
    u32 w[(B + 3) / 4];
};

}  // namespace rtk

namespace rtk::ptx {

template <int B>
RTK_DEVICE Raw<B> ld_keep(const void* p) {
    const emu::Word16 value = emu::load(p, B);
    Raw<B> r;
    __builtin_memcpy(r.w, &value, sizeof(r));
    return r;
}

template <int B>
RTK_DEVICE void st(void* p, const Raw<B>& r) {
    emu::Word16 value = {};
    __builtin_memcpy(&value, r.w, sizeof(r));
    emu::store(p, value, B);
}

template <int B>
RTK_DEVICE Raw<B> ld_stream(const void* p) {
    return ld_keep<B>(p);
}
RTK_DEVICE u64 l2_first() { return 0; }
RTK_DEVICE u64 l2_last() { return 0; }
RTK_DEVICE u64 l2_policy(bool) { return 0; }
RTK_DEVICE Raw<16> ld_stream_16(const void* p, u64) { return ld_keep<16>(p); }
template <int B>
RTK_DEVICE void ld_keep_if(bool wanted, u32& word, const void* p) {
    if (wanted) word = ld_keep<B>(p).w[0];
}
RTK_DEVICE void ld_pair_if(bool wanted, float& x, float& y, const float* p) {
    if (wanted) x = p[0], y = p[1];
}
RTK_DEVICE void ld_float_if(bool wanted, float& x, const float* p) {
    if (wanted) x = p[0];
}
RTK_DEVICE void ld_stream_16_if(bool wanted, Raw<16>& r, const void* p, u64) {
    if (wanted) r = ld_keep<16>(p);
}
template <int B>
RTK_DEVICE void st_last(void* p, const Raw<B>& r) {
    st<B>(p, r);
}
template <int B>
RTK_DEVICE void st_stream(void* p, const Raw<B>& r) {
    st<B>(p, r);
}

}  // namespace rtk::ptx
