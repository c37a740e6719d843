// Elements distinguished by width: fp32 (BYTES 4), or bf16, or fp16 if `half` (BYTES 2). One kernel serves both 16-bit
// types at the cost of a uniform branch; compiling each kernel for both would double the compile time.
#pragma once
#include "common/vec.cuh"

namespace rtk {

template <int BYTES>
struct stored {
    using type = float;
};
template <>
struct stored<2> {
    using type = bf16;
};

// N elements still packed, up to 32 bytes.
template <int BYTES, int N>
using Packed = RawParts<typename stored<BYTES>::type, N>;

// Data read once; `kLast`: L2 evicts it last (ptx::ld_stream).
template <int BYTES, int N, bool kLast = true>
RTK_DEVICE Packed<BYTES, N> load_packed(const u8* p) {
    Packed<BYTES, N> raw;
#pragma unroll
    for (int i = 0; i < raw.kParts; ++i)
        raw.part[i] = kLast ? ptx::ld_stream<raw.kBytes>(p + i * raw.kBytes) : ptx::ld_keep<raw.kBytes>(p + i * raw.kBytes);
    return raw;
}

template <int BYTES, int N>
RTK_DEVICE void widen(const Packed<BYTES, N>& raw, bool half, float (&v)[N]) {
    if constexpr (BYTES == 4) {
        unpack_parts<float, N>(raw, v);
    } else if (half) {
        unpack<fp16, N>(raw.part[0], v);
    } else {
        unpack<bf16, N>(raw.part[0], v);
    }
}

template <int BYTES, int N>
RTK_DEVICE void write(u8* p, bool half, const float (&v)[N]) {
    if constexpr (BYTES == 4) {
        store<float, N>(reinterpret_cast<float*>(p), v);
    } else {
        ptx::st<BYTES * N>(p, half ? pack<fp16, N>(v) : pack<bf16, N>(v));
    }
}

}  // namespace rtk
