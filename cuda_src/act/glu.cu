// Gated linear units:  y = act(gate) * up * weight,  weight one number per row (or none). Arithmetic is fp32, rounded
// once at each store. For rows of 16-byte units; act/glu_generic.cu serves all others.
//
// gate and up are halves of one tensor (up is null: it follows gate in each row) or two tensors; inputs have any row
// stride, y and the gradients are dense. Without a weight gradient everything is elementwise: a thread owns one vector
// of columns in ROWS rows, so that all its loads are in flight together, and there is no loop and no division. `limit` is
// that of activations that clamp.
#include "act/activations.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

// A thread's position: `column` in rows `row`, `row + step`, ... (ROWS of them). A block is a strip of one row, or (1
// << lane_bits) lanes for each of several rows; lane_bits is 31 for the strip. Grid: strips, row blocks over y and z.
template <int VEC, int ROWS>
struct Tile {
    i64 column, row;
    int step;

    RTK_DEVICE explicit Tile(i64 lane_bits) {
        const int bits = static_cast<int>(lane_bits), thread = static_cast<int>(threadIdx.x);
        const int row_in_block = thread >> bits, lane = thread - (row_in_block << bits);
        const int lanes = bits == 31 ? static_cast<int>(blockDim.x) : 1 << bits;
        step = bits == 31 ? 1 : static_cast<int>(blockDim.x) >> bits;
        column = (static_cast<i64>(blockIdx.x) * lanes + lane) * VEC;
        row = (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * (step * ROWS) + row_in_block;
    }
};

// Of T, or fp32 if `weight_fp32`; 1 without weights.
template <typename T>
RTK_DEVICE float row_weight(const void* weight, i64 weight_fp32, i64 row) {
    float w[1] = {1.0f};
    if (weight != nullptr) {
        if (weight_fp32) {
            load_keep<float, 1>(static_cast<const float*>(weight) + row, w);
        } else {
            load_keep<T, 1>(static_cast<const T*>(weight) + row, w);
        }
    }
    return w[0];
}

template <typename T, typename Act, int VEC, int ROWS>
__global__ void __launch_bounds__(256)
    glu_fwd(const T* gate, const T* up, const void* weight, T* y, i64 rows, i64 cols, i64 gate_stride, i64 up_stride,
            i64 weight_fp32, i64 lane_bits, double limit) {
    const float bound = static_cast<float>(limit);
    if (up == nullptr) up = gate + cols;
    const Tile<VEC, ROWS> tile(lane_bits);
    if (tile.column >= cols) return;
    Raw<sizeof(T) * VEC> gate_raw[ROWS], up_raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = tile.row + r * tile.step;
        if (row < rows) {
            gate_raw[r] = load_raw<T, VEC>(gate + row * gate_stride + tile.column);
            up_raw[r] = load_raw<T, VEC>(up + row * up_stride + tile.column);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = tile.row + r * tile.step;
        if (row < rows) {
            const float w = row_weight<T>(weight, weight_fp32, row);
            float g[VEC], u[VEC];
            unpack<T, VEC>(gate_raw[r], g);
            unpack<T, VEC>(up_raw[r], u);
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                g[i] = gated<Act, sizeof(T) == 2>(g[i], bound).value * partner<Act>(u[i], bound).value * w;
            store<T, VEC>(y + row * cols + tile.column, g);
        }
    }
}

// Gradients of N columns of a row, from the incoming gradient g: g becomes that of gate, u that of up. Returns the sum
// of g * act(gate) * up, their contribution to the weight gradient.
template <typename T, typename Act, int N>
RTK_DEVICE float glu_gradients(float (&g)[N], const float (&x)[N], float (&u)[N], float w, float limit) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const ValueSlope act = gated<Act, sizeof(T) == 2>(x[i], limit);
        const ValueSlope other = partner<Act>(u[i], limit);
        total += g[i] * act.value * other.value;
        const float weighted = g[i] * w;
        g[i] = weighted * other.value * act.slope;
        u[i] = weighted * act.value * other.slope;
    }
    return total;
}

