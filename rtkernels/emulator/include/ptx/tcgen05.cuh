// Host version of cuda_src/ptx/tcgen05.cuh. Operands are checked when a product is issued, and products and copies happen
// when their commit arrives, as late as possible, from the contents of shared memory at that time.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace rtk::ptx {

enum TensorKind { kTensorF16, kTensorFp8, kTensorMxFp8, kTensorNvFp4 };

// Addresses in units of 16 bytes, so that + 2 is 32 bytes here, too.
RTK_DEVICE u64 tensor_descriptor(SharedAddress address) { return reinterpret_cast<u64>(address) >> 4; }
RTK_DEVICE u64 scales_descriptor(SharedAddress address) { return reinterpret_cast<u64>(address) >> 4; }

template <int kColumns>
RTK_DEVICE void tensor_alloc(SharedAddress result, RTK_EMU_CALLER) {
    emu::gather(0xffffffffu, 0, RTK_EMU_SITE("tensor_alloc"), true);
    if (emu::lane() == 0) st_shared_4(result, emu::tensor_alloc(kColumns));
    emu::gather(0xffffffffu, 0, RTK_EMU_SITE("tensor_alloc"), true);
}
template <int kColumns>
RTK_DEVICE void tensor_free(u32 address, RTK_EMU_CALLER) {
    emu::gather(0xffffffffu, 0, RTK_EMU_SITE("tensor_free"), true);
    if (emu::lane() == 0) emu::tensor_free(address, kColumns);
}

template <int KIND>
RTK_DEVICE void tensor_product(u32 d, u64 a, u64 b, u32 instruction, bool add) {
    emu::tensor_product({KIND, d, 0, 0, instruction, add, a << 4, b << 4});
}
template <int KIND>
RTK_DEVICE void tensor_product_scaled(u32 d, u64 a, u64 b, u32 instruction, u32 scale_a, u32 scale_b, bool add) {
    emu::tensor_product({KIND, d, scale_a, scale_b, instruction, add, a << 4, b << 4});
}
RTK_DEVICE void tensor_copy_scales(u32 to, u64 from) { emu::tensor_copy_scales(to, from << 4); }
RTK_DEVICE void tensor_commit(SharedAddress barrier) { emu::tensor_commit(barrier); }

RTK_DEVICE void tensor_fence_before() {}
RTK_DEVICE void tensor_fence_after() {}

RTK_DEVICE void tensor_load(u32 from, u32 (&r)[32], RTK_EMU_CALLER) {
    for (u32 i = 0; i < 32; ++i) r[i] = emu::tensor_word(from + i);
    emu::gather(0xffffffffu, 0, RTK_EMU_SITE("tensor_load"), true);
}

}  // namespace rtk::ptx
