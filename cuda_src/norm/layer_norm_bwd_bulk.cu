// Backward of layer normalisation (norm/layer_norm.cu) with rows loaded by TMA bulk copies (sm_90 and up).
#include "common/block_sums.cuh"
#include "norm/bulk_rows.cuh"
#include "norm/common.cuh"
#include "norm/moments.cuh"
#include "ptx/forget.cuh"

namespace rtk {

// Gains of a thread's vectors, converted each time they are needed: in registers, or (IN_SHARED) as they were loaded in
// slots of shared memory that belong to the thread, where registers do not suffice. `offset` is added to each.
template <typename T, int CHUNKS, bool IN_SHARED>
struct Gains {
    static constexpr int VEC = 16 / sizeof(T);
    float kept[IN_SHARED ? 1 : CHUNKS][VEC];
    ptx::SharedAddress slots;
    int apart;  // bytes from slot to slot
    bool weight_fp32;
    float offset;

    RTK_DEVICE Gains(const AskedGain<T, VEC> (&asked)[CHUNKS], bool fp32, float added, ptx::SharedAddress to, int bytes_apart)
        : slots(to), apart(bytes_apart), weight_fp32(fp32), offset(added) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if constexpr (IN_SHARED) {
                ptx::st_shared_16(slots + c * apart, asked[c].raw.part[0]);
                if (sizeof(T) < sizeof(float) && fp32)
                    ptx::st_shared_16(slots + (CHUNKS + c) * apart, asked[c].raw.part[asked[c].raw.kParts - 1]);
            } else {
                asked[c].get(fp32, added, kept[c]);
            }
        }
    }
    RTK_DEVICE void get(int c, float (&gain)[VEC]) const {
        if constexpr (IN_SHARED) {
            AskedGain<T, VEC> asked;
            asked.raw.part[0] = ptx::ld_shared_16(slots + c * apart);
            if (sizeof(T) < sizeof(float) && weight_fp32)
                asked.raw.part[asked.raw.kParts - 1] = ptx::ld_shared_16(slots + (CHUNKS + c) * apart);
            asked.get(weight_fp32, offset, gain);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) gain[i] = kept[c][i];
        }
    }
};

