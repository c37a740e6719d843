// Addresses of the elements of a reduction: results are over up to three kept dimensions, each a sum over up to three
// reduced ones, of any strides.
#pragma once
#include "reduce/monoids.cuh"

namespace rtk {

// Kept dimensions 2, 1, 0; 0 is the innermost. `position`: index of a result in the dense output.
struct Kept {
    i64 size1, size0, x2, x1, x0, out2, out1, out0;

    struct Place {
        i64 x, out;
    };
    RTK_DEVICE Place place(i64 i) const {
        if (size1 == 1 && size0 == 1) return {i * x2, i * out2};
        const i64 rest = i / size0, i0 = i - rest * size0, i2 = rest / size1, i1 = rest - i2 * size1;
        return {i2 * x2 + i1 * x1 + i0 * x0, i2 * out2 + i1 * out1 + i0 * out0};
    }
};

// Reduced dimensions 2, 1, 0. Dividers are those of ``divided``, for fewer than 2^31 elements; 0: one dimension only.
struct Reduced {
    i64 size1, size0, divider1, divider0, stride2, stride1, stride0;

    RTK_DEVICE i64 offset(i64 i) const {
        if (divider0 == 0) return i * stride0;
        const u32 rest = divided(static_cast<u32>(i), divider0), i0 = static_cast<u32>(i) - rest * static_cast<u32>(size0);
        const u32 i2 = divided(rest, divider1), i1 = rest - i2 * static_cast<u32>(size1);
        return i2 * stride2 + i1 * stride1 + i0 * stride0;
    }
};

// Elements that are read once: L2 evicts them first.
template <int B>
RTK_DEVICE Raw<B> load_reduced(const void* p) {
    if constexpr (B == 16) return ptx::ld_stream_16(p, ptx::l2_first());
    else return ptx::ld_keep<B>(p);
}

// True in the last of `blocks` blocks to call it, each after storing its part: that one sees all parts. `ticket` is 0
// before and after.
RTK_DEVICE bool is_last_block(u32* ticket, i64 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) + 1 == static_cast<u32>(blocks);
        if (last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

}  // namespace rtk
