// Products of 8-bit attention on sm_90a (attention_sm90_quant.cu): types of codes and accumulators, and the order of
// keys in a tile.
#pragma once
#include "attention/coded_softmax.cuh"
#include "ptx/wgmma_attention.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk {

// Column 8j + 2t + c of the scores is key of_tile(j) + of_lane(t) + c.
template <bool CODES>
struct KeyOrder {
    RTK_DEVICE static constexpr int of_tile(int j) { return CODES ? j % 8 * 16 + j / 8 * 2 : 8 * j; }
    RTK_DEVICE static constexpr int of_lane(int t) { return CODES ? 4 * t : 2 * t; }
};

template <int QK, bool SHIFTED>
struct ScoreProduct {
    using Code = s8;
    using Sum = i32;
    static constexpr bool kShifted = SHIFTED;
    static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: no sum is as large as 2^22
    static constexpr i32 kShiftBits = 0x4b400000;
    RTK_DEVICE static float scaled(i32 sum, float by, float shift_by) {
        return SHIFTED ? __int_as_float(sum) * by - shift_by : static_cast<float>(sum) * by;
    }
};
template <bool SHIFTED>
struct ScoreProduct<kE4m3, SHIFTED> {
    using Code = e4m3;
    using Sum = float;
    static constexpr bool kShifted = false;
    static constexpr float kShift = 0.0f;
    static constexpr i32 kShiftBits = 0;
    RTK_DEVICE static float scaled(float sum, float by, float) { return sum * by; }
};

template <int PV>
struct ValueProduct {
    using Sum = float;
    template <int N>
    RTK_DEVICE static void multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool add) {
        ptx::wgmma_rs_e4m3(d, a, b, add);
    }
};
template <>
struct ValueProduct<kValuesInt8> {
    using Sum = i32;
    template <int N>
    RTK_DEVICE static void multiply(i32 (&d)[N], const u32 (&a)[4], u64 b, bool add) {
        ptx::wgmma_rs_u8_s8(d, a, b, add);
    }
};

}  // namespace rtk
