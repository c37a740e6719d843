// Copies between two arrays of up to five dimensions with strides of their own:
//
//     out[i] = in[i],  or the sum of in[i + j * sum_stride] over j < sum_count, in fp32 and in order,
//     or table[in[i]] for bytes
//
// A thread owns VEC neighbouring elements of the last dimension, which is dense in both where VEC > 1. Sizes and strides are
// in units of VEC elements; divisors are those of runtime/layout.py. Grid: any.
#include "common/vec.cuh"

namespace rtk {

template <typename T, int VEC, bool TABLE>
__global__ void __launch_bounds__(256)
    strided_copy(const void* in, T* out, const T* table, i64 count, i64 divisor_1, i64 size_1, i64 divisor_2, i64 size_2,
                 i64 divisor_3, i64 size_3, i64 divisor_4, i64 size_4, i64 in_0, i64 in_1, i64 in_2, i64 in_3, i64 in_4,
                 i64 out_0, i64 out_1, i64 out_2, i64 out_3, i64 out_4, i64 sum_count, i64 sum_stride) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 number = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; number < count; number += step) {
        u32 left = static_cast<u32>(number), next = divided(left, divisor_4);
        i64 from = (left - next * static_cast<u32>(size_4)) * in_4, to = (left - next * static_cast<u32>(size_4)) * out_4;
        left = next, next = divided(left, divisor_3);
        from += (left - next * static_cast<u32>(size_3)) * in_3, to += (left - next * static_cast<u32>(size_3)) * out_3;
        left = next, next = divided(left, divisor_2);
        from += (left - next * static_cast<u32>(size_2)) * in_2, to += (left - next * static_cast<u32>(size_2)) * out_2;
        left = next, next = divided(left, divisor_1);
        from += (left - next * static_cast<u32>(size_1)) * in_1, to += (left - next * static_cast<u32>(size_1)) * out_1;
        from += next * in_0, to += next * out_0;
        if constexpr (TABLE) {
            out[to] = table[static_cast<const u8*>(in)[from]];
        } else {
            const T* const at = static_cast<const T*>(in) + from * VEC;
            Raw<sizeof(T) * VEC> raw = load_raw<T, VEC, false>(at);
            if (sum_count > 1) {
                float sum[VEC];
                unpack<T, VEC>(raw, sum);
                for (i64 j = 1; j < sum_count; ++j) {
                    float more[VEC];
                    load_keep<T, VEC>(at + j * sum_stride * VEC, more);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) sum[i] += more[i];
                }
                raw = pack<T, VEC>(sum);
            }
            ptx::st<sizeof(T) * VEC>(out + to * VEC, raw);
        }
    }
}

}  // namespace rtk
