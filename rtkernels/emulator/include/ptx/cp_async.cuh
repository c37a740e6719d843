// Host version of cuda_src/ptx/cp_async.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void cp_async_16(SharedAddress shared, const void* global) { emu::cp_async(shared, global, 16, 16); }
RTK_DEVICE void cp_async_16_or_zero(SharedAddress shared, const void* global, bool read) {
    emu::cp_async(shared, global, 16, read ? 16 : 0);
}
RTK_DEVICE void cp_async_16_partial(SharedAddress shared, const void* global, int bytes) {
    emu::cp_async(shared, global, 16, bytes);
}
RTK_DEVICE void cp_async_16_stream(SharedAddress shared, const void* global, int bytes) {
    emu::cp_async(shared, global, 16, bytes);
}
RTK_DEVICE void cp_async_8_partial(SharedAddress shared, const void* global, int bytes) {
    emu::cp_async(shared, global, 8, bytes);
}
RTK_DEVICE void cp_async_4_partial(SharedAddress shared, const void* global, int bytes) {
    emu::cp_async(shared, global, 4, bytes);
}
RTK_DEVICE void cp_async_4_or_zero(SharedAddress shared, const void* global, bool read) {
    emu::cp_async(shared, global, 4, read ? 4 : 0);
}
RTK_DEVICE void cp_async_16_if(bool wanted, SharedAddress shared, const void* global) {
    if (wanted) emu::cp_async(shared, global, 16, 16);
}
RTK_DEVICE void cp_async_commit() { emu::cp_async_commit(); }
template <int kPending>
RTK_DEVICE void cp_async_wait() {
    emu::cp_async_wait(kPending);
}

RTK_DEVICE void cp_async_arrive(SharedAddress barrier) {
    emu::cp_async_commit();
    emu::cp_async_wait(0);
    emu::mbarrier_arrive(barrier, 0);
}

}  // namespace rtk::ptx
