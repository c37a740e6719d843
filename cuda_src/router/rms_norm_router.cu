// RMS norm of rows, their e4m3 codes and the router's logits in one kernel (sm_90a): y = x * rstd * gain with gain =
// offset + weight, rounded to T; codes from the same values in fp32, one scale per 128 columns of a row (recipe:
// common/fp8_scale.cuh); logits[m, e] = sum over k of y[m, k] W[e, k], in fp32, from the rounded y. x [rows, cols] has
// any row stride; y and q are dense.
//
// A block owns 64 rows and all experts, at most 256. It passes over x twice, in slabs of 128 columns in shared memory:
// first for sums of squares; then a slab is normalised in place, which makes it an operand of the products, and is
// stored as y and codes from registers. As much of x as fits stays in between; the second pass begins with it, and the
// rest is loaded again, from L2. One warpgroup multiplies, three produce slabs (one each), two more threads issue TMA
// loads of x and W. The passes are one sequence of copies l = 0, 1, ...: slab l modulo their number, to slot l %
// kSlots.
#include "common/fp8_scale.cuh"
#include "gemm/operand.cuh"
#include "norm/norm_fp8_stats.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "quant/tile.cuh"

namespace rtk {

inline constexpr int kNormThreads = 640;  // mirrored in ops/router/rms_norm_router_plan.py
inline constexpr int kNormRows = 64;
inline constexpr int kSlab = 128;  // columns
inline constexpr int kSlots = 6;
inline constexpr int kStages = 4;
inline constexpr u32 kBoxBytes = kNormRows * kTileRow;  // 64 columns; a slab is two
inline constexpr u32 kSlabBytes = 2 * kBoxBytes;
inline constexpr u32 kWeightBytes = 2 * 128 * kTileRow;  // 256 experts, 64 columns

inline constexpr int kProductWarps = 4;
inline constexpr int kMakers = 3;
inline constexpr int kMakerThreads = 128;
inline constexpr int kMakerWarps = kMakerThreads / kWarp;
inline constexpr int kAllMakerWarps = kMakers * kMakerWarps;
inline constexpr int kMakerRows = kMakerThreads / 16;  // at a time, 16 bytes a thread
inline constexpr int kBatch = 4;                     // 16-byte vectors of a thread that are quantised together
static_assert(kSlots % kMakers == 0, "a slot belongs to one maker, which then sees all phases of its barriers");

// Addresses in shared memory, and which slab is where.
struct NormRouterShared {
    ptx::SharedAddress slots, ring, barriers;
    u8* generic;  // the same as `slots`
    int slabs, reread;

