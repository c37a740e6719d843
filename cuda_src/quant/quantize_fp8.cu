// fp8 or int8 with one scale for the whole tensor or one per row. Recipe: common/fp8_scale.cuh, codes:
// quant/byte_codes.cuh. x has any row stride; q is dense.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"
#include "common/amax.cuh"
#include "common/row_slices.cuh"
#include "quant/byte_codes.cuh"

namespace rtk {

// Per block, the largest finite magnitude that it read: `partial` [gridDim.x]. Reads only, so a thread keeps twice as
// many loads in flight as in the kernels that also write.
template <typename T, int VEC>
__global__ void __launch_bounds__(256, 4)
    fp8_tensor_amax(const T* x, float* partial, i64 rows, i64 cols, i64 x_stride, i64 threads_per_row,
                    i64 slices_per_row) {
    __shared__ GroupScratch<1> scratch;
    const RowSlices<VEC, 8> slices(rows, cols, threads_per_row, slices_per_row);
    ptx::launch_dependents();
    u32 max_abs = 0;
#pragma unroll 1
    for (i64 run = slices.first; run < slices.count; run += slices.step) {
        Raw<sizeof(T) * VEC> raw[slices.kInFlight];
        slices.load(run, x, x_stride, raw);
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) max_abs = with_larger<T>(max_abs, raw[i]);
    }
    const float amax = group_reduce<MaxNumber, false>(WordMax<T>::largest(max_abs), RowGroup(blockDim.x), scratch, 0);
    if (threadIdx.x == 0) partial[blockIdx.x] = amax;
}

// One scale for all. Without `partial` it is read from `scale`; with it, every block computes it from the `partials`
// numbers of fp8_tensor_amax, and the first one stores it. Slices are processed from the end: the previous pass read
// the end last, so that part of x is still in L2.
template <typename T, typename Code, int VEC>
__global__ void __launch_bounds__(256, 5)
    quantize_fp8_tensor(const T* x, float* scale, const float* partial, Code* q, i64 rows, i64 cols, i64 x_stride,
                        i64 threads_per_row, i64 slices_per_row, i64 partials, i64 pow2) {
    __shared__ GroupScratch<1> scratch;
    const RowSlices<VEC> slices(rows, cols, threads_per_row, slices_per_row);
    Raw<sizeof(T) * VEC> raw[slices.kInFlight];
    i64 run = slices.count - 1 - slices.first;
    if (run >= 0) slices.load(run, x, x_stride, raw);  // in flight while the scale arrives
    float shared_scale;
    if (partial == nullptr) {
        shared_scale = *scale;
    } else {
        ptx::wait_for_previous();
        float amax = 0.0f;
        for (i64 i = threadIdx.x; i < partials; i += blockDim.x) amax = fmaxf(amax, partial[i]);
        amax = group_reduce<MaxNumber, false>(amax, RowGroup(blockDim.x), scratch, 0);
        shared_scale = fp8_scale<Code>(amax, pow2 != 0);
        if (blockIdx.x == 0 && threadIdx.x == 0) *scale = shared_scale;
    }
    const float inverse = __frcp_rn(shared_scale);
    while (run >= 0) {
        const i64 row = slices.row(run), first = slices.column(run, row), left = cols - first;
        Code* place = q + row * cols + first;
#pragma unroll
        for (int i = 0; i < slices.kInFlight; ++i) {
            if (i * slices.pitch() < left) {
                float v[VEC];
                unpack<T, VEC>(raw[i], v);
                ptx::st<VEC>(place + i * slices.pitch(), ByteCodes<Code>::of(v, inverse));
            }
        }
        run -= slices.step;
        if (run >= 0) slices.load(run, x, x_stride, raw);
    }
}

