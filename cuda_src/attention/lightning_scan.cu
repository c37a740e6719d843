// Linear attention with a decay per head ("lightning"), chunk by chunk: one scan that serves the forward and all
// gradients. With f = exp(-decay[head]) and rows in the order of the scan (from the last one if `reverse`),
//   out[i] = scale * (sum over j <= i of f^(i - j) (left[i] . right[j]) value[j]  +  f^(i + 1 - lead) left[i] S)
//   S'     = f^(n - lead) S + sum over j of f^(n - 1 - j) right[j] value[j]^T
// for the n rows of a sequence and the state S [d_k, d_v] before them; `lead` is 1 where the row before the sequence
// already decayed S (gradients), else 0. Forward: left q, right k, value v. dq: dout, v, k. dk, reversed: v, dout, q.
// dv, reversed: k, q, dout.
//
// A block owns one sequence, one head and 64 columns of value; it loops over chunks of 64 rows with the state in fp32
// registers. Each of four warps owns 16 rows of the products within a chunk and a quarter of the state's rows. Tiles of
// the chunk have two stages. The state is multiplied by left as T, from shared memory. Its range exceeds fp16, so for
// fp16 it is divided by a power of two that brings its largest finite element to 2^14 or more; products within a chunk
// are multiplied by `scale` before they are rounded. Powers of f never exceed 1. Products within a chunk and decayed
// rows of right are rounded to T, sums are fp32, out is rounded once; there are no atomics.
//
// Where sequences and heads are too few to fill the GPU, a sequence is split into segments of whole chunks, consecutive
// in the order of the scan: a first launch without `out` computes the state that each segment adds, lightning_prefix
// turns these into the states before the segments, and a second launch starts from them.
//
// Grid: tiles of 64 columns of value, heads, segments of sequences.
#include "attention/grads.cuh"
#include "attention/lightning_segment.cuh"
#include "attention/masks.cuh"
#include "attention/mma_tile.cuh"
#include "common/fp8_scale.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kScanColumns = 64;
inline constexpr int kScanThreads = 128;

// The power of two that brings a finite magnitude to 2^14 or more, below 2^15; smaller for magnitudes below 2^-100.
RTK_DEVICE float to_fp16_range(float magnitude) {
    return __uint_as_float((268u - max(__float_as_uint(magnitude) >> 23, 27u)) << 23);
}

