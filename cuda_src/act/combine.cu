// One elementwise kernel for activations, gated units and the sums and products around matrix products:
//
//     y = act(x + add0 + add1) * mul0 * mul1 * alpha + base0 + base1        (`kSubtract`: x - add0)
//
// Absent operands are left out. y is stored as T or fp32, as 8-bit codes or as NVFP4 (common/row_output.cuh). `kSlope`:
// the derivative of act instead of act. `kInterleaved`: x has 2 * cols columns, alternating values of x and mul0.
// Operands are of T or fp32; each has one row per `each` neighbouring rows of the result, or (each < 0) -each rows that
// repeat, or a single one (stride 0). alpha is a number, times *factor. Arithmetic is fp32, rounded once.
//
// A RowGroup owns a row, or one of `slices` parts of it (then the group is a block): thread i the columns [i * N, i * N
// + N) of each stretch of threads * N. Grid: row blocks times slices. A thread reads what it overwrites before it does.
// Nearly every call has at most three operands, all of T, in rows of 16-byte units: `combine_three` serves those and
// loads all operands of the next stretch before it works on one. `combine` takes everything else.
#include "act/activate_any.cuh"
#include "common/row_output.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

inline constexpr i64 kSlope = 2, kSubtract = 4, kInterleaved = 8;
inline constexpr i64 kXFp32 = 16, kAdd0Fp32 = 32, kAdd1Fp32 = 64, kMul0Fp32 = 128, kMul1Fp32 = 256, kBase0Fp32 = 512,
                     kBase1Fp32 = 1024;

// An operand's row for a row of the result.
RTK_DEVICE i64 operand_row(i64 row, i64 stride, i64 each) {
    if (stride == 0) return 0;
    const u32 number = static_cast<u32>(row);  // rows are fewer than 2^31: no division of 64 bits
    return (each == 1 ? number : each > 0 ? number / static_cast<u32>(each) : number % static_cast<u32>(-each)) * stride;
}

// Register limit of a thread: four blocks of 256 share an SM where rows allow 16-byte accesses.
constexpr int combine_registers(int format, bool aligned, int bytes) {
    if (aligned) return format == kFp4Output ? (bytes == 4 ? 168 : 128) : 64;
    return format == kFp4Output ? 168 : format == kByteOutput ? 128 : 96;
}

struct CombineArguments {
    const void *x, *add0, *add1, *mul0, *mul1, *base0, *base1;
    const float* quant_scale;
    u32* amax;
    const float* factor;
    void *out, *kept, *scale_out;
    float* global_out;
    i64 rows, cols, x_stride, add0_stride, add0_each, add1_stride, add1_each, mul0_stride, mul0_each, mul1_stride,
        mul1_each, base0_stride, base0_each, base1_stride, base1_each, threads_per_row, slices, slice_cols, flags,
        quant, act;
    double number, floor, alpha;
};