    RTK_DEVICE NormRouterShared(u8* memory, i64 cols) {
        slots = ptx::aligned_up<1024>(ptx::shared_address(memory));
        generic = memory + (slots - ptx::shared_address(memory));
        ring = slots + kSlots * kSlabBytes;
        barriers = ring + kStages * kWeightBytes;
        slabs = static_cast<int>(ceil_div(cols, kSlab));
        reread = max(slabs - kSlots, 0);  // the first ones are read in both passes
    }
    RTK_DEVICE ptx::SharedAddress slot(int l) const { return slots + l % kSlots * kSlabBytes; }
    RTK_DEVICE int slab(int l) const { return l < slabs ? l : l - slabs; }
    // Barriers of a slot: x has arrived; its squares are summed, and it may be overwritten; y is ready; y has been
    // multiplied.
    RTK_DEVICE ptx::SharedAddress full(int l) const { return barriers + 8 * (l % kSlots); }
    RTK_DEVICE ptx::SharedAddress summed(int l) const { return full(l) + 8 * kSlots; }
    RTK_DEVICE ptx::SharedAddress ready(int l) const { return full(l) + 8 * 2 * kSlots; }
    RTK_DEVICE ptx::SharedAddress spent(int l) const { return full(l) + 8 * 3 * kSlots; }
    RTK_DEVICE RingBarriers weights() const { return {barriers + 8 * 4 * kSlots, kStages}; }
    RTK_DEVICE float* sums() const {  // [kMakers][kNormRows], then 1/rms [kNormRows]
        return reinterpret_cast<float*>(generic + (barriers - slots) + 8 * (4 * kSlots + 2 * kStages));
    }
    // Phases of barriers that are used once per copy l, and once per copy of the second pass.
    RTK_DEVICE u32 phase(int l) const { return l / kSlots & 1; }
    RTK_DEVICE u32 second_phase(int l) const { return (l - reread) / kSlots & 1; }
};

// ---- two threads: x and W into shared memory ------------------------------------------------------------------------

RTK_DEVICE void fetch_x(const NormRouterShared& shared, const ptx::TensorMap& x, i32 row) {
    for (int l = 0; l < shared.slabs + shared.reread; ++l) {
        const int before = l - kSlots;
        if (before >= shared.reread) {
            ptx::mbarrier_wait(shared.spent(before), shared.second_phase(before));
        } else if (before >= 0) {
            ptx::mbarrier_wait(shared.summed(before), shared.phase(before));
        }
        ptx::mbarrier_arrive_expect(shared.full(l), kSlabBytes);
        for (int half = 0; half < 2; ++half)
            ptx::tma_load_2d(shared.slot(l) + half * kBoxBytes, x, shared.full(l), shared.slab(l) * kSlab + half * 64,
                             row);
    }
}

// Boxes have as many rows as there are experts, because rows outside of the tensor cost time too. The rest of a stage
// only affects columns that are not stored.
RTK_DEVICE void fetch_weight(const NormRouterShared& shared, const ptx::TensorMap& weight, u32 experts) {
    const RingBarriers ring = shared.weights();
    RingPlace at{kStages, 0, 1};
    for (int i = 0; i < 2 * shared.slabs; ++i, at.next()) {
        ptx::mbarrier_wait(ring.empty(at.stage), at.phase);
        ptx::mbarrier_arrive_expect(ring.full(at.stage), experts * kTileRow);
        ptx::tma_load_2d(shared.ring + at.stage * kWeightBytes, weight, ring.full(at.stage),
                         shared.slab(shared.reread + i / 2) * kSlab + i % 2 * 64, 0);
    }
}

// ---- one warpgroup: products ----------------------------------------------------------------------------------------

template <typename T>
RTK_DEVICE void multiply(const NormRouterShared& shared, const ptx::TensorMap& logits, int warp, int lane,
                         i32 first_row) {
    const RingBarriers ring = shared.weights();
    float sums[2][64];
    RingPlace at{kStages};
    int last_stage = 0;
    for (int l = shared.reread; l < shared.reread + shared.slabs; ++l) {
        ptx::mbarrier_wait(shared.ready(l), shared.second_phase(l));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ptx::mbarrier_wait(ring.full(at.stage), at.phase);
            const u64 a = k_major_descriptor(shared.slot(l) + half * kBoxBytes);
            const u64 b = k_major_descriptor(shared.ring + at.stage * kWeightBytes);
            const bool begun = l != shared.reread || half != 0;
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockDepth / 16; ++k)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    ptx::wgmma_shared<T, false>(sums[n], a + k * kNextKMajor,
                                                b + n * (kWeightBytes / 2 >> 4) + k * kNextKMajor, begun || k != 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if (begun) ring.release(last_stage, lane);
            if (begun && half == 0 && lane == 0) ptx::mbarrier_arrive(shared.spent(l - 1));
            last_stage = at.stage;
            at.next();
        }
    }
    ptx::wgmma_wait<0>();

    // Stored through the memory of W: eight boxes of 32 columns, rows of 128 bytes as TMA needs them.
    ptx::named_barrier_sync(1, kProductWarps * kWarp);
    const int t = lane % 4, row = warp * 16 + lane / 4;
    u8* own = shared.generic + (shared.ring - shared.slots) + row * kTileRow + t % 2 * 8;
#pragma unroll
    for (int j = 0; j < 32; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2*>(own + j / 4 * kBoxBytes + 8 * r * kTileRow +
                                       (((j % 4 * 2 + t / 2) ^ (row & 7)) << 4)) =
                make_float2(sums[j / 16][4 * (j % 16) + 2 * r], sums[j / 16][4 * (j % 16) + 2 * r + 1]);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1, kProductWarps * kWarp);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 8; ++i) ptx::tma_store_2d(logits, shared.ring + i * kBoxBytes, 32 * i, first_row);
        ptx::bulk_store_commit();
        ptx::bulk_store_wait_read();
    }
}

// ---- three makers: sums of squares, then y and codes -----------------------------------------------------------------

