// The computation of act/glu.cu for rows that allow no 16-byte accesses: one kernel per direction for every type and
// activation. The results have the same bits, except for the summation order of a weight gradient.
//
// `type` is that of common/any_type.cuh, `act` the index of the activation in the list below. A group of threads
// (RowGroup) works on one row, each thread on four elements at a time. Grid: row blocks over x and y.
#include "act/activations.cuh"
#include "common/any_type.cuh"
#include "common/reduce.cuh"

namespace rtk {

inline constexpr int kInFlight = 4;

template <typename Act, bool kFast>
RTK_DEVICE void activate(float limit, float (&v)[kInFlight], float (&slope)[kInFlight]) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
        const ValueSlope at = gated<Act, kFast>(v[i], limit);
        v[i] = at.value, slope[i] = at.slope;
    }
}

template <bool kFast>
RTK_DEVICE void activate_any(int act, float limit, float (&v)[kInFlight], float (&slope)[kInFlight]) {
    switch (act) {
        case 0: activate<Silu, kFast>(limit, v, slope); break;
        case 1: activate<GeluTanh, kFast>(limit, v, slope); break;
        case 2: activate<GeluErf, kFast>(limit, v, slope); break;
        case 3: activate<Relu, kFast>(limit, v, slope); break;
        case 4: activate<Relu2, kFast>(limit, v, slope); break;
        case 5: activate<Sigmoid, kFast>(limit, v, slope); break;
        case 6: activate<Identity, kFast>(limit, v, slope); break;
        case 7: activate<SwigluOai, kFast>(limit, v, slope); break;
        case 8: activate<QuickGelu, kFast>(limit, v, slope); break;
        default: activate<ClampedSilu, kFast>(limit, v, slope); break;
    }
}

RTK_DEVICE ValueSlope partner_any(int act, float up, float limit) {
    if (act == 7) return partner<SwigluOai>(up, limit);
    return act == 9 ? partner<ClampedSilu>(up, limit) : partner<Silu>(up);
}

// One row of gate and up; without `up`, it follows gate.
struct GluRow {
    const void *gate, *up;
    i64 first_gate, first_up;  // elements before the row
    int type, act;
    float weight, limit;

    RTK_DEVICE GluRow(const void* gate_, const void* up_, const void* weights, i64 row, i64 cols, i64 gate_stride,
                      i64 up_stride, i64 weight_fp32, i64 type_, i64 act_, double limit_)
        : gate(gate_),
          up(up_ != nullptr ? up_ : gate_),
          first_gate(row * gate_stride),
          first_up(up_ != nullptr ? row * up_stride : row * gate_stride + cols),
          type(static_cast<int>(type_)),
          act(static_cast<int>(act_)),
          weight(weights == nullptr ? 1.0f : load_any(weights, weight_fp32 ? kAnyFp32 : type, row)),
          limit(static_cast<float>(limit_)) {}

    // Columns column, column + step, ...: the activation of the gate with its slope, and up; zeros from cols on.
    RTK_DEVICE void load(i64 column, int step, i64 cols, float (&v)[kInFlight], float (&slope)[kInFlight],
                         float (&u)[kInFlight]) const {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const i64 at = column + i * step;
            v[i] = at < cols ? load_any(gate, type, first_gate + at) : 0.0f;
            u[i] = at < cols ? load_any(up, type, first_up + at) : 0.0f;
        }
        if (type == kAnyFp32) {
            activate_any<false>(act, limit, v, slope);
        } else {
            activate_any<true>(act, limit, v, slope);
        }
    }
};

RTK_DEVICE i64 own_row(const RowGroup& group) {
    return (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * group.count + group.index;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    glu_fwd_generic(const void* gate, const void* up, const void* weight, void* y, i64 rows, i64 cols, i64 gate_stride,
                    i64 up_stride, i64 weight_fp32, i64 threads_per_row, i64 type, i64 act, double limit) {
    const RowGroup group(threads_per_row);
    const i64 row = own_row(group);
    if (row >= rows) return;
    const GluRow in(gate, up, weight, row, cols, gate_stride, up_stride, weight_fp32, type, act, limit);
#pragma unroll 1
    for (i64 first = group.thread; first < cols; first += kInFlight * group.threads) {
        float v[kInFlight], slope[kInFlight], u[kInFlight];
        in.load(first, group.threads, cols, v, slope, u);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const i64 column = first + i * group.threads;
            const float value = v[i] * partner_any(in.act, u[i], in.limit).value * in.weight;
            if (column < cols) store_any(y, in.type, row * cols + column, value);
        }
    }
}

// dgate and dup have row stride out_stride; dup null: it follows dgate. dweight null: not computed. Each thread has
// read the elements that it overwrites.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    glu_bwd_generic(const void* dy, const void* gate, const void* up, const void* weight, void* dgate, void* dup,
                    void* dweight, i64 rows, i64 cols, i64 dy_stride, i64 gate_stride, i64 up_stride, i64 out_stride,
                    i64 weight_fp32, i64 threads_per_row, i64 type, i64 act, double limit) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = own_row(group);
    const int kind = static_cast<int>(type);
    float total = 0.0f;
    if (row < rows) {
        const GluRow in(gate, up, weight, row, cols, gate_stride, up_stride, weight_fp32, type, act, limit);
        const i64 dup_offset = row * out_stride + (dup == nullptr ? cols : 0);
        void* const to = dup == nullptr ? dgate : dup;
#pragma unroll 1
        for (i64 first = group.thread; first < cols; first += kInFlight * group.threads) {
            float g[kInFlight], v[kInFlight], slope[kInFlight], u[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const i64 column = first + i * group.threads;
                g[i] = column < cols ? load_any(dy, kind, row * dy_stride + column) : 0.0f;
            }
            in.load(first, group.threads, cols, v, slope, u);
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const i64 column = first + i * group.threads;
                if (column >= cols) break;
                const ValueSlope other = partner_any(in.act, u[i], in.limit);
                total += g[i] * v[i] * other.value;
                const float weighted = g[i] * in.weight;
                store_any(dgate, kind, row * out_stride + column, weighted * other.value * slope[i]);
                store_any(to, kind, dup_offset + column, weighted * v[i] * other.slope);
            }
        }
    }
    if (dweight == nullptr) return;
    total = group_reduce<Sum, false>(total, group, scratch, 0);
    if (row < rows && group.thread == 0) store_any(dweight, weight_fp32 ? kAnyFp32 : kind, row, total);
}

}  // namespace rtk