// One scale for all of a small dense tensor, in one launch: every block reads all of x for the largest magnitude, from
// L2 except for the first time, and writes the codes of its own 16 bytes per thread; the first one stores the scale.
// Two launches would take longer than the redundant reads.
template <typename T, typename Code>
__global__ void __launch_bounds__(1024, 1)
    quantize_fp8_tensor_small(const T* x, Code* q, float* scale, i64 vectors, i64 pow2) {
    constexpr int kVec = 16 / sizeof(T), kInFlight = 8;
    __shared__ GroupScratch<1> scratch;
    const int count = static_cast<int>(vectors), own = blockIdx.x * blockDim.x + threadIdx.x;
    Raw<16> mine;
    clear(mine);
    if (own < count) mine = load_raw<T, kVec, false>(x + static_cast<i64>(own) * kVec);
    u32 max_abs = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += kInFlight * blockDim.x) {
        Raw<16> raw[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int vector = first + i * blockDim.x;
            clear(raw[i]);
            if (vector < count) raw[i] = load_raw<T, kVec, false>(x + static_cast<i64>(vector) * kVec);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) max_abs = with_larger<T>(max_abs, raw[i]);
    }
    const float amax = group_reduce<MaxNumber, false>(WordMax<T>::largest(max_abs), RowGroup(blockDim.x), scratch, 0);
    const float shared_scale = fp8_scale<Code>(amax, pow2 != 0);
    if (own == 0) *scale = shared_scale;
    if (own < count) {
        float v[kVec];
        unpack<T, kVec>(mine, v);
        ptx::st<kVec>(q + static_cast<i64>(own) * kVec, ByteCodes<Code>::of(v, __frcp_rn(shared_scale)));
    }
}

// One scale per row, the row in registers: a thread owns accesses thread, thread + threads, ... (four of them).
// cols <= 4 * VEC * threads_per_row. Grid: any; blocks stride over the rows.
template <typename T, typename Code, int VEC>
__global__ void __launch_bounds__(512)
    quantize_fp8_row(const T* x, Code* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 threads_per_row, i64 pow2) {
    constexpr int kChunks = 4;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        Raw<sizeof(T) * VEC> raw[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const i64 column = static_cast<i64>(c * group.threads + group.thread) * VEC;
            clear(raw[c]);
            if (row < rows && column < cols) raw[c] = load_raw<T, VEC>(x + row * x_stride + column);
        }
        u32 max_abs = 0;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) max_abs = with_larger<T>(max_abs, raw[c]);
        const float amax = group_reduce<MaxNumber, false>(WordMax<T>::largest(max_abs), group, scratch, phase);
        const float row_scale = fp8_scale<Code>(amax, pow2 != 0);
        const float inverse = __frcp_rn(row_scale);
        if (row < rows && group.thread == 0) scale[row] = row_scale;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const i64 column = static_cast<i64>(c * group.threads + group.thread) * VEC;
            if (row < rows && column < cols) {
                float v[VEC];
                unpack<T, VEC>(raw[c], v);
                ptx::st<VEC>(q + row * cols + column, ByteCodes<Code>::of(v, inverse));
            }
        }
    }
}

// One scale per row for rows that do not fit in registers: reads the row twice.
template <typename T, typename Code, int VEC>
__global__ void __launch_bounds__(1024, 1)
    quantize_fp8_row_long(const T* x, Code* q, float* scale, i64 rows, i64 cols, i64 x_stride, i64 threads_per_row,
                          i64 pow2) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 step = static_cast<i64>(group.threads) * VEC;
        float amax = 0.0f;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += step) {
            float v[VEC];
            load_keep<T, VEC>(x + row * x_stride + column, v);
            amax = fmaxf(amax, finite_amax(v));
        }
        amax = group_reduce<MaxNumber, false>(amax, group, scratch, phase);
        const float row_scale = fp8_scale<Code>(amax, pow2 != 0);
        const float inverse = __frcp_rn(row_scale);
        if (row < rows && group.thread == 0) scale[row] = row_scale;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += step) {
            float v[VEC];
            load_keep<T, VEC>(x + row * x_stride + column, v);
            ptx::st<VEC>(q + row * cols + column, ByteCodes<Code>::of(v, inverse));
        }
    }
}

}  // namespace rtk
