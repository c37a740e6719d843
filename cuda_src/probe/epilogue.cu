// The epilogue of a matrix product (gemm/epilogue.cuh) on sums that come from memory instead of tensor cores, to test
// it alone: sums [256, COUNT] are those of the 256 threads of two warpgroups, so a block has 128 rows and 2 COUNT
// columns, below those of blockIdx.x other blocks.
#include "act/activations.cuh"
#include "gemm/epilogue.cuh"

namespace rtk {

inline constexpr int kDirect = 0, kCopied = 1;

template <typename Sum, int COUNT>
RTK_DEVICE void load_sums(const Sum* sums, Sum (&own)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) own[i] = sums[(static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * COUNT + i];
}

RTK_DEVICE TilePart part_of(i64 rows, i64 columns) {
    const i64 m = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x / 128 * 64;
    return {m, 0, static_cast<int>(rows - m), static_cast<int>(columns)};
}

// out = silu(sums * a * b * row_scale * column_scale + bias + add); any of the pointers may be null.
template <typename T, typename Sum, int COUNT, int OUTPUT>
__global__ void __launch_bounds__(256, 1)
    probe_epilogue(const Sum* sums, const float* a, const float* b, const float* row_scale, const float* column_scale,
                   const T* bias, const T* add, T* out, i64 stride, i64 aligned, i64 rows, i64 columns) {
    Sum own[COUNT];
    load_sums(sums, own);
    const TilePart part = part_of(rows, columns);
    const auto all = steps(TensorScale{a, b}, RowScale{row_scale}, ColumnScale{column_scale}, Bias<T>{bias},
                           AddMatrix<T>{add, stride}, Activate<Silu, false>{});
    if constexpr (OUTPUT == kDirect) {
        finish_tile(own, part, all, DirectOutput<T>{out, stride, aligned != 0});
    } else {
        using Output = StagedOutput<T, 2 * COUNT>;
        extern __shared__ __align__(1024) u8 memory[];
        const int group = static_cast<int>(threadIdx.x) / 128;
        const Output output{memory + group * Output::kBytes, 1 + group};
        output.open();
        finish_tile(own, part, all, output);
        output.copy(out, stride, aligned != 0, part);
    }
}

// out = sums * scale + bias by TMA, as the router's logits are stored; `times` times in a row through the same memory,
// each 128 * gridDim.x rows below the previous one. kNoOpen and kNoClose plant wrong uses.
inline constexpr int kNoOpen = 1, kNoClose = 2;

template <typename T, int COUNT>
__global__ void __launch_bounds__(256)
    probe_epilogue_tma(const __grid_constant__ ptx::TensorMap out, const float* sums, const float* scale, const float* bias,
                       i64 rows, i64 columns, i64 times, i64 fault) {
    using Output = StagedOutput<T, 2 * COUNT>;
    extern __shared__ __align__(1024) u8 memory[];
    const int group = static_cast<int>(threadIdx.x) / 128;
    const Output output{memory + group * Output::kBytes, 1 + group};
    float own[COUNT];
    load_sums(sums, own);
    TilePart part = part_of(rows, columns);
    for (int i = 0; i < times; ++i) {
        if (fault != kNoOpen) output.open();
        finish_tile(own, part, steps(ColumnScale{scale}, Bias<float>{bias}), output);
        output.send(out, part);
        part.m += 128 * gridDim.x;
        part.rows -= static_cast<int>(128 * gridDim.x);
    }
    if (fault != kNoClose) output.close();
}

}  // namespace rtk
