// The left operand of the router's weight gradient, and the stages it comes from. Fp32 dy in shared memory is split
// into terms in registers: rows are experts, k are tokens. Boxes of dy are 32 experts wide, and a warp has 16 experts.
// The order of experts within a fragment is free, so a lane's two rows are neighbours: experts 2g and 2g + 1 for lane
// 4g + t, tokens 2t and 2t + 1 of 8. Vectors of 16 bytes are swizzled by the token.
#pragma once
#include "gemm/mainloop.cuh"

namespace rtk {

template <typename T, int kTerms>
struct DyFragment {
    int t, vector;
    u32 offset;                      // of this lane's column in a stage
    float factor[2] = {1.0f, 1.0f};  // factors of fp16 experts

    RTK_DEVICE DyFragment(int warp, int lane, u32 box_bytes) {
        const int g = lane / 4;
        t = lane % 4;
        vector = warp % 2 * 4 + g / 2;
        offset = warp / 2 * box_bytes + g % 2 * 8;
    }

    // 16 kSteps tokens of a stage, from `token` on.
    template <int kSteps>
    RTK_DEVICE void terms(const u8* stage, int token, u32 (&left)[kTerms][kSteps][4]) const {
        const u8* own = stage + offset + (token + 2 * t) * kTileRow;
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 both[2];
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    both[c] = *reinterpret_cast<const float2*>(own + (16 * k + 8 * h + c) * kTileRow +
                                                               ((vector ^ ((2 * t + c) & 7)) << 4));
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float pair[2] = {r ? both[0].y : both[0].x, r ? both[1].y : both[1].x};
                    if constexpr (is_same<T, fp16>::value) pair[0] *= factor[r], pair[1] *= factor[r];
                    u32 parts[kTerms];
                    split_pair<T, kTerms, false>(pair[0], pair[1], parts);
#pragma unroll
                    for (int term = 0; term < kTerms; ++term) left[term][k][2 * h + r] = parts[term];
                }
            }
#pragma unroll
        for (int i = 0; i < kTerms * kSteps; ++i) ptx::wgmma_pin(left[i / kSteps][i % kSteps]);
    }
};

// One thread: stages `first` and on, `count` of them, into the ring at `base`. Each has TOKENS tokens in DY_BOXES boxes of
// 32 experts from e0 on, then X_BOXES boxes of 64 columns from k0 on.
template <int TOKENS, int DY_BOXES, int X_BOXES>
RTK_DEVICE void fetch_dy_and_x(const RingBarriers& ring, ptx::SharedAddress base, const ptx::TensorMap& dy,
                               const ptx::TensorMap& x, i64 e0, i64 k0, int first, int count) {
    constexpr u32 kBox = TOKENS * kTileRow, kStage = (DY_BOXES + X_BOXES) * kBox;
    RingPlace at{ring.stages, 0, 1};
    for (int i = 0; i < count; ++i) {
        const i32 token = (first + i) * TOKENS;
        const ptx::SharedAddress stage = base + at.stage * kStage, full = ring.full(at.stage);
        ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
        ptx::mbarrier_arrive_expect(full, kStage);
#pragma unroll
        for (int part = 0; part < X_BOXES; ++part)
            ptx::tma_load_2d(stage + (DY_BOXES + part) * kBox, x, full, static_cast<i32>(k0) + 64 * part, token);
#pragma unroll
        for (int part = 0; part < DY_BOXES; ++part)
            ptx::tma_load_2d(stage + part * kBox, dy, full, static_cast<i32>(e0) + 32 * part, token);
        at.next();
    }
}

}  // namespace rtk