// Backward without a weight gradient. dgate and dup have row stride out_stride; dup null: it follows dgate.
template <typename T, typename Act, int VEC, int ROWS>
__global__ void __launch_bounds__(256)
    glu_bwd(const T* dy, const T* gate, const T* up, const void* weight, T* dgate, T* dup, i64 rows, i64 cols,
            i64 dy_stride, i64 gate_stride, i64 up_stride, i64 out_stride, i64 weight_fp32, i64 lane_bits, double limit) {
    if (up == nullptr) up = gate + cols;
    if (dup == nullptr) dup = dgate + cols;
    const Tile<VEC, ROWS> tile(lane_bits);
    if (tile.column >= cols) return;
    Raw<sizeof(T) * VEC> dy_raw[ROWS], gate_raw[ROWS], up_raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = tile.row + r * tile.step;
        if (row < rows) {
            dy_raw[r] = load_raw<T, VEC>(dy + row * dy_stride + tile.column);
            gate_raw[r] = load_raw<T, VEC>(gate + row * gate_stride + tile.column);
            up_raw[r] = load_raw<T, VEC>(up + row * up_stride + tile.column);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = tile.row + r * tile.step;
        if (row < rows) {
            const float w = row_weight<T>(weight, weight_fp32, row);
            float g[VEC], x[VEC], u[VEC];
            unpack<T, VEC>(dy_raw[r], g);
            unpack<T, VEC>(gate_raw[r], x);
            unpack<T, VEC>(up_raw[r], u);
            glu_gradients<T, Act, VEC>(g, x, u, w, static_cast<float>(limit));
            store<T, VEC>(dgate + row * out_stride + tile.column, g);
            store<T, VEC>(dup + row * out_stride + tile.column, u);
        }
    }
}

// Backward with the weight gradient, a sum over each row: a group of threads (RowGroup) works on one row, each thread on
// CHUNKS vectors at a time. Grid: row blocks over x and y.
template <typename T, typename Act, int VEC, int CHUNKS>
__global__ void __launch_bounds__(256)
    glu_bwd_rows(const T* dy, const T* gate, const T* up, const void* weight, T* dgate, T* dup, void* dweight, i64 rows,
                 i64 cols, i64 dy_stride, i64 gate_stride, i64 up_stride, i64 out_stride, i64 weight_fp32,
                 i64 threads_per_row, double limit) {
    __shared__ GroupScratch<1> scratch;
    if (up == nullptr) up = gate + cols;
    if (dup == nullptr) dup = dgate + cols;
    const RowGroup group(threads_per_row);
    const i64 row = (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * group.count + group.index;
    float total = 0.0f;
    if (row < rows) {
        const float w = row_weight<T>(weight, weight_fp32, row);
        dy += row * dy_stride, gate += row * gate_stride, up += row * up_stride;
        dgate += row * out_stride, dup += row * out_stride;
        const int step = group.threads * VEC;
#pragma unroll 1
        for (i64 first = static_cast<i64>(group.thread) * VEC; first < cols; first += step * CHUNKS) {
            Raw<sizeof(T) * VEC> dy_raw[CHUNKS], gate_raw[CHUNKS], up_raw[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const i64 column = first + c * step;
                if (column < cols) {
                    dy_raw[c] = load_raw<T, VEC>(dy + column);
                    gate_raw[c] = load_raw<T, VEC>(gate + column);
                    up_raw[c] = load_raw<T, VEC>(up + column);
                }
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const i64 column = first + c * step;
                if (column < cols) {
                    float g[VEC], x[VEC], u[VEC];
                    unpack<T, VEC>(dy_raw[c], g);
                    unpack<T, VEC>(gate_raw[c], x);
                    unpack<T, VEC>(up_raw[c], u);
                    total += glu_gradients<T, Act, VEC>(g, x, u, w, static_cast<float>(limit));
                    store<T, VEC>(dgate + column, g);
                    store<T, VEC>(dup + column, u);
                }
            }
        }
    }
    const float sum[1] = {group_reduce<Sum, false>(total, group, scratch, 0)};
    if (row < rows && group.thread == 0) {
        if (weight_fp32) {
            store<float, 1>(static_cast<float*>(dweight) + row, sum);
        } else {
            store<T, 1>(static_cast<T*>(dweight) + row, sum);
        }
    }
}

}  // namespace rtk
