// The normalisations for inference, in one launch and a fixed order of steps:
//
//     h = residual + gate * (x + bias)                    rounded to T, and stored
//     n = h * rstd, or (h - mean) * rstd                  statistics of the rounded h
//     y = ((n * (offset + weight) + norm_bias) * (1 + scale) + shift) * channel_scale
//
// y is stored as T, as 8-bit codes or as NVFP4 (common/row_output.cuh), and additionally as T if `kept`. Absent
// operands are null pointers. gate, scale and shift have one row per row of x, one per several neighbouring rows, or
// one for all. Arithmetic is fp32, rounded once at each store.
//
// A RowGroup owns a row, thread i of it the columns [i * N, i * N + N) of each stretch of threads * N. The rounded row
// stays in shared memory between the passes (`kInShared`), where each thread reads back what it wrote; a longer row is
// recomputed from the inputs, or read from residual_out. Grid: rows / groups of a block. In-place results are safe: a
// thread has read what it overwrites. Nearly all calls go to norm/norm_in_registers.cu; this kernel is for more
// operands, operands of mixed types, longer rows, or rows that are no multiple of 16 bytes.
#include "norm/norm_modulated.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"

namespace rtk {

// Flags. Bits from kFp32 on: operand number 2 (the gate) and the following ones are of fp32.
inline constexpr i64 kCentred = 2, kInShared = 4, kFp32 = 32;

inline constexpr int kX = 0, kResidual = 1, kGate = 2, kBias = 3, kWeight = 4, kNormBias = 5, kScale = 6, kShift = 7,
                     kChannel = 8, kOperands = 9;

// Operands of a row. Absent ones are null pointers.
struct NormOperands {
    const void* p[kOperands];
    i64 first[kOperands];  // element of the row in each
    float offset;          // of the weight

    RTK_DEVICE bool has(int which) const { return p[which] != nullptr; }
};

// h = residual + gate * (x + bias), not yet rounded.
template <int N, typename Get>
RTK_DEVICE void residual_sum(const NormOperands& in, Get get, float (&h)[N]) {
    float v[N];
    get(kX, h);
    if (in.has(kBias)) {
        get(kBias, v);
#pragma unroll
        for (int i = 0; i < N; ++i) h[i] += v[i];
    }
    if (in.has(kGate)) {
        get(kGate, v);
#pragma unroll
        for (int i = 0; i < N; ++i) h[i] *= v[i];
    }
    if (in.has(kResidual)) {
        get(kResidual, v);
#pragma unroll
        for (int i = 0; i < N; ++i) h[i] += v[i];
    }
}

// h becomes y = ((n * (offset + weight) + norm_bias) * (1 + scale) + shift) * channel_scale; zeros where there is no column.
template <int N, typename Get>
RTK_DEVICE void modulated(const NormOperands& in, RowStatistics of_row, int valid, Get get, float (&y)[N]) {
    float v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = (y[i] - of_row.mean) * of_row.rstd;
    if (in.has(kWeight)) {
        get(kWeight, v);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= v[i] + in.offset;
    }
    if (in.has(kNormBias)) {
        get(kNormBias, v);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += v[i];
    }
    if (in.has(kScale)) {
        get(kScale, v);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= 1.0f + v[i];
    }
    if (in.has(kShift)) {
        get(kShift, v);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += v[i];
    }
    if (in.has(kChannel)) {
        get(kChannel, v);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= v[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = i < valid ? y[i] : 0.0f;
}

// Register limit of a thread: two blocks of 512, or four of 256, share an SM unless results are NVFP4.
constexpr int norm_registers(int format, bool aligned) {
    return format == kFp4Output || !aligned ? 128 : 64;
}

template <typename T>
struct ModulatedArguments {
    const T *x, *residual;
    const void *gate, *bias, *weight, *norm_bias, *scale, *shift, *channel_scale;
    const float* quant_scale;
    u32* amax;
    void* out;
    T* residual_out;
    void *kept, *scale_out;
    float* global_out;
    i64 rows, cols, x_stride, residual_stride, gate_stride, gate_each, scale_stride, scale_each, shift_stride,
        shift_each, threads_per_row, flags, quant;
    double eps, offset, number, floor;
};

template <typename T, int FORMAT, bool ALIGNED>
__global__ void __maxnreg__(norm_registers(FORMAT, ALIGNED))
    norm_modulated(const __grid_constant__ ModulatedArguments<T> args) {
    constexpr int N = kPerThread<T, FORMAT>;
    constexpr int kEach = 16 / sizeof(T);  // elements in 16 bytes
    extern __shared__ __align__(16) u8 memory[];
    ptx::wait_for_previous();
    ptx::launch_dependents();
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pair_scratch;
    const RowGroup group(args.threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 end = row < args.rows ? args.cols : 0;
    const i64 pitch = static_cast<i64>(group.threads) * N;
    constexpr bool aligned16 = ALIGNED;
    const bool in_shared = args.flags & kInShared;
    RowOutput<T, FORMAT, ALIGNED> output(args.out, args.kept, args.scale_out, args.global_out, args.quant_scale,
                                         args.amax, args.cols, args.quant, args.number, args.floor);
    const bool stores_h = args.residual_out != nullptr && !output.amax_only();
    NormOperands in{{args.x, args.residual, args.gate, args.bias, args.weight, args.norm_bias, args.scale, args.shift,
                     args.channel_scale},
                    {row * args.x_stride, row * args.residual_stride,
                     modulation_row(row, args.gate_stride, args.gate_each), 0, 0, 0,
                     modulation_row(row, args.scale_stride, args.scale_each),
                     modulation_row(row, args.shift_stride, args.shift_each), 0},
                    static_cast<float>(args.offset)};
    const bool centred = args.flags & kCentred;
    const i64 span = output.span(), stretches = (span + pitch - 1) / pitch;
    const ptx::SharedAddress row_memory =
        ptx::shared_address(memory) + static_cast<u32>(group.index * stretches * pitch * sizeof(T));
    auto get_at = [&](i64 column, int valid) {
        return [&, column, valid](int which, float(&to)[N]) {
            load_either<T, N>(in.p[which], in.first[which] + column,
                              which >= kGate && (args.flags & kFp32 << (which - kGate)), valid,
                              aligned16, to);
        };
    };
    auto valid_at = [&](i64 column) { return count_at<N>(column, end); };
    auto make_h = [&](i64 column, int valid, float(&h)[N]) {
        residual_sum<N>(in, get_at(column, valid), h);
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
        if (stores_h && valid > 0)
            store_elements<T, N>(args.residual_out + row * args.cols + column, valid, aligned16, h);
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
                    const T own = args.residual_out[row * args.cols + column + i];
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

    auto for_all = [&](auto find, auto use) {
        for (i64 first = 0; first < span; first += pitch) {
            const i64 column = first + group.thread * N;
            float h[N];
            find(column, valid_at(column), h);
            use(h, valid_at(column));
        }
    };
    const RowStatistics of_row = row_statistics<N>(
        centred, args.cols, args.eps, group, scratch, pair_scratch, [&](auto use) { for_all(make_h, use); },
        [&](auto use) { for_all(find_h, use); });
    auto make_y = [&](i64 column, int valid, float(&y)[N]) {
        find_h(column, valid, y);
        modulated<N>(in, of_row, valid, get_at(column, valid), y);
    };
    output.finish(group, scratch, 1, row, row < args.rows, end, 0, span, args.amax, make_y);
}

}  // namespace rtk
