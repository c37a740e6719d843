// Backward of RMS normalisation (norm/rms_norm.cu) with rows loaded by TMA bulk copies (sm_90 and up).
#include "common/block_sums.cuh"
#include "norm/bulk_rows.cuh"

namespace rtk {

// Registers of a thread with one vector of a row, for blocks of up to 768 threads; for sm_120 the compiler needs more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
inline constexpr int kOneVectorRegisters = 80;
#else
inline constexpr int kOneVectorRegisters = 72;
#endif

// The computation of rms_norm_bwd: dh, and a row of partial weight gradients per block. For groups of whole warps, rows
// of at most CHUNKS * 512 16-byte vectors, and fewer than 2^30 of them. The weight (which may be null) is of T, or fp32
// if `weight_fp32`. With CHUNKS 1 every group may have a helper warp that fetches its rows: then the block has more
// threads than its groups. Blocks of at most 768 (CHUNKS 1) or 512 threads. With CHUNKS 4 registers do not suffice for a
// row, which is read from the ring twice.
template <typename T, int CHUNKS, bool DSUM>
__global__ void __maxnreg__(CHUNKS == 1 ? kOneVectorRegisters : CHUNKS == 2 ? 112 : 128)
    rms_norm_bwd_bulk(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* partial, i64 rows,
                      i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, i64 weight_fp32, double eps,
                      double offset, i64 stages, i64 groups) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr bool HELPED = CHUNKS == 1;
    constexpr bool kReadsTwice = CHUNKS > 2;
    constexpr bool kRequestsFirst = !DSUM && !kReadsTwice;  // with dsum there are no registers left for that
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group = HELPED ? RowGroup(threads_per_row, groups) : RowGroup(threads_per_row);
    const int end = static_cast<int>(cols);
    const int pitch = group.threads * VEC;
    const int column = group.thread * VEC;
    const auto pitch_of = [](i64 stride) { return static_cast<u32>(stride * sizeof(T)); };
    BulkRows<T, CHUNKS, DSUM, HELPED> mine(memory, group, dy, h, dsum, rows, cols, pitch_of(dy_stride), pitch_of(h_stride),
                                           pitch_of(dsum_stride), stages);
    const auto& ring = mine.ring;
    AskedGain<T, VEC> asked[CHUNKS];
    mine.start(group, weight, weight_fp32, asked, [] {});
    const float epsilon = static_cast<float>(eps);
    const float shift = weight == nullptr ? 1.0f : static_cast<float>(offset);
    const float inverse = 1.0f / static_cast<float>(cols);
    float gain[CHUNKS][VEC], dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = 0.0f;
        asked[c].get(weight_fp32, shift, gain[c]);
    }

    if (HELPED && group.helps()) mine.serve(group);
    int phase = 0;
    for (int row = mine.first; row < mine.count; row += mine.step, phase ^= 1) {
        ring.wait();
        constexpr int kKept = kReadsTwice ? 1 : CHUNKS;
        float dy_kept[kKept][VEC], h_kept[kKept][VEC];
        Raw<16> dsum_kept[DSUM ? kKept : 1];
        const auto load = [&](int c) {
            unpack<T, VEC>(ring.read(0, c), dy_kept[c % kKept]);
            unpack<T, VEC>(ring.read(1, c), h_kept[c % kKept]);
            if constexpr (DSUM && !kReadsTwice) dsum_kept[c] = ring.read(2, c);
        };
        float square = 0.0f, product = 0.0f;  // sums of h^2 and g * h
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            load(c);
            const float(&d)[VEC] = dy_kept[c % kKept];
            const float(&v)[VEC] = h_kept[c % kKept];
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                square += v[i] * v[i];
                product += d[i] * gain[c][i] * v[i];
            }
        }
        group_reduce_pair<Sum, true>(square, product, group, scratch, phase);
        if (kRequestsFirst) mine.ask(row);
        if (kReadsTwice) mine.ask_behind(row);
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        T* const out_row = dh + rtk::product(row, end) + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (kReadsTwice) load(c);
            const float(&d)[VEC] = dy_kept[c % kKept];
            const float(&v)[VEC] = h_kept[c % kKept];
            float out[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float scaled = d[i] * rstd;
                dweight[c][i] += scaled * v[i];
                out[i] = scaled * gain[c][i] - v[i] * pull;
            }
            if constexpr (DSUM) {
                float extra[VEC];
                unpack<T, VEC>(kReadsTwice ? ring.read(2, c) : dsum_kept[c % kKept], extra);
#pragma unroll
                for (int i = 0; i < VEC; ++i) out[i] += extra[i];
            }
            if (ring.has(c)) store<T, VEC>(out_row + c * pitch, out);
        }
        if (!kRequestsFirst && !kReadsTwice) mine.ask(row);
        mine.ring.next_row();
    }

    if (partial == nullptr) return;
    partial += blockIdx.x * cols;
    if constexpr (kReadsTwice) {  // one group; others of its warps may still read from the ring
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (ring.has(c)) store<float, VEC>(partial + column + c * pitch, dweight[c]);
        return;
    }
    const int apart = ring.group_bytes() / 4;
    float* sums = reinterpret_cast<float*>(memory + 8 * ring.kMaxStages);  // a row in the ring of each group
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (ring.has(c)) put_sums(sums + group.index * apart + column + c * pitch, dweight[c]);
    __syncthreads();
    add_rows(sums, group.count, apart, end, partial);
}

}  // namespace rtk
