// Results that are finished in registers: gated ones, and fp8 codes with a scale per 128 columns of a row.
//
// A gated tile has 128 columns of the gate, then the same 128 of the other half, so a thread has both among its own
// accumulators: result = act(gate) * up. A row of 128 columns is spread over four lanes, so its amax takes two
// shuffles; its codes are one row of a box of gemm/epilogue_sm90.cuh. Scales are those of common/fp8_scale.cuh, bit for
// bit.
#pragma once
#include "common/fp8_scale.cuh"
#include "gemm/epilogue_sm90.cuh"

namespace rtk {

// Called by a warpgroup: the 128 columns from FIRST on, or the 64 of a small gated tile. Accumulators times factors, plus
// bias, through the activation; for a gated tile the product of both halves. Columns past the result's last one
// (`existing` of this tile) become 0.
template <bool GATED, int COLS, int FIRST, typename Sum, int RESULTS>
RTK_DEVICE void finish_in_registers(const Sum (&sums)[COLS / 2], const float (&row_factor)[2], const float* columns, u32 act,
                                    int existing, float (&results)[RESULTS]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const Activation activate(act);
#pragma unroll
    for (int j = 0; j < RESULTS / 4; ++j) {
        const int column = FIRST + 8 * j + 2 * t;
        if (j % 4 == 0) __syncwarp();  // otherwise the compiler hoists more loads of factors than it has registers for
        float2 factor[2], bias[2];
#pragma unroll
        for (int half = 0; half < (GATED ? 2 : 1); ++half) {
            factor[half] = *reinterpret_cast<const float2*>(columns + COLS / 2 * half + column);
            bias[half] = *reinterpret_cast<const float2*>(columns + COLS + COLS / 2 * half + column);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto value = [&](int half) {
                const float scale = row_factor[i / 2] * (i % 2 == 0 ? factor[half].x : factor[half].y);
                return static_cast<float>(sums[FIRST / 2 + COLS / 4 * half + 4 * j + i]) * scale +
                       (i % 2 == 0 ? bias[half].x : bias[half].y);
            };
            float v = activate(value(0));
            if constexpr (GATED) v *= value(1);
            results[4 * j + i] = column + i % 2 < existing ? v : 0.0f;
        }
    }
}

// Destinations of codes and scales: scale (m, n / 128) is m + pitch * (n / 128) after the first.
struct CodePlace {
    const ptx::TensorMap& map;
    u8* out;
    float* scale;
    i64 pitch, scale_pitch;
    i32 columns;
    bool e5, aligned;
};

// Called by a warpgroup: stores 64 rows of 128 columns as codes and scales.
template <int SLOTS>
RTK_DEVICE void store_codes(const float (&results)[64], BoxRing<SLOTS>& ring, const CodePlace& place, const ResultPart& part) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, t = lane % 4;
    const int row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane / 4;
    u8* box = ring.template open<1>(part.engine);
    const ptx::SharedAddress to = ptx::shared_address(box);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = row + 8 * r;
        float amax = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) amax = max_finite(max_finite(amax, results[4 * j + 2 * r]), results[4 * j + 2 * r + 1]);
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
        const float scale = place.e5 ? fp8_scale<e5m2>(amax, false) : fp8_scale<e4m3>(amax, false);
        const float times = inverse_scale(scale);
        if (t == 0 && at < part.rows) place.scale[part.row + at + part.n / 128 * place.scale_pitch] = scale;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float x = results[4 * j + 2 * r] * times, y = results[4 * j + 2 * r + 1] * times;
            ptx::st_shared_2(to + at * 128 + ((j / 2 ^ (at & 7)) << 4) + 8 * (j % 2) + 2 * t,
                             place.e5 ? to_fp8x2<e5m2>(x, y) : to_fp8x2<e4m3>(x, y));
        }
    }
    if (part.engine) {
        ring.send(place.map, box, 1, 128, part.n, part.row, part.group, false);
        return;
    }
    ptx::named_barrier_sync(ring.barrier, 128);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 128; i < 64 * 8; i += 128) {
        const int at = i / 8, vector = i % 8, exist = min(place.columns - part.n - 16 * vector, 16);
        if (at >= part.rows || exist <= 0) continue;
        const Raw<16> raw = ptx::ld_shared_16(to + at * 128 + ((vector ^ (at & 7)) << 4));
        u8* p = place.out + (part.row + at) * place.pitch + part.n + 16 * vector;
        if (exist == 16 && place.aligned) {
            ptx::st<16>(p, raw);
        } else {
#pragma unroll
            for (int b = 0; b < 16; ++b)
                if (b < exist) p[b] = static_cast<u8>(raw.w[b / 4] >> 8 * (b % 4));
        }
    }
}

}  // namespace rtk