template <typename T, int DK>
__global__ void __launch_bounds__(kScanThreads, 2)
    lightning_scan(const T* left, const T* right, const T* value, const float* decay, const float* initial, float* final,
                   const i32* cu, T* out, i64 segments, i64 heads, i64 length, i64 d_k, i64 d_v, i64 left_batch, i64 left_row,
                   i64 left_head, i64 right_batch, i64 right_row, i64 right_head, i64 value_batch, i64 value_row,
                   i64 value_head, i64 out_batch, i64 out_row, i64 out_head, i64 state_row, i64 state_column, i64 lead,
                   i64 reverse, double scale, double initial_factor, double final_factor) {
    using KTile = MmaTile<DK>;
    using VTile = MmaTile<kScanColumns>;
    constexpr int kStateBlocks = DK / 64, kTiles = kScanColumns / 8, kSteps = kScanRows / 16;
    constexpr u32 kKBytes = kScanRows * KTile::kPitch, kVBytes = kScanRows * VTile::kPitch;
    constexpr u32 kStageBytes = 2 * kKBytes + kVBytes;
    extern __shared__ __align__(128) u8 shared[];
    u8* const state_tile = shared + 2 * kStageBytes;

    const int column0 = static_cast<int>(blockIdx.x) * kScanColumns, head = static_cast<int>(blockIdx.y);
    const int batch = static_cast<int>(blockIdx.z / static_cast<u32>(segments));
    const int segment = static_cast<int>(blockIdx.z) - batch * static_cast<int>(segments);
    const Sequence sequence = sequence_at(batch, length, 0, cu, nullptr, nullptr);
    const Segment own(segment, segments, sequence.lq);
    const int rows = own.rows, chunks = (rows + kScanRows - 1) / kScanRows;
    const bool writes = out != nullptr;
    {
        const i64 first = sequence.q_row + (reverse ? sequence.lq - 1 - own.first : own.first);
        left += batch * left_batch + first * left_row + head * left_head;
        right += batch * right_batch + first * right_row + head * right_head;
        value += batch * value_batch + first * value_row + head * value_head + column0;
        out += batch * out_batch + first * out_row + head * out_head + column0;
        if (reverse) left_row = -left_row, right_row = -right_row, value_row = -value_row, out_row = -out_row;
    }
    const int k_vectors = static_cast<int>(d_k) / 8, v_columns = static_cast<int>(d_v) - column0;
    auto fetch = [&](int chunk) {
        const i64 i0 = static_cast<i64>(chunk) * kScanRows;
        const int here = rows - chunk * kScanRows;
        u8* const to = shared + (chunk & 1) * kStageBytes;
        if (writes) KTile::template fetch<kScanRows, kScanThreads>(to, left + i0 * left_row, left_row, here, k_vectors);
        KTile::template fetch<kScanRows, kScanThreads>(to + kKBytes, right + i0 * right_row, right_row, here, k_vectors);
        VTile::template fetch<kScanRows, kScanThreads>(to + 2 * kKBytes, value + i0 * value_row, value_row, here, v_columns / 8);
        ptx::cp_async_commit();
    };
    if (chunks > 0) fetch(0);

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int own_row = 16 * warp, state_row0 = 16 * kStateBlocks * warp;
    const float rate = decay[head] * kLog2e;
    const i64 state_base = (static_cast<i64>(blockIdx.z) * heads + head) * d_k * d_v;
    float state[kStateBlocks][kTiles][4];
    auto state_at = [&](int m, int n, int e) {  // -1: there is no such element
        const int row = state_row0 + 16 * m + lane / 4 + 8 * (e / 2), column = 8 * n + lane % 4 * 2 + e % 2;
        return row < d_k && column < v_columns ? state_base + row * state_row + (column0 + column) * state_column : i64{-1};
    };
#pragma unroll
    for (int m = 0; m < kStateBlocks; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const i64 at = initial == nullptr ? -1 : state_at(m, n, e);
                state[m][n][e] = at < 0 ? 0.0f : initial[at] * static_cast<float>(initial_factor);
            }
    constexpr bool kScaled = !is_same<T, bf16>::value;
    float* const peaks = reinterpret_cast<float*>(state_tile + DK * VTile::kPitch);  // one per warp
    float restore = 1.0f;  // divisor of the state in shared memory
    auto find_peak = [&] {  // to be followed by a barrier and show_state
        if constexpr (kScaled) {
            float peak = 0.0f;
#pragma unroll
            for (int m = 0; m < kStateBlocks; ++m)
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) peak = max_finite(peak, state[m][n][e]);
            peak = warp_reduce<MaxNumber>(peak);
            if (lane == 0) peaks[warp] = peak;
        }
    };
    auto show_state = [&] {  // to all warps, as a right operand
        float factor = 1.0f;
        if constexpr (kScaled) {
            factor = to_fp16_range(fmaxf(fmaxf(peaks[0], peaks[1]), fmaxf(peaks[2], peaks[3])));
            restore = __uint_as_float(0x7f000000u - __float_as_uint(factor));
        }
#pragma unroll
        for (int m = 0; m < kStateBlocks; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = state_row0 + 16 * m + lane / 4 + 8 * r;
                    *reinterpret_cast<u32*>(state_tile + VTile::offset(row, n) + lane % 4 * 4) =
                        kScaled ? packed_pair<T>(state[m][n][2 * r] * factor, state[m][n][2 * r + 1] * factor)
                                : packed_pair<T>(state[m][n][2 * r], state[m][n][2 * r + 1]);
                }
    };
    find_peak();
    if constexpr (kScaled) __syncthreads();
    show_state();

    int pending = segment == 0 ? static_cast<int>(lead) : 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch(chunk + 1);
        const u8* const left_tile = shared + (chunk & 1) * kStageBytes;
        const u8* const right_tile = left_tile + kKBytes;
        const u8* const value_tile = right_tile + kKBytes;
        const int here = min(rows - chunk * kScanRows, kScanRows);

        if (writes) {
            // Contribution of the state before the chunk.
            float o[kTiles][4];
            clear_sums(o);
#pragma unroll 2
            for (int step = 0; step < DK / 16; ++step) {
                u32 a[4];
                KTile::left(a, left_tile, own_row, step, lane);
#pragma unroll
                for (int n = 0; n < kTiles / 2; ++n) {
                    u32 b[4];
                    VTile::right_transposed(b, state_tile, 16 * step, n, lane);
                    mma_step<T>(o[2 * n], a, b[0], b[1]);
                    mma_step<T>(o[2 * n + 1], a, b[2], b[3]);
                }
            }
            const float factor_before = kScaled ? static_cast<float>(scale) : 1.0f;
            const float factor_after = kScaled ? 1.0f : static_cast<float>(scale);
            float since[2] = {ptx::ex2(-rate * static_cast<float>(own_row + lane / 4 + 1 - pending)),
                              ptx::ex2(-rate * static_cast<float>(own_row + lane / 4 + 9 - pending))};
            if constexpr (kScaled) since[0] *= factor_before * restore, since[1] *= factor_before * restore;
            scale_rows(o, since);

            // Contribution of the chunk itself: 16 rows of right at a time, up to the rows of this warp.
#pragma unroll 1
            for (int step = 0; step <= warp; ++step) {
                float s[2][4];
                clear_sums(s);
                rows_by_rows<T, KTile, DK / 16>(s, left_tile, own_row, right_tile, 16 * step, lane);
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int apart = own_row + lane / 4 + e / 2 * 8 - (16 * step + 8 * n + lane % 4 * 2 + e % 2);
                        s[n][e] = apart < 0 ? 0.0f : s[n][e] * ptx::ex2(-rate * static_cast<float>(apart));
                        if constexpr (kScaled) s[n][e] *= factor_before;
                    }
                u32 a[4];
                as_left<T>(a, s[0], s[1]);
                by_columns<T, VTile>(o, a, value_tile, 16 * step, lane);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own_row + lane / 4 + 8 * r;
                if (i >= here) continue;
                T* const to = out + (static_cast<i64>(chunk) * kScanRows + i) * out_row;
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const int column = 8 * n + lane % 4 * 2;
                    const float pair[2] = {o[n][2 * r] * factor_after, o[n][2 * r + 1] * factor_after};
                    if (column < v_columns) store<T, 2>(to + column, pair);
                }
            }
        }

        // The state after the chunk.
        const float by = ptx::ex2(-rate * static_cast<float>(here - pending)), both[2] = {by, by};
        pending = 0;
