// fp8 quantisation, and back, of tensors whose rows allow no 16-byte accesses, for every granularity and every type.
// Recipe: common/fp8_scale.cuh. The results have the same bits as those of the other kernels, because a scale depends
// only on a maximum.
//
// `type` is that of common/any_type.cuh; `large_range`: codes are e5m2, else e4m3.
#include "common/amax.cuh"
#include "common/any_type.cuh"
#include "common/reduce.cuh"
#include "common/row_slices.cuh"

namespace rtk {

RTK_DEVICE float scale_any(float amax, bool large_range, bool pow2) {
    return large_range ? fp8_scale<e5m2>(amax, pow2) : fp8_scale<e4m3>(amax, pow2);
}

RTK_DEVICE Raw<1> code_any(float value, bool large_range, float inverse) {
    const float v[1] = {value};
    return large_range ? quantized<e5m2>(v, inverse) : quantized<e4m3>(v, inverse);
}

// x is cut into `units` of unit_rows x unit_cols, `units_across` of them side by side, with one scale each. A group of
// threads (RowGroup) reads its unit twice: for the maximum, and for codes in q [rows, cols] and q_t [cols, rows], each
// if not null. `lanes` of its threads are adjacent in a row of the unit. The scale of unit (i, j) goes to scale[i *
// scale_row + j * scale_column].
//
// `amax_only`: the largest magnitude of the units of a block, which are its only groups, goes to scale[blockIdx.x]; no
// codes.
// `partials`: all units share the scale of the largest of so many such numbers; the first block stores it in *scale.
// `given`: all units use the scale in *scale.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    quantize_fp8_generic(const void* x, u8* q, float* scale, u8* q_t, const float* partial, i64 rows, i64 cols, i64 x_stride,
                         i64 unit_rows, i64 unit_cols, i64 units, i64 units_across, i64 scale_row, i64 scale_column,
                         i64 threads_per_unit, i64 lanes, i64 partials, i64 given, i64 amax_only, i64 type, i64 large_range,
                         i64 pow2) {
    __shared__ GroupScratch<1> scratch;
    const int kind = static_cast<int>(type);
    const bool e5 = large_range != 0;
    float own_scale = 0.0f, block_amax = 0.0f;
    int phase = 0;
    if (partials > 0) {
        float amax = 0.0f;
        for (i64 i = threadIdx.x; i < partials; i += blockDim.x) amax = fmaxf(amax, partial[i]);
        amax = group_reduce<MaxNumber, false>(amax, RowGroup(blockDim.x), scratch, 0);
        own_scale = scale_any(amax, e5, pow2 != 0);
        if (blockIdx.x == 0 && threadIdx.x == 0) *scale = own_scale;
    } else if (given) {
        own_scale = *scale;
    }
    const RowGroup group(threads_per_unit);
    const int across = static_cast<int>(lanes), lane = group.thread % across, line = group.thread / across;
    const int lines = group.threads / across;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < units;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        // A 64-bit division would need a stack. With more than 2^32 units there is only one column or one row of units.
        const i64 unit = base + group.index;
        const i64 down = units_across == 1     ? unit
                         : unit < units_across ? 0
                                               : static_cast<u32>(unit) / static_cast<u32>(units_across);
        const i64 aside = unit - down * units_across;
        const i64 first_row = down * unit_rows, first_column = aside * unit_cols;
        const i64 end_row = unit < units ? min(first_row + unit_rows, rows) : 0;
        const i64 end_column = min(first_column + unit_cols, cols);
        if (partials == 0 && !given) {
            float amax = 0.0f;
            for (i64 row = first_row + line; row < end_row; row += lines)
                for (i64 column = first_column + lane; column < end_column; column += across)
                    amax = max_finite(amax, load_any(x, kind, row * x_stride + column));
            if (amax_only) {
                block_amax = fmaxf(block_amax, amax);
                continue;
            }
            amax = group_reduce<MaxNumber, false>(amax, group, scratch, phase);
            own_scale = scale_any(amax, e5, pow2 != 0);
            if (unit < units && group.thread == 0) scale[down * scale_row + aside * scale_column] = own_scale;
        }
        const float inverse = __frcp_rn(own_scale);
        for (i64 row = first_row + line; row < end_row; row += lines) {
            for (i64 column = first_column + lane; column < end_column; column += across) {
                const Raw<1> code = code_any(load_any(x, kind, row * x_stride + column), e5, inverse);
                if (q != nullptr) ptx::st<1>(q + row * cols + column, code);
                if (q_t != nullptr) ptx::st<1>(q_t + column * rows + row, code);
            }
        }
    }
    if (amax_only) {
        block_amax = group_reduce<MaxNumber, false>(block_amax, group, scratch, 0);
        if (threadIdx.x == 0) scale[blockIdx.x] = block_amax;
    }
}

// Dequantises codes q with a row stride, as dequantize_fp8.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    dequantize_fp8_generic(const u8* q, const float* scale, void* y, i64 rows, i64 cols, i64 q_stride, i64 threads_per_row,
                           i64 slices_per_row, i64 row_shift, i64 scale_row, i64 scale_column, i64 type, i64 large_range) {
    const RowSlices<1> slices(rows, cols, threads_per_row, slices_per_row);
    for (i64 run = slices.first; run < slices.count; run += slices.step) {
        const i64 row = slices.row(run);
        const float* row_scale = scale + (row >> row_shift) * scale_row;
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            const i64 column = slices.column(run, row, i);
            if (column >= cols) break;
            const Raw<1> code = ptx::ld_keep<1>(q + row * q_stride + column);
            float v[1], factor[1];
            if (large_range) {
                unpack<e5m2, 1>(code, v);
            } else {
                unpack<e4m3, 1>(code, v);
            }
            load_keep<float, 1>(row_scale + (column >> 7) * scale_column, factor);
            store_any(y, static_cast<int>(type), row * cols + column, v[0] * factor[0]);
        }
    }
}

}  // namespace rtk