// A thread of a maker has the 16 bytes `vector` of rows `row`, row + kMakerRows, ... of a slab.
struct Maker {
    int thread, lane, maker, vector, row;
    u32 offset;  // of its first 16 bytes in a slot

    RTK_DEVICE Maker() {
        thread = static_cast<int>(threadIdx.x) - kProductWarps * kWarp;
        lane = thread % kWarp;
        maker = __shfl_sync(0xffffffffu, thread / kMakerThreads, 0);  // shuffled so that the compiler knows it is uniform
        vector = thread % 16;
        row = thread % kMakerThreads / 16;
        offset = vector / 8 * kBoxBytes + row * kTileRow + ((vector % 8 ^ (row & 7)) << 4);
    }
};

template <typename T>
RTK_DEVICE void sum_squares(const NormRouterShared& shared, const Maker& own, float count, float eps, float* rstd_at,
                            int rows_here) {
    constexpr int kRowsPerThread = kNormRows / kMakerRows;
    float total[kRowsPerThread];
#pragma unroll
    for (float& t : total) t = 0.0f;
    for (int l = own.maker; l < shared.slabs; l += kMakers) {
        ptx::mbarrier_wait(shared.full(l), shared.phase(l));
        const ptx::SharedAddress from = shared.slot(l) + own.offset;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            float h[8];
            unpack<T, 8>(ptx::ld_shared_16(from + r * kMakerRows * kTileRow), h);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[r] += h[i] * h[i];
        }
        __syncwarp();
        if (l < shared.reread && own.lane == 0) ptx::mbarrier_arrive(shared.summed(l));
    }
    float* sums = shared.sums();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
        for (int step = 8; step; step /= 2) total[r] += __shfl_xor_sync(0xffffffffu, total[r], step);
        if (own.vector == 0) sums[own.maker * kNormRows + own.row + kMakerRows * r] = total[r];
    }
    ptx::named_barrier_sync(2, kAllMakerWarps * kWarp);
    if (own.thread < kNormRows) {
        float sum = sums[own.thread];
#pragma unroll
        for (int maker = 1; maker < kMakers; ++maker) sum += sums[maker * kNormRows + own.thread];
        const float rstd = rstd_of(sum, count, eps);
        sums[kMakers * kNormRows + own.thread] = rstd;
        if (own.thread < rows_here) rstd_at[own.thread] = rstd;
    }
    ptx::named_barrier_sync(2, kAllMakerWarps * kWarp);
}

