// Sums over columns that the threads of a block hold in registers, into one row of fp32: each group of threads stores
// its row to shared memory, then, after a barrier, the rows are added in order.
#pragma once
#include "common/vec.cuh"

namespace rtk {

// N numbers (a multiple of four) to shared memory, 16-byte aligned.
template <int N>
RTK_DEVICE void put_sums(float* to, const float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}

// out = the sum of `rows` rows of `width` numbers, `apart` numbers from row to row, both multiples of four. The whole
// block calls this.
RTK_DEVICE void add_rows(const float* sums, int rows, int apart, int width, float* out) {
    for (int at = static_cast<int>(threadIdx.x) * 4; at < width; at += static_cast<int>(blockDim.x) * 4) {
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int row = 0; row < rows; ++row) {
            const float4 part = *reinterpret_cast<const float4*>(sums + row * apart + at);
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
        }
        store<float, 4>(out + at, total);
    }
}

// The same in few instructions: at the end of a kernel each one must first be fetched from memory.
RTK_DEVICE void add_few_rows(const float* sums, int rows, int apart, int width, float* out) {
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) * 4; at < width; at += static_cast<int>(blockDim.x) * 4) {
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const float* from = sums + at;
#pragma unroll 1
        for (int row = 0; row < rows; ++row, from += apart) {
            const float4 part = *reinterpret_cast<const float4*>(from);
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
        }
        store<float, 4>(out + at, total);
    }
}

}  // namespace rtk
