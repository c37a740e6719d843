// Lists of tensors as kernels read them: a table of 64-bit words (built by rtkernels/ops/multi/multi_tables.py).
//
// One record per tensor: elements, kinds, index of its first chunk, then its address in each of the lists that are
// processed together. `kinds` has two bits per list (0 fp32, 1 bf16, 2 fp16) and the bit kAligned: every address is a
// multiple of 16. After the records: for each chunk, the tensor it belongs to. A chunk is 2^shift elements (the last
// one of a tensor: the remainder), at least 4096, so the chunks of an aligned tensor are aligned.
#pragma once
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kMultiThreads = 256;
inline constexpr int kMultiHeader = 3;
inline constexpr i64 kAligned = 1ll << 32;

struct Chunk {
    const i64* record;
    i64 kinds;
    i64 begin;  // first element in the tensor
    int count;  // elements

    RTK_DEVICE Chunk(const i64* table, i64 tensors, int lists, int shift, i64 index) {
        const i64 width = kMultiHeader + lists;
        record = table + table[tensors * width + index] * width;
        const i64 size = record[0];
        kinds = record[1];
        begin = (index - record[2]) << shift;
        const i64 left = size - begin, chunk_size = 1ll << shift;
        count = static_cast<int>(left < chunk_size ? left : chunk_size);
    }
    RTK_DEVICE int kind(int list) const { return static_cast<int>(kinds >> (2 * list)) & 3; }
    RTK_DEVICE bool aligned() const { return (kinds & kAligned) != 0; }
    template <typename T>
    RTK_DEVICE T* at(int list) const {
        return reinterpret_cast<T*>(record[kMultiHeader + list]) + begin;
    }
};

// Calls f(T()) with the type of a kind. The kind is the same for the whole block.
template <typename F>
RTK_DEVICE void with_type(int kind, F f) {
    if (kind == 0) {
        f(float());
    } else if (kind == 1) {
        f(bf16());
    } else {
        f(fp16());
    }
}

// N elements of T between memory and fp32; more than 16 bytes take several accesses.
template <typename T, int N>
RTK_DEVICE void load_parts(const T* p, float (&f)[N]) {
    constexpr int kEach = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
#pragma unroll
    for (int i = 0; i < N; i += kEach) {
        float part[kEach];
        unpack<T, kEach>(ptx::ld_stream<sizeof(T) * kEach>(p + i), part);
#pragma unroll
        for (int k = 0; k < kEach; ++k) f[i + k] = part[k];
    }
}

}  // namespace rtk
