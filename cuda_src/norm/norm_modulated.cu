// The normalisations of inference, in one launch and a fixed order of steps:
//
//     h = residual + gate * (x + bias)                    rounded to T, and stored
//     n = h * rstd, or (h - mean) * rstd                  statistics of the rounded h
//     y = ((n * (offset + weight) + norm_bias) * (1 + scale) + shift) * channel_scale
//
// and y is stored as T, as 8-bit codes or as NVFP4 (common/row_output.cuh), and as T on top if `kept`. What is optional is a
// null pointer. gate, scale and shift have a row for each, or for several neighbouring rows of x, or one for all. fp32
// arithmetic, one rounding at each store.
//
// A RowGroup owns a row, thread i of it the columns [i * N, i * N + N) of each stretch of threads * N. The rounded row stays in
// shared memory between the passes (`kInShared`), where each thread finds what it has put there; a longer row is made once
// more from the inputs, or read from residual_out. A row of one stretch whose operands are all of T stays in registers, and
// everything it needs is asked for at the start: what is loaded behind the statistics costs a second wait for memory. Grid: rows / groups of a block. In-place results are safe: a thread has
// read what it overwrites.
#include "common/row_output.cuh"
#include "norm/common.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"

namespace rtk {

// Flags.
inline constexpr i64 kCentred = 2, kInShared = 4, kWeightFp32 = 8, kNormBiasFp32 = 16, kBiasFp32 = 32,
                     kGateFp32 = 64, kScaleFp32 = 128, kShiftFp32 = 256, kChannelFp32 = 512;
inline constexpr i64 kAnyFp32 = kWeightFp32 | kNormBiasFp32 | kBiasFp32 | kGateFp32 | kScaleFp32 | kShiftFp32 | kChannelFp32;

// One row of an operand that has a row for every `each` rows of x.
struct Modulation {
    const void* p;
    i64 first;

    RTK_DEVICE Modulation(const void* p_, i64 row, i64 stride, i64 each)
        : p(p_), first(stride == 0 ? 0 : (each == 1 ? row : static_cast<u32>(row) / static_cast<u32>(each)) * stride) {}
};

// N elements of an operand of T, asked for without a branch and unpacked when they are needed: loads of all operands are under
// way before the first of them has come. Zeros without an operand.
template <typename T>
struct Asked {
    static constexpr int N = 16 / sizeof(T);
    Raw<16> raw;

