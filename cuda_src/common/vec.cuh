// N consecutive elements of T between global memory and fp32 registers in one access. Pointers must be aligned to
// N * sizeof(T), at most 16 bytes; the host picks N from pointer, size and stride.
#pragma once
#include "common/convert.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

// Data read once; `kLast`: L2 evicts it last (ptx::ld_stream).
template <typename T, int N, bool kLast = true>
RTK_DEVICE Raw<sizeof(T) * N> load_raw(const T* p) {
    return kLast ? ptx::ld_stream<sizeof(T) * N>(p) : ptx::ld_keep<sizeof(T) * N>(p);
}

// The same with an L2 policy (ptx::l2_policy), which narrow accesses do not have.
template <typename T, int N>
RTK_DEVICE Raw<sizeof(T) * N> load_raw(const T* p, u64 policy) {
    if constexpr (sizeof(T) * N == 16) {
        return ptx::ld_stream_16(p, policy);
    } else {
        return load_raw<T, N>(p);
    }
}

template <typename T, int N>
RTK_DEVICE void load_stream(const T* p, float (&f)[N]) {
    unpack<T, N>(ptx::ld_stream<sizeof(T) * N>(p), f);
}

// Data read again soon, by this or other blocks. Wider than 16 bytes is split.
template <typename T, int N>
RTK_DEVICE void load_keep(const T* p, float (&f)[N]) {
    if constexpr (sizeof(T) * N > 16) {
        constexpr int kHalf = N / 2;
        float lo[kHalf], hi[kHalf];
        load_keep<T, kHalf>(p, lo);
        load_keep<T, kHalf>(p + kHalf, hi);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) f[i] = lo[i], f[i + kHalf] = hi[i];
    } else {
        unpack<T, N>(ptx::ld_keep<sizeof(T) * N>(p), f);
    }
}

// Zeros for elements that do not exist. Not `= {}`: the compiler would read those zeros from a table in global memory.
template <int B>
RTK_DEVICE void clear(Raw<B>& raw) {
#pragma unroll
    for (u32& word : raw.w) word = 0;
}

// load_keep, still packed; up to 32 bytes, for a wide weight next to a narrow input.
template <typename T, int N>
struct RawParts {
    static constexpr int kParts = sizeof(T) * N > 16 ? 2 : 1;
    static constexpr int kBytes = sizeof(T) * N / kParts;
    Raw<kBytes> part[kParts];
};

template <typename T, int N>
RTK_DEVICE void clear(RawParts<T, N>& raw) {
#pragma unroll
    for (auto& part : raw.part) clear(part);
}

template <typename T, int N>
RTK_DEVICE RawParts<T, N> load_keep_raw(const T* p) {
    RawParts<T, N> raw;
#pragma unroll
    for (int i = 0; i < raw.kParts; ++i) raw.part[i] = ptx::ld_keep<raw.kBytes>(p + i * (N / raw.kParts));
    return raw;
}

template <typename T, int N>
RTK_DEVICE void unpack_parts(const RawParts<T, N>& raw, float (&f)[N]) {
    constexpr int kEach = N / RawParts<T, N>::kParts;
#pragma unroll
    for (int p = 0; p < raw.kParts; ++p) {
        float part[kEach];
        unpack<T, kEach>(raw.part[p], part);
#pragma unroll
        for (int i = 0; i < kEach; ++i) f[p * kEach + i] = part[i];
    }
}

template <typename T, int N>
RTK_DEVICE void store(T* p, const float (&f)[N]) {
    if constexpr (sizeof(T) * N > 16) {
        constexpr int kHalf = N / 2;
        float lo[kHalf], hi[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) lo[i] = f[i], hi[i] = f[i + kHalf];
        store<T, kHalf>(p, lo);
        store<T, kHalf>(p + kHalf, hi);
    } else {
        ptx::st<sizeof(T) * N>(p, pack<T, N>(f));
    }
}

}  // namespace rtk
