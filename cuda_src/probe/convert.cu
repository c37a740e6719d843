// The conversions of common/convert.cuh on arrays, for exhaustive tests.
#include "common/vec.cuh"

namespace rtk {

// fp32 to T and back, the way every kernel does it: four at a time, the rest singly.
template <typename T>
__global__ void __launch_bounds__(256) probe_narrow(const float* x, T* y, i64 n) {
    const i64 i = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n) {
        float v[4];
        load_stream<float, 4>(x + i, v);
        store<T, 4>(y + i, v);
    } else {
        for (i64 k = i; k < n; ++k) {
            float v[1];
            load_stream<float, 1>(x + k, v);
            store<T, 1>(y + k, v);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(256) probe_widen(const T* x, float* y, i64 n) {
    const i64 i = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n) {
        float v[4];
        load_stream<T, 4>(x + i, v);
        store<float, 4>(y + i, v);
    } else {
        for (i64 k = i; k < n; ++k) {
            float v[1];
            load_stream<T, 1>(x + k, v);
            store<float, 1>(y + k, v);
        }
    }
}

// The integer versions that targets without the instructions use, on any target.
template <typename F8>
__global__ void __launch_bounds__(256) probe_encode(const float* x, F8* y, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i].bits = static_cast<u8>(is_same<F8, e4m3>::value ? encode_e4m3(x[i]) : encode_e5m2(x[i]));
}

template <typename F8>
__global__ void __launch_bounds__(256) probe_decode(const F8* x, float* y, i64 n) {
    static_assert(is_same<F8, e4m3>::value, "e5m2 is decoded as fp16 on every target");
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] = decode_e4m3(x[i].bits);
}

}  // namespace rtk