// The computation of layer_norm_bwd (norm/layer_norm_bwd.cu) with two or four vectors of a row per thread, but in one
// pass over them: dh, and a row of partial parameter gradients per block. For groups of whole warps and rows of at most
// CHUNKS * 512 16-byte vectors. With four, registers suffice for the gradients of parameters alone: a row is read from
// the ring twice, and gains are in shared memory, 64 bytes for each thread after the ring (twice that for a weight of
// fp32 beside a narrower T).
//
// Kernel arguments are loaded 64 bytes at a time, which takes a while. So two numbers share one argument (the first in
// its lower half), and those that the first loads need come first: rows and columns; row strides in bytes of dy and h;
// threads of a row, and stages of the ring + 256 * groups; stride of dsum, and flags (1: the weight is of fp32, 2: sums
// for a bias too); eps and offset, of fp32.
template <typename T, int CHUNKS, bool DSUM>
__global__ void __maxnreg__(128)
    layer_norm_bwd_bulk(const T* dy, const T* h, i64 rows_cols, i64 pitches, i64 threads_stages, const void* weight, T* dh,
                        float* partial, const T* dsum, i64 dsum_flags, i64 eps_offset) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr bool kReadsTwice = CHUNKS > 2;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) ShiftedScratch scratch;
    RowGroup group(lower(threads_stages));
    group.count = static_cast<int>(upper(threads_stages) >> 8);  // as it is, but not worked out
    const int end = static_cast<int>(upper(rows_cols));
    const int pitch = group.threads * VEC;
    const int column = group.thread * VEC;
    const bool weight_fp32 = upper(dsum_flags) & 1;
    BulkRows<T, CHUNKS, DSUM, false, true> mine(memory, group, dy, h, dsum, lower(rows_cols), end, lower(pitches), upper(pitches),
                                                lower(dsum_flags), upper(threads_stages) & 0xff);
    const auto& ring = mine.ring;
    AskedGain<T, VEC> asked[CHUNKS];
    mine.start(group, weight, weight_fp32, asked, [&] { count_columns(WarpColumns<VEC, CHUNKS>(group, end), scratch); });
    const float epsilon = __uint_as_float(lower(eps_offset));
    const float offset_or_one = weight == nullptr ? 1.0f : __uint_as_float(upper(eps_offset));
    const float inverse = reciprocal(static_cast<float>(end));
    const Gains<T, CHUNKS, kReadsTwice> gains(asked, weight_fp32, offset_or_one,
                                              ring.full + (group.count * ring.group_bytes() + ring.place), ring.apart);
    float dweight[CHUNKS][VEC], dbias[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = dbias[c][i] = 0.0f;
    }

    int phase = 0;
    for (int row = mine.first; row < mine.count; row += mine.step, phase ^= 1) {
        ring.wait();
        Raw<16> kept[DSUM ? 3 : 2][kReadsTwice ? 1 : CHUNKS];  // dy, h, dsum; past the end 0
        float d[VEC], v[VEC], gain[VEC];                       // of a vector: dy, and h minus what was subtracted
        const auto vector = [&](int input, int c) { return kReadsTwice ? ring.read(input, c) : kept[input][kReadsTwice ? 0 : c]; };
        if constexpr (!kReadsTwice) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int input = 0; input < mine.kInputs; ++input) kept[input][c] = ring.read(input, c);
            }
        }
        unpack<T, VEC>(vector(1, 0), v);
        float shift = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; ++i) shift += v[i] * (1.0f / VEC);
        shift = __shfl_sync(0xffffffffu, shift, 0);
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // sums of h - shift (later the mean of h), its square, g and g * (h - shift)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (kReadsTwice && c * ring.apart >= ring.bytes) break;  // keeps the compiler from loading all vectors first
            const float centre = ring.has(c) ? shift : 0.0f;
            unpack<T, VEC>(vector(0, c), d);
            unpack<T, VEC>(vector(1, c), v);
            gains.get(c, gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float away = v[i] - centre, g = d[i] * gain[i];
                sums[0] += away;
                sums[1] += away * away;
                sums[2] += g;
                sums[3] += g * away;
            }
        }
        merge_shifted(sums, shift, inverse, group, scratch, phase);
        if constexpr (kReadsTwice) {
            mine.ask_behind(row);
        } else {
            mine.ask(row);
        }
        const float mean = sums[0];
        const float rstd = finite_rstd(sums[1] * inverse + epsilon, mean);
        const float level = sums[2] * inverse * rstd;
        const float pull = sums[3] * inverse * rstd * rstd * rstd;
        T* const out_row = dh + rtk::product(row, end) + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (kReadsTwice && c * ring.apart >= ring.bytes) break;
            if constexpr (!kReadsTwice) ptx::forget(kept[0][c]), ptx::forget(kept[1][c]);  // unpacked again to save registers
            unpack<T, VEC>(vector(0, c), d);
            unpack<T, VEC>(vector(1, c), v);
            gains.get(c, gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                v[i] -= mean;
                dbias[c][i] += d[i];
                d[i] *= rstd;
                dweight[c][i] += d[i] * v[i];
                v[i] = d[i] * gain[i] - (v[i] * pull + level);
            }
            if constexpr (DSUM) {
                unpack<T, VEC>(vector(2, c), d);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[i] += d[i];
            }
            if (ring.has(c)) store<T, VEC>(out_row + c * pitch, v);
        }
        mine.ring.next_row();
    }

    if (partial == nullptr) return;
    const int width = upper(dsum_flags) & 2 ? 2 * end : end;
    partial += rtk::product(blockIdx.x, width);
    if (group.count == 1) {  // a single group needs no exchange through shared memory
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (ring.has(c)) {
                store<float, VEC>(partial + column + c * pitch, dweight[c]);
                if (width > end) store<float, VEC>(partial + end + column + c * pitch, dbias[c]);
            }
        }
        return;
    }
    const int apart = ring.group_bytes() / 4;
    float* sums = reinterpret_cast<float*>(memory + 8 * ring.kMaxStages);  // two rows in the ring of each group
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (ring.has(c)) {
            float* own = sums + group.index * apart + column + c * pitch;
            put_sums(own, dweight[c]);
            put_sums(own + end, dbias[c]);
        }
    }
    __syncthreads();
    add_few_rows(sums, group.count, apart, width, partial);
}

}  // namespace rtk
