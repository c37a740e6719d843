// Products of the router with mma.sync, for every target: out[m, n] = sum over k of A[m, k] B[n, k], 16-bit operands,
// fp32 sums.
//
// A and B are sums of terms (gemm/terms.cuh), `*_step` elements apart; `pairs` lists, four bits each, which terms are
// multiplied: A's in bits 0-1, B's in bits 2-3, smallest products first. An operand is stored with rows of k ([m, k])
// or, kAcross, with rows along the result ([k, m]). Rows are multiples of 16 bytes long, 16-byte aligned, and zero (or
// the start of the next row) from k on.
//
// A block computes a 128x128 tile of one split of k: 8 warps of 64x32 each, a ring of three stages of 64 k of both
// operands filled by cp.async. Tensor cores drop low bits as they accumulate, so every `promote` stages their sums go
// to fp32 registers. Results: fp32 (kind 0, split s at out + s * m * n), bf16 (1), fp16 (2), [m, n] dense; fp32 ones
// times scale[n] (scale_by_row: scale[m]), plus bias[n].
#include "gemm/terms.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kMmaThreads = 256;
inline constexpr int kMmaTile = 128;
inline constexpr int kMmaDepth = 64;
inline constexpr int kMmaStages = 3;
inline constexpr int kMmaBytes = kMmaTile * kMmaDepth * 2;  // one operand of one stage
inline constexpr int kMmaPitch = kMmaTile + 4;              // of the result in shared memory

template <bool kAcross>
struct MmaOperand {
    const u8* data;   // of element (first, 0)
    i64 pitch, step;  // bytes
    int rows;         // along the result, from the first of this tile
    int depth;

    // Loads k = k0 ... k0 + 63 of a term: 1024 vectors of 16 bytes, swizzled within 128 bytes.
    RTK_DEVICE void fetch(ptx::SharedAddress to, int term, int k0) const {
#pragma unroll
        for (int i = 0; i < kMmaBytes / 16 / kMmaThreads; ++i) {
            const int vector = threadIdx.x + i * kMmaThreads;
            if constexpr (kAcross) {  // two tiles of 64 rows (k) by 128 bytes
                const int half = vector / 512, k = vector % 512 / 8, c = vector % 8;
                const bool here = k0 + k < depth && half * 64 + c * 8 < rows;
                const u8* from = data + term * step + static_cast<i64>(k0 + k) * pitch + half * 128 + c * 16;
                ptx::cp_async_16_or_zero(to + half * 8192 + k * 128 + ((c ^ (k & 7)) << 4), here ? from : data, here);
            } else {  // 128 rows by 128 bytes (k)
                const int row = vector / 8, c = vector % 8;
                const bool here = row < rows && k0 + c * 8 < depth;
                const u8* from = data + term * step + row * pitch + static_cast<i64>(k0) * 2 + c * 16;
                ptx::cp_async_16_or_zero(to + row * 128 + ((c ^ (row & 7)) << 4), here ? from : data, here);
            }
        }
    }

    // Four 8x8 matrices: those of `first` + 8 * major and k + 8 * minor, in the order minor, major or major, minor.
    template <bool kMajorFirst>
    RTK_DEVICE static void fragments(u32 (&r)[4], const u8* tile, int first, int k) {
        const int lane = threadIdx.x % kWarp, j = lane % 8;
        const int inner = lane / 8 % 2, outer = lane / 16;
        const int row = first + 8 * (kMajorFirst ? inner : outer);
        const int column = k + 8 * (kMajorFirst ? outer : inner);
        if constexpr (kAcross) {
            const int at = column + j, c = row % 64 / 8;
            ptx::ldmatrix_x4_trans(r, tile + row / 64 * 8192 + at * 128 + ((c ^ (at & 7)) << 4));
        } else {
            const int at = row + j, c = column / 8;
            ptx::ldmatrix_x4(r, tile + at * 128 + ((c ^ (at & 7)) << 4));
        }
    }
};

template <bool kAcross, typename T>
RTK_DEVICE MmaOperand<kAcross> mma_operand(const T* data, i64 first, i64 all, i64 pitch, i64 step, int depth) {
    const int rows = static_cast<int>(min(all - first, static_cast<i64>(kMmaTile)));
    data += kAcross ? first : first * pitch;
    return {reinterpret_cast<const u8*>(data), pitch * 2, step * 2, rows, depth};
}