template <typename T, int FORMAT, bool ALIGNED>
__global__ void __maxnreg__(combine_registers(FORMAT, ALIGNED, sizeof(T)))
    combine(const __grid_constant__ CombineArguments args) {
    constexpr int N = kPerThread<T, FORMAT>;
    constexpr bool kFast = sizeof(T) < 4;
    ptx::wait_for_previous();
    ptx::launch_dependents();
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(args.threads_per_row);
    const i64 row_block = args.slices == 1 ? blockIdx.x : blockIdx.x / static_cast<u32>(args.slices);
    const i64 row = row_block * group.count + group.index;
    const i64 end = row < args.rows ? args.cols : 0;
    constexpr bool aligned16 = ALIGNED;
    RowOutput<T, FORMAT, ALIGNED> output(args.out, args.kept, args.scale_out, args.global_out, args.quant_scale,
                                         args.amax, args.cols, args.quant, args.number, args.floor);
    const i64 begin = (blockIdx.x - row_block * args.slices) * args.slice_cols;
    const i64 stop = args.slices == 1 ? output.span() : min(output.span(), begin + args.slice_cols);
    const float times = static_cast<float>(args.alpha) * (args.factor != nullptr ? *args.factor : 1.0f);
    // Operands are read one after the other; those of the first columns are prefetched meanwhile.
    auto come_nearer = [&](const void* p, i64 stride, i64 each, i64 fp32) {
        const i64 column = begin + group.thread * N;
        if (p == nullptr || column >= end) return;
        const i64 bytes = sizeof(T) == 4 || (args.flags & fp32) ? 4 : 2;
        ptx::prefetch_l2(static_cast<const u8*>(p) + (operand_row(row, stride, each) + column) * bytes);
    };
    come_nearer(args.mul0, args.mul0_stride, args.mul0_each, kMul0Fp32);
    come_nearer(args.base0, args.base0_stride, args.base0_each, kBase0Fp32);

    auto make_y = [&](i64 column, int valid, float(&y)[N]) {
        float v[N], up[N];
        auto load = [&](const void* p, i64 stride, i64 each, i64 fp32, float(&to)[N]) {
            load_either<T, N>(p, operand_row(row, stride, each) + column, args.flags & fp32, valid, aligned16, to);
        };
        if (args.flags & kInterleaved) {
            float both[2 * N];
            load_either<T, 2 * N>(args.x, row * args.x_stride + 2 * column, args.flags & kXFp32, 2 * valid, aligned16,
                                  both);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = both[2 * i], up[i] = both[2 * i + 1];
        } else {
            load(args.x, args.x_stride, 1, kXFp32, y);
            if (args.mul0 != nullptr) load(args.mul0, args.mul0_stride, args.mul0_each, kMul0Fp32, up);
        }
        if (args.add0 != nullptr) {
            load(args.add0, args.add0_stride, args.add0_each, kAdd0Fp32, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += args.flags & kSubtract ? -v[i] : v[i];
        }
        if (args.add1 != nullptr) {
            load(args.add1, args.add1_stride, args.add1_each, kAdd1Fp32, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += v[i];
        }
        activate_any<kFast, FORMAT == kPlainOutput>(static_cast<int>(args.act), args.flags & kSlope, y);
        if (args.mul0 != nullptr || (args.flags & kInterleaved)) {
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= args.act == kSwigluOai ? partner<SwigluOai>(up[i]).value : up[i];
        }
        if (args.mul1 != nullptr) {
            load(args.mul1, args.mul1_stride, args.mul1_each, kMul1Fp32, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= v[i];
        }
        if (args.base0 != nullptr) {
            load(args.base0, args.base0_stride, args.base0_each, kBase0Fp32, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = fmaf(y[i], times, v[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= times;
        }
        if (args.base1 != nullptr) {
            load(args.base1, args.base1_stride, args.base1_each, kBase1Fp32, v);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += v[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = i < valid ? y[i] : 0.0f;  // sigmoid(0) is not
    };

    output.finish(group, scratch, 0, row, row < args.rows, end, begin, stop, args.amax, make_y);
}

// Roles of p and q in `combine_three`: bits 8 to 10, and 11 to 13, of its flags.
inline constexpr int kAbsent = 0, kAdded = 1, kSubtracted = 2, kPartner = 3, kFactor = 4, kBase = 5;

// x, p and q of a vector.
template <typename T, int N>
struct Three {
    Asked<T, N> x, p, q;

    RTK_DEVICE void clear() { x.clear_all(), p.clear_all(), q.clear_all(); }
};

// Operands stay packed until they are used.
template <typename T, int N>
RTK_DEVICE void add_operand(int role, const Asked<T, N>& operand, float (&y)[N]) {
    if (role != kAdded && role != kSubtracted) return;
    float v[N];
    operand.get(v);
    const float sign = role == kAdded ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = fmaf(v[i], sign, y[i]);
}

template <typename T, int N>
RTK_DEVICE void times_operand(int role, bool shifted, const Asked<T, N>& operand, float (&y)[N]) {
    if (role != kPartner && role != kFactor) return;
    float v[N];
    operand.get(v);
    if (role == kPartner && shifted) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = partner<SwigluOai>(v[i]).value;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= v[i];
}

template <typename T, int N>
RTK_DEVICE void scale_to_base(const Asked<T, N>& operand, float times, float (&y)[N]) {
    float v[N];
    operand.get(v);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = fmaf(y[i], times, v[i]);
}

// Register limit of a thread: four blocks of 256 share an SM, except for NVFP4. Targets with its conversions need a few
// more.
constexpr int three_registers(int format, int bytes) {
    return format == kPlainOutput ? 64 : bytes == 4 ? (format == kByteOutput ? 80 : 128) : format == kByteOutput ? 64 : 96;
}

// Where an operand's row for a row of the result begins: `own` elements per row plus `jump` per quotient by `divisor`
// (runtime/layout.py). One row for all: 0 and 0. One row for several neighbours: 0 and its stride. Repeating rows: its
// stride, and minus the extent of all its rows.
RTK_DEVICE i64 row_offset(u32 row, i64 own, i64 jump, i64 divisor) {
    return static_cast<i64>(row) * own + static_cast<i64>(divided(row, divisor)) * jump;
}

// Operands are in the order of the formula: p is applied before q. Rows have fewer than 2^31 columns. Grid: slices, and row
// blocks over y and z.
template <typename T, int FORMAT>
__global__ void __maxnreg__(three_registers(FORMAT, sizeof(T)) + (RTK_HAS_FP4_CVT ? 8 : 0))
    combine_three(const T* x, const T* p, const T* q, const float* quant_scale, u32* amax, const float* factor, void* out,
                  void* kept, void* scale_out, float* global_out, i64 rows, i64 cols, i64 x_stride, i64 p_own, i64 p_jump,
                  i64 p_divisor, i64 q_own, i64 q_jump, i64 q_divisor, i64 lane_bits, i64 slice_cols, i64 flags, i64 quant,
                  i64 act, double number, double floor, double alpha) {
    constexpr int N = kPerThread<T, FORMAT>;
    constexpr bool kFast = sizeof(T) < 4;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group = RowGroup::of_lanes(lane_bits);
    const u32 row = (blockIdx.z * gridDim.y + blockIdx.y) * group.count + group.index;
    const bool exists = row < rows;
    const int role_p = static_cast<int>(flags >> 8 & 7), role_q = static_cast<int>(flags >> 11 & 7);
    x += row * x_stride, p += row_offset(row, p_own, p_jump, p_divisor), q += row_offset(row, q_own, q_jump, q_divisor);
    const u64 policy = ptx::l2_last();
    ptx::wait_for_previous();
    ptx::launch_dependents();
    u32 times_bits = __float_as_uint(1.0f);
    ptx::ld_keep_if<4>(factor != nullptr, times_bits, factor);
    RowOutput<T, FORMAT, true> output(out, kept, scale_out, global_out, quant_scale, amax, cols, quant, number, floor);

    auto make_y = [&](const Three<T, N>& asked, float(&y)[N]) {
        asked.x.get(y);
        add_operand(role_p, asked.p, y);
        add_operand(role_q, asked.q, y);
        activate_any<kFast, FORMAT == kPlainOutput>(static_cast<int>(act), flags & kSlope, y);
        times_operand(role_p, act == kSwigluOai, asked.p, y);
        times_operand(role_q, act == kSwigluOai, asked.q, y);
        const float times = static_cast<float>(alpha) * __uint_as_float(times_bits);
        if (role_p == kBase) scale_to_base(asked.p, times, y);
        if (role_q == kBase) {
            scale_to_base(asked.q, role_p == kBase ? 1.0f : times, y);
        } else if (role_p != kBase && times != 1.0f) {
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= times;
        }
    };
    const i64 span = output.span(), begin = static_cast<i64>(blockIdx.x) * slice_cols, stop = min(span, begin + slice_cols);
    if constexpr (FORMAT == kFp4Output) {
        auto ask_part = [&](int, i64 column, int valid) {
            Three<T, N> asked;
            asked.x.ask(true, x + column, valid, policy);
            asked.p.ask(role_p != kAbsent, p + column, valid, policy);
            asked.q.ask(role_q != kAbsent, q + column, valid, policy);
            return asked;
        };
        auto make_part = [&](int, const Three<T, N>& asked, i64, int valid, float(&y)[N]) {
            make_y(asked, y);
            if (valid == N) return;
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = i < valid ? y[i] : 0.0f;  // sigmoid(0) is not 0
        };
        output.template finish<1, kInBursts>(group, scratch, 0, row, exists, exists ? cols : 0, begin, stop, amax, ask_part,
                                             make_part);
    } else {
        auto ask = [&](Three<T, N>& asked, int column, bool there) {
            asked.x.ask_whole(there, x + column, policy);
            asked.p.ask_whole(there && role_p != kAbsent, p + column, policy);
            asked.q.ask_whole(there && role_q != kAbsent, q + column, policy);
        };
        output.template finish_whole<Three<T, N>>(group, scratch, row, exists, static_cast<int>(begin), static_cast<int>(stop),
                                                  amax, ask, make_y);
    }
}

}  // namespace rtk