#pragma unroll
        for (int m = 0; m < kStateBlocks; ++m) scale_rows(state[m], both);
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
            float weight[2][2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    weight[h][c] =
                        ptx::ex2(-rate * static_cast<float>(max(here - 1 - (16 * step + 8 * h + lane % 4 * 2 + c), 0)));
#pragma unroll
            for (int m = 0; m < kStateBlocks; ++m) {
                u32 a[4];
                KTile::left_transposed(a, right_tile, 16 * step, state_row0 / 16 + m, lane);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float f[2];
                    unpack<T, 2>(Raw<4>{{a[i]}}, f);
                    a[i] = packed_pair<T>(f[0] * weight[i / 2][0], f[1] * weight[i / 2][1]);
                }
                by_columns<T, VTile>(state[m], a, value_tile, 16 * step, lane);
            }
        }
        if (writes) find_peak();
        __syncthreads();  // all warps have used the state before the chunk
        if (writes) show_state();
    }

    if (final == nullptr) return;
    // Gradients decay the state by one more step (`lead` of the next scan), unless there were no rows and S is
    // unchanged.
    const float times =
        static_cast<float>(final_factor) * ptx::ex2(-rate * static_cast<float>(static_cast<int>(lead) - pending));
#pragma unroll
    for (int m = 0; m < kStateBlocks; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const i64 at = state_at(m, n, e);
                if (at >= 0) final[at] = state[m][n][e] * times;
            }
}

