// Coordinates of an element of planes (batch, channels, height, width).
#pragma once
#include "common/vec.cuh"
#include "ptx/math.cuh"

namespace rtk {

inline constexpr int kPoolThreads = 256;

// For non-negative numbers: most fit 32 bits, in which a division takes a fifth of the instructions.
RTK_DEVICE i64 quotient(i64 a, i64 b) {
    return (a | b) >> 32 == 0 ? static_cast<i64>(static_cast<u32>(a) / static_cast<u32>(b)) : a / b;
}

// Rows and columns are 32-bit: the host rejects larger planes. Divisors (abi.cuh: divided) are 0 where `at` may not be
// below 2^31.
struct PoolPlace {
    i64 plane;
    int row, column;
    RTK_DEVICE PoolPlace(i64 at, i64 height, i64 width, i64 height_divisor, i64 width_divisor) {
        if (width_divisor != 0) {
            const u32 rest = divided(static_cast<u32>(at), width_divisor), of = divided(rest, height_divisor);
            column = static_cast<int>(static_cast<u32>(at) - rest * static_cast<u32>(width));
            row = static_cast<int>(rest - of * static_cast<u32>(height));
            plane = of;
            return;
        }
        const i64 rest = quotient(at, width);
        column = static_cast<int>(at - rest * width);
        plane = quotient(rest, height);
        row = static_cast<int>(rest - plane * height);
    }
};

template <typename T>
RTK_DEVICE float element(const T* x, i64 at) {
    float v[1];
    load_keep<T, 1>(x + at, v);
    return v[0];
}

// sum / count, correctly rounded: the compiler's own division is a call, around which registers are saved.
RTK_DEVICE float average(float sum, float count) {
    const float inverse = ptx::rcp(count), near = sum * inverse, rest = fmaf(-near, count, sum);
    return rest == rest ? fmaf(rest, inverse, near) : near;  // infinities give NaN
}

// Planes are (batch, channels), at strides x_batch and x_channel; the host merges both dimensions where it can.
RTK_DEVICE i64 plane_offset(i64 plane, i64 channels, i64 x_batch, i64 x_channel) {
    if (channels == 1) return plane * x_batch;
    const i64 batch = quotient(plane, channels);
    return batch * x_batch + (plane - batch * channels) * x_channel;
}

// Input elements per result element: the nearest one above, or to the left.
RTK_DEVICE int nearest(int at, float scale, int size) {
    return min(static_cast<int>(floorf(static_cast<float>(at) * scale)), size - 1);
}

}  // namespace rtk
