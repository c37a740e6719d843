// Backward of layer normalisation (norm/layer_norm.cu) with rows that the copy engine brings (sm_90 and up).
#include "common/block_sums.cuh"
#include "norm/bulk_rows.cuh"
#include "norm/common.cuh"
#include "norm/moments.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// What layer_norm_bwd (norm/layer_norm_bwd.cu) does with two pieces of a row in a thread, and in the same order: dh, and a row
// of partial parameter gradients per block. For groups of whole warps and rows of at most 1024 pieces of 16 bytes.
template <typename T, bool DSUM>
__global__ void __maxnreg__(DSUM ? 128 : 112)
    layer_norm_bwd_bulk(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* partial, i64 rows,
                        i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps,
                        double offset, i64 wide, i64 partial_stride, i64 stages) {
    constexpr int VEC = 16 / sizeof(T), CHUNKS = 2;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<4> scratch;
    const RowGroup group(threads_per_row);
    const WarpColumns<VEC, CHUNKS> columns(group, cols);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait beside this one
    const int end = static_cast<int>(cols);
    BulkRows<T, CHUNKS, DSUM> mine(memory, group, dy, h, dsum, rows, cols, dy_stride, h_stride, dsum_stride, stages);
    const auto& ring = mine.ring;
    const float epsilon = static_cast<float>(eps);
    const float shift = static_cast<float>(offset);
    const float inverse = 1.0f / static_cast<float>(cols);
    const int pitch = group.threads * VEC;
    const int column = group.thread * VEC;
    float gain[CHUNKS][VEC], dweight[CHUNKS][VEC], dbias[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) gain[c][i] = dweight[c][i] = dbias[c][i] = 0.0f;
        if (ring.has(c)) load_any_gain<T, VEC>(weight, wide, column + c * pitch, shift, gain[c]);
    }
    __syncthreads();

    int phase = 0;
    for (int row = mine.first; row < mine.count; row += mine.step, phase ^= 1) {
        ring.wait();
        float dy_kept[CHUNKS][VEC], h_kept[CHUNKS][VEC];  // past the end 0, as are the gains
        Raw<16> dsum_kept[DSUM ? CHUNKS : 1];
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of h (soon their mean), d^2, g and g * d
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            unpack<T, VEC>(ring.read(0, c), dy_kept[c]);
            unpack<T, VEC>(ring.read(1, c), h_kept[c]);
            if constexpr (DSUM) dsum_kept[c] = ring.read(2, c);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sums[0] += h_kept[c][i], sums[2] += dy_kept[c][i] * gain[c][i];
        }
        warp_reduce_pair<Sum>(sums[0], sums[2], group.threads);
        sums[0] = mean_of(sums[0], columns.own());
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const float centre = ring.has(c) ? sums[0] : 0.0f;
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = h_kept[c][i] - centre;
                sums[1] += d * d;
                sums[3] += dy_kept[c][i] * gain[c][i] * d;
            }
        }
        warp_reduce_pair<Sum>(sums[1], sums[3], group.threads);
        merge_warps<true>(sums, columns, group, scratch, phase);
        const float mean = sums[0];
        const float rstd = rsqrtf(sums[1] * inverse + epsilon);
        const float level = sums[2] * inverse * rstd;
        const float pull = sums[3] * inverse * rstd * rstd * rstd;
        T* const out_row = dh + row * cols + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float out[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = h_kept[c][i] - mean, scaled = dy_kept[c][i] * rstd;
                dweight[c][i] += scaled * d;
                dbias[c][i] += dy_kept[c][i];
                out[i] = scaled * gain[c][i] - (d * pull + level);
            }
            if constexpr (DSUM) {
                float extra[VEC];
                unpack<T, VEC>(dsum_kept[c], extra);
#pragma unroll
                for (int i = 0; i < VEC; ++i) out[i] += extra[i];
            }
            if (ring.has(c)) store<T, VEC>(out_row + c * pitch, out);
        }
        mine.next(row);
    }

    if (partial == nullptr) return;
    partial += blockIdx.x * partial_stride;
    const int sets = partial_stride > cols ? 2 : 1;
    if (group.count == 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (ring.has(c)) {
                store<float, VEC>(partial + column + c * pitch, dweight[c]);
                if (sets == 2) store<float, VEC>(partial + end + column + c * pitch, dbias[c]);
            }
        }
        return;
    }
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);  // [groups, 2, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (ring.has(c)) {
            float* own = sums + 2 * group.index * end + column + c * pitch;
            put_sums(own, dweight[c]);
            put_sums(own + end, dbias[c]);
        }
    }
    __syncthreads();
    add_rows(sums, group.count, 2 * end, sets * end, partial);
}

}  // namespace rtk