// Turns the states that segments add, [sequences][segments][heads][elements], into the states before the segments, in
// place, and writes the state after all of them if `final` is not null. `initial`, `lead` and factors are those of the
// scan. Four elements per thread.
// Grid: elements, heads, sequences.
template <typename T>
__global__ void __launch_bounds__(256)
    lightning_prefix(T* states, const float* initial, float* final, const float* decay, const i32* cu, i64 segments, i64 heads,
                     i64 length, i64 elements, i64 lead, double initial_factor, double final_factor) {
    const i64 element = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 4, head = blockIdx.y, batch = blockIdx.z;
    if (element >= elements) return;
    const int rows = sequence_at(static_cast<int>(batch), length, 0, cu, nullptr, nullptr).lq;
    const float rate = decay[head] * kLog2e;
    const i64 outside = (batch * heads + head) * elements + element;
    float state[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (initial != nullptr) load_keep<float, 4>(initial + outside, state);
#pragma unroll
    for (float& x : state) x *= static_cast<float>(initial_factor);
    int pending = static_cast<int>(lead);
#pragma unroll 4
    for (int segment = 0; segment < static_cast<int>(segments); ++segment) {
        T* const at = states + ((batch * segments + segment) * heads + head) * elements + element;
        float added[4];
        load_keep<T, 4>(at, added);
        store<T, 4>(at, state);
        const int here = Segment(segment, segments, rows).rows;
        if (here == 0) continue;
        const float by = ptx::ex2(-rate * static_cast<float>(here - pending));
#pragma unroll
        for (int c = 0; c < 4; ++c) state[c] = by * state[c] + added[c];
        pending = 0;
    }
    if (final == nullptr) return;
    const float times = static_cast<float>(final_factor) * ptx::ex2(-rate * static_cast<float>(static_cast<int>(lead) - pending));
#pragma unroll
    for (float& x : state) x *= times;
    store<float, 4>(final + outside, state);
}

// One token per sequence: S = f S + k v^T in place, out = scale * q S. A block owns 128 columns of the state of a
// sequence and head, four neighbours per lane; its warps take rows round-robin, and their sums are added in order.
// Grid: tiles of 128 columns, heads, sequences.
template <typename T>
__global__ void __launch_bounds__(256)
    lightning_step(const T* q, const T* k, const T* v, const float* decay, float* state, T* out, i64 heads, i64 d_k, i64 d_v,
                   i64 q_batch, i64 q_head, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head, double scale) {
    constexpr int kColumns = 128, kWarps = 8;
    __shared__ __align__(16) float sums[kWarps][kColumns];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 head = blockIdx.y, batch = blockIdx.z, column = static_cast<i64>(blockIdx.x) * kColumns + 4 * lane;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (column < d_v) {
        const float f = ptx::ex2(-decay[head] * kLog2e);
        float values[4];
        load_keep<T, 4>(v + batch * v_batch + head * v_head + column, values);
        const T* const queries = q + batch * q_batch + head * q_head;
        const T* const keys = k + batch * k_batch + head * k_head;
        float* const own = state + (batch * heads + head) * d_k * d_v + column;
#pragma unroll 4
        for (int row = warp; row < static_cast<int>(d_k); row += kWarps) {
            float s[4], query[1], key[1];
            load_stream<float, 4>(own + row * d_v, s);
            load_keep<T, 1>(queries + row, query);
            load_keep<T, 1>(keys + row, key);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                s[c] = f * s[c] + key[0] * values[c];
                sum[c] += query[0] * s[c];
            }
            store<float, 4>(own + row * d_v, s);
        }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[warp][4 * lane + c] = sum[c];
    __syncthreads();
    if (warp != 0 || column >= d_v) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        sum[c] = sums[0][4 * lane + c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sum[c] += sums[w][4 * lane + c];
        sum[c] *= static_cast<float>(scale);
    }
    store<T, 4>(out + (batch * heads + head) * d_v + column, sum);
}

}  // namespace rtk