// Pointers are to the block's first row. The scale of row m, group j goes to scale[m * scale_row + j * scale_group].
template <typename T>
RTK_DEVICE void make_slabs(const NormRouterShared& shared, const Maker& own, const void* weight, bool weight_fp32,
                           float offset, T* y, e4m3* q, float* scale, int rows_here, i64 cols, i64 scale_row,
                           i64 scale_group, bool pow2) {
    const float* rstd = shared.sums() + kMakers * kNormRows + own.row;
    const int mine = own.vector % kBatch;  // the row of a batch whose scale this thread computes
    const i64 step = kMakerRows * cols, origin = own.row * cols + own.vector * 8;
    scale += (own.row + kMakerRows * mine) * scale_row;
    const int first = shared.reread + (own.maker + kMakers - shared.reread % kMakers) % kMakers;
    for (int l = first; l < shared.reread + shared.slabs; l += kMakers) {
        const int slab = shared.slab(l), column = slab * kSlab + own.vector * 8;
        float gain[8];
#pragma unroll
        for (float& g : gain) g = 0.0f;
        if (column < cols) load_any_gain<T, 8>(weight, weight_fp32, column, offset, gain);
        int left = rows_here - own.row;
        T* to_y = y + origin + slab * kSlab;
        e4m3* to_q = q + origin + slab * kSlab;
        float* to_scale = scale + slab * scale_group;
        ptx::SharedAddress place = shared.slot(l) + own.offset;
        ptx::mbarrier_wait(shared.full(l), shared.phase(l));
#pragma unroll 1
        for (int batch = 0; batch < kNormRows / kMakerRows; batch += kBatch) {
            float v[kBatch][8];
#pragma unroll
            for (int r = 0; r < kBatch; ++r, to_y += step) {
                const ptx::SharedAddress at = place + r * kMakerRows * kTileRow;
                const float by = rstd[(batch + r) * kMakerRows];
                unpack<T, 8>(ptx::ld_shared_16(at), v[r]);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[r][i] = v[r][i] * by * gain[i];
                const Raw<16> packed = pack<T, 8>(v[r]);
                ptx::st_shared_16(at, packed);
                if (column < cols && kMakerRows * r < left) ptx::st<16>(to_y, packed);
            }
            place += kBatch * kMakerRows * kTileRow;
            if (batch + kBatch == kNormRows / kMakerRows) {
                ptx::fence_async_shared();
                __syncwarp();
                if (own.lane == 0) ptx::mbarrier_arrive(shared.ready(l));
            }

            // Maxima that ignore NaN but not infinities; the rare thread that met an infinity repeats this without
            // infinities.
            float amax[kBatch], overall = 0.0f;
#pragma unroll
            for (int r = 0; r < kBatch; ++r) {
                amax[r] = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) amax[r] = fmaxf(amax[r], fabsf(v[r][i]));
                overall = fmaxf(overall, amax[r]);
            }
            if (overall == __uint_as_float(0x7f800000u)) {
#pragma unroll
                for (int r = 0; r < kBatch; ++r) amax[r] = finite_amax(v[r]);
            }
            const float row_scale = fp8_scale<e4m3>(scattered_max<kBatch, 16>(amax, own.thread), pow2);
            const float inverse = inverse_scale(row_scale);
            if (own.vector < kBatch && kMakerRows * mine < left) *to_scale = row_scale;
            to_scale += kBatch * kMakerRows * scale_row;
#pragma unroll
            for (int r = 0; r < kBatch; ++r, to_q += step) {
                const Raw<8> codes = quantized<e4m3>(v[r], __shfl_sync(0xffffffffu, inverse, r, 16));
                if (column < cols && kMakerRows * r < left) ptx::st<8>(to_q, codes);
            }
            left -= kBatch * kMakerRows;
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kNormThreads, 1)
    norm_router(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ ptx::TensorMap router,
                const __grid_constant__ ptx::TensorMap logits, const void* weight, T* y, e4m3* q, float* scale,
                float* rstd, i64 rows, i64 cols, i64 experts, i64 weight_fp32, i64 scale_row, i64 scale_group, i64 pow2,
                double eps, double offset) {
    extern __shared__ u8 memory[];
    const NormRouterShared shared(memory, cols);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // shuffled so that the compiler knows it is uniform
    const int lane = threadIdx.x % kWarp;
    const i64 m0 = static_cast<i64>(blockIdx.x) * kNormRows;

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
            ptx::mbarrier_init(shared.full(slot), 1);
            ptx::mbarrier_init(shared.summed(slot), kMakerWarps);
            ptx::mbarrier_init(shared.ready(slot), kMakerWarps);
            ptx::mbarrier_init(shared.spent(slot), kProductWarps);
        }
        shared.weights().init(kProductWarps);
        ptx::mbarrier_fence_init();
        const u32 used = static_cast<u32>(experts) * kTileRow;
        for (int stage = 0; stage < kStages; ++stage)
            ptx::leave_undefined(shared.ring + stage * kWeightBytes + used, kWeightBytes - used);
    }
    __syncthreads();

    if (warp < kProductWarps) {
        ptx::registers_take<168>();  // what the last warpgroup passes on
        multiply<T>(shared, logits, warp, lane, static_cast<i32>(m0));
    } else if (warp < kProductWarps + kAllMakerWarps) {
        const Maker own;
        const int rows_here = static_cast<int>(min(rows - m0, static_cast<i64>(kNormRows)));
        sum_squares<T>(shared, own, static_cast<float>(static_cast<int>(cols)), static_cast<float>(eps), rstd + m0,
                       rows_here);
        make_slabs<T>(shared, own, weight, weight_fp32 != 0, static_cast<float>(offset), y + m0 * cols, q + m0 * cols,
                      scale + m0 * scale_row, rows_here, cols, scale_row, scale_group, pow2 != 0);
    } else {
        ptx::registers_give<24>();
        constexpr int kHelper = kProductWarps + kAllMakerWarps;
        if (warp == kHelper && lane == 0) fetch_x(shared, x, static_cast<i32>(m0));
        if (warp == kHelper + 1 && lane == 0) fetch_weight(shared, router, static_cast<u32>(experts));
    }
}

}  // namespace rtk