    RTK_DEVICE Asked(const void* p, i64 at, int valid, u64 policy) {
        clear(raw);
        ptx::ld_stream_16_if(p != nullptr && valid > 0, raw, static_cast<const T*>(p) + at, policy);
    }
    RTK_DEVICE void get(float (&v)[N]) const { unpack<T, N>(raw, v); }
};

// What a thread may have: two blocks of 512, or four of 256, share a multiprocessor unless results are NVFP4.
constexpr int norm_registers(int format, bool aligned) {
    return format == kFp4Output || !aligned ? 128 : 64;
}

template <typename T, int FORMAT, bool ALIGNED>
__global__ void __maxnreg__(norm_registers(FORMAT, ALIGNED))
    norm_modulated(const T* x, const T* residual, const void* gate, const void* bias, const void* weight,
                   const void* norm_bias, const void* scale, const void* shift, const void* channel_scale,
                   const float* quant_scale, u32* amax, void* out, T* residual_out, void* kept, void* scale_out,
                   float* global_out, i64 rows, i64 cols, i64 x_stride, i64 residual_stride, i64 gate_stride, i64 gate_each,
                   i64 scale_stride, i64 scale_each, i64 shift_stride, i64 shift_each, i64 threads_per_row, i64 flags,
                   i64 quant, double eps, double offset, double number, double floor) {
    constexpr int N = kPerThread<T, FORMAT>;
    constexpr int kEach = 16 / sizeof(T);  // elements in 16 bytes
    extern __shared__ __align__(16) u8 memory[];
    ptx::wait_for_previous();
    ptx::launch_dependents();
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pair_scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 end = row < rows ? cols : 0;
    const i64 pitch = static_cast<i64>(group.threads) * N;
    constexpr bool aligned16 = ALIGNED;
    const bool in_shared = flags & kInShared;
    RowOutput<T, FORMAT, ALIGNED> output(out, kept, scale_out, global_out, quant_scale, amax, cols, quant, number, floor);
    const bool stores_h = residual_out != nullptr && !output.amax_only();
    const Modulation gates(gate, row, gate_stride, gate_each), scales(scale, row, scale_stride, scale_each),
        shifts(shift, row, shift_stride, shift_each);
    const i64 span = output.span(), stretches = (span + pitch - 1) / pitch;
    const ptx::SharedAddress row_memory =
        ptx::shared_address(memory) + static_cast<u32>(group.index * stretches * pitch * sizeof(T));

    if constexpr (ALIGNED && FORMAT != kFp4Output) {
        if (span <= pitch && (sizeof(T) == 4 || (flags & kAnyFp32) == 0)) {
            const i64 column = group.thread * N;
            const int valid = count_at<N>(column, end);
            const u64 policy = ptx::l2_last();
            const Asked<T> own(x, row * x_stride + column, valid, policy),
                rest(residual, row * residual_stride + column, valid, policy),
                of_gate(gate, gates.first + column, valid, policy), of_bias(bias, column, valid, policy),
                of_weight(weight, column, valid, policy), of_norm_bias(norm_bias, column, valid, policy),
                of_scale(scale, scales.first + column, valid, policy), of_shift(shift, shifts.first + column, valid, policy),
                of_channel(channel_scale, column, valid, policy);
            float h[N], v[N], sum = 0.0f;
            own.get(h);
            of_bias.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] += v[i];
            of_gate.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] *= gate != nullptr ? v[i] : 1.0f;
            rest.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] += v[i];
            unpack<T, N>(pack<T, N>(h), h);
            if (stores_h && valid > 0) store_elements<T, N>(residual_out + row * cols + column, valid, true, h);
            const bool centre = flags & kCentred;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += centre ? h[i] * kSmallPart : h[i] * h[i];
            sum = group_reduce<Sum, false>(sum, group, scratch, 0);
            RowStatistics of_row{0.0f, 0.0f};
            if (centre) {
                const float rough = mean_of_parts(sum, static_cast<float>(cols));
                float differences = 0.0f, squares = 0.0f;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float off = i < valid ? h[i] - rough : 0.0f;
                    differences += off, squares += off * off;
                }
                group_reduce_pair<Sum, false>(differences, squares, group, pair_scratch, 0);
                of_row = statistics_of(rough, differences, squares, static_cast<float>(cols), static_cast<float>(eps));
            } else {
                of_row.rstd = rstd_of(sum, static_cast<float>(cols), static_cast<float>(eps));
            }
            float made[N];
            of_weight.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i)
                made[i] = (h[i] - of_row.mean) * of_row.rstd * (weight != nullptr ? v[i] + static_cast<float>(offset) : 1.0f);
            of_norm_bias.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) made[i] += v[i];
            of_scale.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) made[i] *= 1.0f + v[i];
            of_shift.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) made[i] += v[i];
            of_channel.get(v);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                made[i] *= channel_scale != nullptr ? v[i] : 1.0f;
                made[i] = i < valid ? made[i] : 0.0f;  // no shift where there is no column
            }
            output.finish(group, scratch, 1, row, row < rows, end, 0, span, amax, [&](i64, int, float(&y)[N]) {
#pragma unroll
                for (int i = 0; i < N; ++i) y[i] = made[i];
            });
            return;
        }
    }

    auto valid_at = [&](i64 column) { return count_at<N>(column, end); };
    auto make_h = [&](i64 column, int valid, float(&h)[N]) {
        float v[N];
        load_elements<T, N>(x + row * x_stride + column, valid, aligned16, h);
        if (bias != nullptr) {
            load_either<T, N>(bias, column, flags & kBiasFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] += v[i];
        }
        if (gate != nullptr) {
            load_either<T, N>(gates.p, gates.first + column, flags & kGateFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] *= v[i];
        }
        if (residual != nullptr) {
            load_elements<T, N>(residual + row * residual_stride + column, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) h[i] += v[i];
        }
#pragma unroll
        for (int i = 0; i < N; i += kEach) {
            float part[kEach];
#pragma unroll
            for (int k = 0; k < kEach; ++k) part[k] = h[i + k];
            const Raw<16> raw = pack<T, kEach>(part);
            if (in_shared) ptx::st_shared_16(row_memory + static_cast<u32>((column + i) * sizeof(T)), raw);
            unpack<T, kEach>(raw, part);
#pragma unroll
            for (int k = 0; k < kEach; ++k) h[i + k] = part[k];
        }
        if (stores_h && valid > 0) store_elements<T, N>(residual_out + row * cols + column, valid, aligned16, h);
    };
    auto find_h = [&](i64 column, int valid, float(&h)[N]) {
        if (in_shared) {
#pragma unroll
            for (int i = 0; i < N; i += kEach) {
                float part[kEach];
                unpack<T, kEach>(ptx::ld_shared_16(row_memory + static_cast<u32>((column + i) * sizeof(T))), part);
#pragma unroll
                for (int k = 0; k < kEach; ++k) h[i + k] = part[k];
            }
        } else if (stores_h) {  // written by this thread: no read-only loads
#pragma unroll
            for (int i = 0; i < N; ++i) {
                Raw<sizeof(T)> raw;
                clear(raw);
                if (i < valid) {
                    const T own = residual_out[row * cols + column + i];
                    if constexpr (sizeof(T) == 4) {
                        raw.w[0] = __float_as_uint(own);
                    } else {
                        raw.w[0] = own.bits;
                    }
                }
                float one[1];
                unpack<T, 1>(raw, one);
                h[i] = one[0];
            }
        } else {
            make_h(column, valid, h);
        }
    };

    // Statistics.
    float sum = 0.0f;
    const bool centred = flags & kCentred;
    for (i64 first = 0; first < span; first += pitch) {
        const i64 column = first + group.thread * N;
        float h[N];
        make_h(column, valid_at(column), h);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += centred ? h[i] * kSmallPart : h[i] * h[i];
    }
    sum = group_reduce<Sum, false>(sum, group, scratch, 0);
    RowStatistics statistics{0.0f, 0.0f};
    if (centred) {
        const float rough = mean_of_parts(sum, static_cast<float>(cols));
        float differences = 0.0f, squares = 0.0f;
        for (i64 first = 0; first < span; first += pitch) {
            const i64 column = first + group.thread * N;
            const int valid = valid_at(column);
            float h[N];
            find_h(column, valid, h);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float off = i < valid ? h[i] - rough : 0.0f;
                differences += off, squares += off * off;
            }
        }
        group_reduce_pair<Sum, false>(differences, squares, group, pair_scratch, 0);
        statistics = statistics_of(rough, differences, squares, static_cast<float>(cols), static_cast<float>(eps));
    } else {
        statistics.rstd = rstd_of(sum, static_cast<float>(cols), static_cast<float>(eps));
    }

    auto make_y = [&](i64 column, int valid, float(&y)[N]) {
        float v[N];
        find_h(column, valid, y);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = (y[i] - statistics.mean) * statistics.rstd;
        if (weight != nullptr) {
            load_either<T, N>(weight, column, flags & kWeightFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= v[i] + static_cast<float>(offset);
        }
        if (norm_bias != nullptr) {
            load_either<T, N>(norm_bias, column, flags & kNormBiasFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += v[i];
        }
        if (scale != nullptr) {
            load_either<T, N>(scales.p, scales.first + column, flags & kScaleFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= 1.0f + v[i];
        }
        if (shift != nullptr) {
            load_either<T, N>(shifts.p, shifts.first + column, flags & kShiftFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += v[i];
        }
        if (channel_scale != nullptr) {
            load_either<T, N>(channel_scale, column, flags & kChannelFp32, valid, aligned16, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= v[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = i < valid ? y[i] : 0.0f;  // no shift where there is no column
    };

    output.finish(group, scratch, 1, row, row < rows, end, 0, span, amax, make_y);
}

}  // namespace rtk
