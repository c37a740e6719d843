// Host version of cuda_src/ptx/bulk.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
    emu::bulk_load(to, from, bytes, barrier);
}

}  // namespace rtk::ptx