template <typename T, bool kAcrossA, bool kAcrossB>
__global__ void __launch_bounds__(kMmaThreads, 1)
    router_mma(const T* a, const T* b, void* out, const float* bias, const float* scale, i64 m, i64 n, i64 k,
               i64 a_pitch, i64 b_pitch, i64 a_step, i64 b_step, i64 pairs, i64 pair_count, i64 blocks_per_split,
               i64 promote, i64 kind, i64 scale_by_row) {
    extern __shared__ __align__(128) u8 memory[];
    ptx::launch_dependents();
    const int tiles_n = static_cast<int>(ceil_div(n, kMmaTile));
    const i64 m0 = static_cast<i64>(blockIdx.x / tiles_n) * kMmaTile;
    const i64 n0 = static_cast<i64>(blockIdx.x % tiles_n) * kMmaTile;
    const int depth = static_cast<int>(k);
    const auto left = mma_operand<kAcrossA>(a, m0, m, a_pitch, a_step, depth);
    const auto right = mma_operand<kAcrossB>(b, n0, n, b_pitch, b_step, depth);
    const int first = static_cast<int>(blockIdx.y * blocks_per_split);
    const int blocks = min(static_cast<int>(blocks_per_split), (depth + kMmaDepth - 1) / kMmaDepth - first);
    const int products = static_cast<int>(pair_count), steps = blocks * products;
    const ptx::SharedAddress base = ptx::shared_address(memory);
    int block = first, product = 0, slot = 0;  // of the next fetch
    auto fetch = [&]() {
        if (block < first + blocks) {
            const int pair = static_cast<int>(pairs >> (4 * product));
            left.fetch(base + slot * 2 * kMmaBytes, pair & 3, block * kMmaDepth);
            right.fetch(base + slot * 2 * kMmaBytes + kMmaBytes, pair >> 2 & 3, block * kMmaDepth);
            if (++product == products) product = 0, ++block;
            if (++slot == kMmaStages) slot = 0;
        }
        ptx::cp_async_commit();
    };
    ptx::wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < kMmaStages - 1; ++i) fetch();

    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
    float sums[4][4][4], part[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; ++i) (&sums[0][0][0])[i] = 0.0f, (&part[0][0][0])[i] = 0.0f;
    int now = 0;
    int until = static_cast<int>(promote);
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<kMmaStages - 2>();
        __syncthreads();
        fetch();
        const u8* tile_a = memory + now * 2 * kMmaBytes;
        const u8* tile_b = tile_a + kMmaBytes;
        if (++now == kMmaStages) now = 0;
#pragma unroll 2
        for (int ks = 0; ks < kMmaDepth; ks += 16) {
            u32 fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) left.template fragments<true>(fa[i], tile_a, warp_m + 16 * i, ks);
#pragma unroll
            for (int j = 0; j < 2; ++j) right.template fragments<false>(fb[j], tile_b, warp_n + 16 * j, ks);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 column[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
                    if constexpr (is_same<T, bf16>::value) {
                        ptx::mma_m16n8k16_bf16(part[i][j], fa[i], column);
                    } else {
                        ptx::mma_m16n8k16_f16(part[i][j], fa[i], column);
                    }
                }
        }
        if (--until == 0 || step + 1 == steps) {
            until = static_cast<int>(promote);
#pragma unroll
            for (int i = 0; i < 64; ++i) (&sums[0][0][0])[i] += (&part[0][0][0])[i], (&part[0][0][0])[i] = 0.0f;
        }
    }

    // Through shared memory, so that whole rows are written.
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* tile = reinterpret_cast<float*>(memory);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                tile[(warp_m + 16 * i + g + e / 2 * 8) * kMmaPitch + warp_n + 8 * j + 2 * t + e % 2] = sums[i][j][e];
    __syncthreads();
    float* out_fp32 = static_cast<float*>(out) + blockIdx.y * m * n;
    u16* out_16bit = static_cast<u16*>(out);
#pragma unroll 1
    for (int row = warp; row < left.rows; row += kMmaThreads / kWarp) {
#pragma unroll 1
        for (int column = lane; column < right.rows; column += kWarp) {
            float value = tile[row * kMmaPitch + column];
            if (scale != nullptr) value *= scale_by_row ? 1.0f / fp16_factor(scale[m0 + row]) : scale[n0 + column];
            if (bias != nullptr) value += bias[n0 + column];
            const i64 at = (m0 + row) * n + n0 + column;
            if (kind == 0) {
                out_fp32[at] = value;
            } else {
                out_16bit[at] = static_cast<u16>(kind == 1 ? ptx::cvt_bf16x2(value, 0.0f) : ptx::cvt_f16x2(value, 0.0f));
            }
        }
    }
}

}  // namespace rtk
