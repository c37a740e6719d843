// norm/norm_modulated.cu for common calls: at most five operands, all of T, in rows of 16-byte units that fit in
// registers. x and the residual; `before` is applied before the statistics, p and then q after them:
//
//     h = residual + (x + before, or x * before)            rounded to T, and stored
//     n = h * rstd, or (h - mean) * rstd                  statistics of the rounded h
//     y = n, + p or * (p + p_offset), + q or * (q + q_offset)
//
// y is stored as T, as 8-bit codes or as NVFP4 (common/row_output.cuh), and additionally as T if `kept`. Absent
// operands are null pointers. Arithmetic is fp32, rounded once at each store.
//
// A RowGroup owns a row, thread i of it V vectors of N columns, strided by the number of threads, in units of 16 bytes.
// All operands are loaded before the first is used: a load after the statistics would cost a second wait for memory.
// Grid: rows / groups of a block. In-place results are safe: a thread has read what it overwrites.
#include "norm/norm_modulated.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr i64 kCentred = 2, kHasResidual = 4;          // flags, and roles: bits 8 and 9 `before`, 10 and 11 p, 12 and 13 q
inline constexpr int kAbsent = 0, kAdded = 1, kMultiplied = 2;  // roles

template <typename T, int N>
RTK_DEVICE void apply_operand(int role, float offset, const Asked<T, N>& operand, float (&y)[N]) {
    if (role == kAbsent) return;
    float v[N];
    operand.get(v);
    if (role == kAdded) {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += v[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= v[i] + offset;
    }
}

// Register limit of a thread: four blocks of 256 share an SM.
template <typename T>
constexpr int norm_registers(int format) {
    if (format == kFp4Output && sizeof(T) == 4) return 128;
    const bool more = is_same<T, fp16>::value || (format == kByteOutput && RTK_HAS_FP4_CVT);
    return format != kPlainOutput && more ? 72 : 64;
}

// `offsets`: those of p and q, two fp32 numbers. Divisors (runtime/layout.py): how many rows share one row of an
// operand. No branches or divisions before the last load: they cost half a microsecond in small calls.
template <typename T, int FORMAT>
__global__ void __maxnreg__(norm_registers<T>(FORMAT))
    norm_in_registers(const T* x, const T* residual, const T* before, const T* p, const T* q, const float* quant_scale, u32* amax,
                      void* out, T* residual_out, void* kept, void* scale_out, float* global_out, i64 rows, i64 cols,
                      i64 x_stride, i64 residual_stride, i64 before_stride, i64 before_divisor, i64 p_stride, i64 p_divisor, i64 q_stride,
                      i64 q_divisor, i64 lane_bits, i64 flags, i64 offsets, i64 quant, double eps, double number,
                      double floor) {
    constexpr int N = kPerThread<T, FORMAT>, V = FORMAT == kFp4Output ? 1 : 2;
    constexpr int kEach = 16 / sizeof(T), kUnits = V * N / kEach;
    ptx::wait_for_previous();
    ptx::launch_dependents();
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pair_scratch;
    const RowGroup group = RowGroup::of_lanes(lane_bits);
    const u32 row = blockIdx.x * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0, column = group.thread * N, pitch = group.threads * N;
    const int role_before = flags >> 8 & 3, role_p = flags >> 10 & 3, role_q = flags >> 12 & 3;
    const bool has_residual = flags & kHasResidual;
    const u64 policy = ptx::l2_last();
    auto place = [&](int unit) { return unit * kEach / N * pitch + unit * kEach % N; };
    auto exists = [&](int unit) { return column + place(unit) < end; };
    auto ask = [&](Asked<T, kEach>(&units)[kUnits], bool there, const T* first) {
        if (FORMAT == kFp4Output && !there) return;  // NVFP4 is bound by instructions: computing unused addresses costs more than a copy
#pragma unroll
        for (int u = 0; u < kUnits; ++u) units[u].ask(there, first + column + place(u), exists(u) ? kEach : 0, policy);
    };
    auto row_of = [&](i64 stride, i64 divisor) { return divided(row, divisor) * stride; };
    Asked<T, kEach> h[kUnits], of_residual[kUnits], of_before[kUnits], of_p[kUnits], of_q[kUnits];
    ask(h, true, x + row * x_stride);
    ask(of_residual, has_residual, residual + row * residual_stride);
    ask(of_before, role_before != kAbsent, before + row_of(before_stride, before_divisor));
    ask(of_p, role_p != kAbsent, p + row_of(p_stride, p_divisor));
    ask(of_q, role_q != kAbsent, q + row_of(q_stride, q_divisor));
    RowOutput<T, FORMAT, true> output(out, kept, scale_out, global_out, quant_scale, amax, cols, quant, number, floor);
    const bool stores_h = residual_out != nullptr && !output.amax_only();

    auto make_all = [&](auto use) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            float sum[kEach];
            h[u].get(sum);
            apply_operand(role_before, 0.0f, of_before[u], sum);
            apply_operand(has_residual ? kAdded : kAbsent, 0.0f, of_residual[u], sum);
            h[u].round(sum);
            if (stores_h && exists(u)) h[u].store(residual_out + (row * cols + column + place(u)), kEach);
            h[u].get(sum);
            use(sum, exists(u) ? kEach : 0);
        }
    };
    auto find_all = [&](auto use) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            float own[kEach];
            h[u].forget();
            h[u].get(own);
            use(own, exists(u) ? kEach : 0);
        }
    };
    const RowStatistics of_row =
        row_statistics<kEach>(flags & kCentred, cols, eps, group, scratch, pair_scratch, make_all, find_all);
    auto make_y = [&](int v, int, i64, int, float(&y)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += kEach) {
            const int u = (v * N + i) / kEach;
            float part[kEach];
            h[u].forget(), of_p[u].forget(), of_q[u].forget();
            h[u].get(part);
#pragma unroll
            for (int k = 0; k < kEach; ++k) part[k] = (part[k] - of_row.mean) * of_row.rstd;
            apply_operand(role_p, __uint_as_float(lower(offsets)), of_p[u], part);
            apply_operand(role_q, __uint_as_float(upper(offsets)), of_q[u], part);
#pragma unroll
            for (int k = 0; k < kEach; ++k) y[i + k] = exists(u) ? part[k] : 0.0f;  // no shift without a column
        }
    };
    auto nothing_to_ask = [](int, i64, int) { return 0; };
    output.template finish<V, kNoLoop>(group, scratch, 1, row, row < rows, end, 0, output.span(), amax, nothing_to_ask, make_y);
}

}  // namespace rtk
