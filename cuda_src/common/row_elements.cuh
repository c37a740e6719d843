// N consecutive elements of a row between memory and fp32 registers, in the widest accesses that the row allows: 16
// bytes (`aligned16`: address, row stride and row length are multiples of 16 bytes), else one element at a time.
// Elements from `valid` on do not exist: they read as zeros, and are not stored.
#pragma once
#include "common/amax.cuh"
#include "common/vec.cuh"
#include "ptx/forget.cuh"

namespace rtk {

template <typename T, int N>
RTK_DEVICE void load_elements(const T* p, int valid, bool aligned16, float (&v)[N]) {
    constexpr int kEach = 16 / sizeof(T) < N ? 16 / sizeof(T) : N;
    if (aligned16) {
#pragma unroll
        for (int part = 0; part < N; part += kEach) {
            Raw<sizeof(T) * kEach> raw;
            clear(raw);
            if (part < valid) raw = load_raw<T, kEach, false>(p + part);
            float f[kEach];
            unpack<T, kEach>(raw, f);
#pragma unroll
            for (int i = 0; i < kEach; ++i) v[part + i] = f[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float f[1] = {0.0f};
        if (i < valid) load_keep<T, 1>(p + i, f);
        v[i] = f[0];
    }
}

template <typename T, int N>
RTK_DEVICE void store_elements(T* p, int valid, bool aligned16, const float (&v)[N]) {
    constexpr int kEach = 16 / sizeof(T) < N ? 16 / sizeof(T) : N;
    if (aligned16) {
#pragma unroll
        for (int part = 0; part < N; part += kEach) {
            if (part >= valid) break;
            float f[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) f[i] = v[part + i];
            store<T, kEach>(p + part, f);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float f[1] = {v[i]};
        if (i < valid) store<T, 1>(p + i, f);
    }
}

// N elements of T in 16-byte accesses, loaded first and unpacked where they are needed: loads of all operands are in
// flight before the first of them has arrived. Missing elements are zeros. No branch around a load: where two paths
// join, the compiler copies the loaded values and waits for them.
template <typename T, int N>
struct Asked {
    static constexpr int kEach = 16 / sizeof(T), kLoads = N / kEach;
    Raw<16> raw[kLoads];

    RTK_DEVICE void ask(bool exists, const T* p, int valid, u64 policy) {
        clear_all();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) ptx::ld_stream_16_if(exists && i * kEach < valid, raw[i], p + i * kEach, policy);
    }
    RTK_DEVICE void clear_all() {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) clear(raw[i]);
    }
    // All N, or none: then the previous contents stay.
    RTK_DEVICE void ask_whole(bool exists, const T* p, u64 policy) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) ptx::ld_stream_16_if(exists, raw[i], p + i * kEach, policy);
    }
    RTK_DEVICE void get(float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            float part[kEach];
            unpack<T, kEach>(raw[i], part);
#pragma unroll
            for (int k = 0; k < kEach; ++k) v[i * kEach + k] = part[k];
        }
    }
    // The largest finite magnitude, 0 if there is none.
    RTK_DEVICE float amax() const {
        u32 largest = 0u;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) largest = with_larger<T>(largest, raw[i]);
        return WordMax<T>::largest(largest);
    }
    // From here on, they are unpacked again where they are used, so that unpacked values take no registers in between.
    RTK_DEVICE void forget() {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) ptx::forget(raw[i]);
    }
    // Rounds the values of v to T.
    RTK_DEVICE void round(const float (&v)[N]) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            float part[kEach];
#pragma unroll
            for (int k = 0; k < kEach; ++k) part[k] = v[i * kEach + k];
            raw[i] = pack<T, kEach>(part);
        }
    }
    RTK_DEVICE void store(T* p, int valid) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            if (i * kEach < valid) ptx::st<16>(p + i * kEach, raw[i]);
    }
};

// An operand of T, or of fp32 if `fp32`.
template <typename T, int N>
RTK_DEVICE void load_either(const void* p, i64 at, bool fp32, int valid, bool aligned16, float (&v)[N]) {
    if (sizeof(T) < 4 && fp32) {
        load_elements<float, N>(static_cast<const float*>(p) + at, valid, aligned16, v);
    } else {
        load_elements<T, N>(static_cast<const T*>(p) + at, valid, aligned16, v);
    }
}

template <typename T, int N>
RTK_DEVICE void store_either(void* p, i64 at, bool fp32, int valid, bool aligned16, const float (&v)[N]) {
    if (sizeof(T) < 4 && fp32) {
        store_elements<float, N>(static_cast<float*>(p) + at, valid, aligned16, v);
    } else {
        store_elements<T, N>(static_cast<T*>(p) + at, valid, aligned16, v);
    }
}

}  // namespace rtk
