// Sum of squares, sum of magnitudes, largest magnitude, or number of zeros of every tensor of a list and of all
// together.
//
// multi_reduce: one block per chunk writes one fp64 partial. Elements are converted to fp64 before they are squared
// and added, so nothing overflows or is lost; maxima are taken on bits, which keeps NaN. multi_finish adds the
// partials: block 0 all of them, the others those of 32 tensors each. Every order is fixed by indices.
#include "multi/list.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

enum : int { kSquares = 0, kMagnitudes = 1, kLargest = 2, kZeros = 3 };

inline constexpr int kFinishThreads = 1024;

// A thread's partial result. Two sums, so that consecutive additions do not wait for each other.
template <int kKind>
struct Seen {
    double sum[2] = {0.0, 0.0};
    RTK_DEVICE void add(float v, int slot) {
        const double value64 = static_cast<double>(v);
        if constexpr (kKind == kSquares) {
            sum[slot] = fma(value64, value64, sum[slot]);
        } else {
            sum[slot] += fabs(value64);
        }
    }
    RTK_DEVICE double value() const { return sum[0] + sum[1]; }
};
template <>
struct Seen<kLargest> {
    u32 bits = 0;  // of a magnitude; NaN is above infinity
    RTK_DEVICE void add(float v, int) {
        const u32 magnitude = __float_as_uint(v) & 0x7fffffffu;
        bits = magnitude > bits ? magnitude : bits;
    }
    RTK_DEVICE double value() const { return static_cast<double>(__uint_as_float(bits)); }
};
template <>
struct Seen<kZeros> {
    int count = 0;
    RTK_DEVICE void add(float v, int) { count += v == 0.0f; }
    RTK_DEVICE double value() const { return static_cast<double>(count); }
};

template <int kKind>
RTK_DEVICE double combine(double a, double b) {
    if constexpr (kKind == kLargest) return (a > b || a != a) ? a : b;
    return a + b;
}

template <int kKind>
RTK_DEVICE double warp_combine(double v) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        v = combine<kKind>(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// The whole block calls this; thread 0 gets the result. A barrier must separate two calls with the same scratch.
template <int kKind, int kWarps>
RTK_DEVICE double block_combine(double v, double* scratch) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    v = warp_combine<kKind>(v);
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    if (warp != 0) return 0.0;
    return warp_combine<kKind>(lane < kWarps ? scratch[lane] : 0.0);
}

template <typename T, int kKind, int N>
RTK_DEVICE void add_raw(Seen<kKind>& seen, const Raw<sizeof(T) * N>& raw) {
    float value[N];
    unpack<T, N>(raw, value);
#pragma unroll
    for (int k = 0; k < N; ++k) seen.add(value[k], k & 1);
}

template <typename T, int kKind>
RTK_DEVICE void scan(const T* p, int count, Seen<kKind>& seen) {
    constexpr int kSize = static_cast<int>(sizeof(T)), kN = 16 / kSize, kInFlight = 4;
    const int me = static_cast<int>(threadIdx.x);
    int head = static_cast<int>((16 - (reinterpret_cast<u64>(p) & 15)) & 15) / kSize;  // up to the first whole vector
    head = head < count ? head : count;
    if (me < head) add_raw<T, kKind, 1>(seen, load_raw<T, 1>(p + me));
    p += head;
    count -= head;
    const int vectors = count / kN;
    int i = me;
#pragma unroll 1
    for (; i + (kInFlight - 1) * kMultiThreads < vectors; i += kInFlight * kMultiThreads) {
        Raw<16> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) raw[k] = load_raw<T, kN>(p + (i + k * kMultiThreads) * kN);
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) add_raw<T, kKind, kN>(seen, raw[k]);
    }
#pragma unroll 1
    for (; i < vectors; i += kMultiThreads) add_raw<T, kKind, kN>(seen, load_raw<T, kN>(p + i * kN));
    const int tail = vectors * kN + me;
    if (tail < count) add_raw<T, kKind, 1>(seen, load_raw<T, 1>(p + tail));
}

template <int kKind>
__global__ void __launch_bounds__(kMultiThreads)
    multi_reduce(const i64* table, double* partial, i64 tensors, i64 shift) {
    __shared__ double scratch[kMultiThreads / kWarp];
    ptx::launch_dependents();
    const Chunk chunk(table, tensors, 1, static_cast<int>(shift), blockIdx.x);
    Seen<kKind> seen;
    with_type(chunk.kind(0), [&](auto type) { scan(chunk.at<const decltype(type)>(0), chunk.count, seen); });
    const double result = block_combine<kKind, kMultiThreads / kWarp>(seen.value(), scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = result;
}

template <int kKind>
RTK_DEVICE double strided(const double* partial, i64 first, i64 last, int step) {
    double total = 0.0;
#pragma unroll 8
    for (i64 i = first; i < last; i += step) total = combine<kKind>(total, partial[i]);
    return total;
}

// raw: fp64 as it is; else the norm in fp32, or the count in int64.
template <int kKind>
RTK_DEVICE void write_result(void* out, i64 index, double value, bool raw) {
    if constexpr (kKind == kZeros) {
        static_cast<i64*>(out)[index] = static_cast<i64>(value);
    } else if (raw) {
        static_cast<double*>(out)[index] = value;
    } else {
        static_cast<float*>(out)[index] = static_cast<float>(kKind == kSquares ? sqrt(value) : value);
    }
}

template <int kKind>
__global__ void __launch_bounds__(kFinishThreads)
    multi_finish(const i64* table, const double* partial, void* out, i64 tensors, i64 shift, i64 chunks, i64 raw) {
    constexpr int kWarps = kFinishThreads / kWarp;
    constexpr i64 kMany = 8 * kWarp;  // from this many chunks on, the whole block works on a tensor
    __shared__ double scratch[kWarps];
    const int me = static_cast<int>(threadIdx.x);
    ptx::wait_for_previous();
    if (blockIdx.x == 0) {
        const double total = block_combine<kKind, kWarps>(strided<kKind>(partial, me, chunks, kFinishThreads), scratch);
        if (me == 0) write_result<kKind>(out, 0, total, raw != 0);
        return;
    }
    const i64 base = static_cast<i64>(blockIdx.x - 1) * kWarps;
    const int here = static_cast<int>(tensors - base < kWarps ? tensors - base : kWarps);
    const i64 chunk_mask = (1ll << shift) - 1;
    const int lane = me % kWarp, warp = me / kWarp;
    constexpr int kWidth = kMultiHeader + 1;
    if (warp < here) {
        const i64* record = table + (base + warp) * kWidth;
        const i64 count = (record[0] + chunk_mask) >> shift, first = record[2];
        if (count < kMany) {
            const double sum = warp_combine<kKind>(strided<kKind>(partial, first + lane, first + count, kWarp));
            if (lane == 0) write_result<kKind>(out, 1 + base + warp, sum, raw != 0);
        }
    }
    for (int t = 0; t < here; ++t) {
        const i64* record = table + (base + t) * kWidth;
        const i64 count = (record[0] + chunk_mask) >> shift, first = record[2];
        if (count < kMany) continue;
        const double sum = block_combine<kKind, kWarps>(
            strided<kKind>(partial, first + me, first + count, kFinishThreads), scratch);
        if (me == 0) write_result<kKind>(out, 1 + base + t, sum, raw != 0);
        __syncthreads();
    }
}

}  // namespace rtk
