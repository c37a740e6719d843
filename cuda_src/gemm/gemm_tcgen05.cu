// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) on sm_100a: products of tcgen05, operands
// by TMA, sums in tensor memory. Compiled and emulated, never run on a GPU: only backend="tcgen05" takes it.
//
// Grid: persistent, one block per SM, over tiles of 128 x COLS. Warps 0 to 3 finish tiles, a thread of warp 4 loads,
// a thread of warp 5 multiplies. A stage has 128 bytes of k, four products of 32 bytes each. There are two sets of sums
// in tensor memory, so that a tile is finished while the next one is computed. A stage is released, and sums are handed
// over, by commits: the tensor cores arrive at the mbarriers themselves.
//
// Scales of blocks (MXFP8: e8m0 per 32, NVFP4: e4m3 per 16) lie in blocks of 128 x 4, which are what tensor memory holds:
// they are copied as they are, to shared memory with the operands and from there by the thread that multiplies. Other
// scales multiply the sums. Numerics: fp32 sums over all of k, one rounding.
#include "common/pipeline.cuh"
#include "gemm/gemm_skinny_finish.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"

namespace rtk {

inline constexpr u32 kTensorRows = 128;
inline constexpr i64 kTensorAccumulate = 1;

// Instruction descriptors. Formats of kind f16: 0 fp16, 1 bf16; of 8-bit kinds: 0 e4m3, 1 e5m2; of NVFP4: 1 e2m1.
RTK_DEVICE constexpr u32 tensor_instruction(u32 a, u32 b, u32 columns) {
    return 1u << 4 | a << 7 | b << 10 | columns / 8 << 17 | kTensorRows / 16 << 24;
}
// `byte`: which of a word's four scales serves these 32 elements of k.
RTK_DEVICE constexpr u32 tensor_instruction_scaled(u32 format, u32 columns, bool e8m0, u32 byte) {
    return byte << 4 | format << 7 | format << 10 | columns / 8 << 17 | (e8m0 ? 1u : 0u) << 23 | kTensorRows / 16 << 24 | byte << 29;
}

struct E2m1Pair {};  // two codes in a byte

template <typename T, int KIND>
struct TensorTraits {
    static constexpr bool kScaled = KIND == ptx::kTensorMxFp8 || KIND == ptx::kTensorNvFp4;
    static constexpr int kDepth = KIND == ptx::kTensorF16 ? 64 : KIND == ptx::kTensorNvFp4 ? 256 : 128;  // of k, of a stage
    static constexpr int kBlocks = !kScaled ? 0 : KIND == ptx::kTensorNvFp4 ? 4 : 1;  // of scales, of an operand of a stage
    static constexpr u32 kFormat = is_same<T, bf16>::value || is_same<T, e5m2>::value || is_same<T, E2m1Pair>::value ? 1u : 0u;
    static constexpr int kColumns = 512;  // of tensor memory
};

template <typename T, int KIND, int COLS, int STAGES>
__global__ void __launch_bounds__(192, 1)
    gemm_tcgen05(const __grid_constant__ ptx::TensorMap a_map, const __grid_constant__ ptx::TensorMap b_map,
                 const u8* block_scale_a, const u8* block_scale_b, const float* scale_a, const float* scale_b,
                 const float* global_scale, const void* bias, const void* add, void* out, i64 m, i64 n, i64 k, i64 out_pitch,
                 i64 add_pitch, i64 scale_a_step, i64 scale_b_step, i64 flags, i64 types) {
    using Traits = TensorTraits<T, KIND>;
    constexpr u32 kABytes = kTensorRows * 128, kBBytes = COLS * 128, kScaleBytes = 2 * Traits::kBlocks * 512;
    constexpr u32 kStageBytes = kABytes + kBBytes + kScaleBytes;
    static_assert(2 * COLS + 8 * Traits::kBlocks <= Traits::kColumns, "sums and scales share tensor memory");
    static_assert(!Traits::kScaled || COLS == 128, "a block of scales is for 128 rows");
    static_assert(kStageBytes % 1024 == 0, "stages begin at multiples of the swizzle");
    extern __shared__ u8 memory[];
    const ptx::SharedAddress stages = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const Pipeline<STAGES> pipeline{stages + STAGES * kStageBytes};
    const ptx::SharedAddress sums_full = pipeline.barriers + Pipeline<STAGES>::kBytes, sums_empty = sums_full + 16;
    const ptx::SharedAddress place = sums_empty + 16;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = static_cast<int>(threadIdx.x) % kWarp;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(sums_full + 8 * i, 1);
            ptx::mbarrier_init(sums_empty + 8 * i, 128);
        }
        pipeline.init(1, 1);
    }
    if (warp == 5) ptx::tensor_alloc<Traits::kColumns>(place);
    ptx::tensor_fence_before();
    __syncthreads();
    ptx::tensor_fence_after();
    const u32 tensor = *reinterpret_cast<const volatile u32*>(memory + (place - ptx::shared_address(memory)));

    const u32 tile_rows = static_cast<u32>(ceil_div(m, kTensorRows)), tiles = tile_rows * static_cast<u32>(ceil_div(n, COLS));
    const int depth_blocks = static_cast<int>(ceil_div(k, Traits::kDepth));
    PipelineState<STAGES> state;
    PipelineState<2> sums;  // `stage`: which set
    if (warp == 4 && lane == 0) {
        ptx::tma_prefetch_map(a_map);
        ptx::tma_prefetch_map(b_map);
        const i64 scale_blocks = ceil_div(k, Traits::kDepth / (Traits::kBlocks > 0 ? Traits::kBlocks : 1));  // in a row of blocks
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const i32 row = static_cast<i32>(tile % tile_rows * kTensorRows), column = static_cast<i32>(tile / tile_rows * COLS);
            for (int i = 0; i < depth_blocks; ++i, state.advance()) {
                const ptx::SharedAddress stage = stages + state.stage * kStageBytes;
                const i64 first = static_cast<i64>(i) * Traits::kBlocks;
                const u32 bytes = 512 * static_cast<u32>(min(static_cast<i64>(Traits::kBlocks), scale_blocks - first));
                pipeline.acquire(state);
                const ptx::SharedAddress full = pipeline.expect(state, kABytes + kBBytes + (Traits::kScaled ? 2 * bytes : 0));
                constexpr int kPerBox = KIND == ptx::kTensorNvFp4 ? 128 : Traits::kDepth;  // elements of the map: bytes of two codes
                ptx::tma_load_2d(stage, a_map, full, i * kPerBox, row);
                ptx::tma_load_2d(stage + kABytes, b_map, full, i * kPerBox, column);
                if constexpr (Traits::kScaled) {
                    const ptx::SharedAddress scales = stage + kABytes + kBBytes;
                    ptx::bulk_load(scales, block_scale_a + (row / 128 * scale_blocks + first) * 512, bytes, full);
                    ptx::bulk_load(scales + kScaleBytes / 2, block_scale_b + (column / 128 * scale_blocks + first) * 512, bytes, full);
                }
            }
        }
    } else if (warp == 5 && lane == 0) {
        const u32 place_a = tensor + 2 * COLS, place_b = place_a + 4 * Traits::kBlocks;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, sums.advance()) {
            const u32 d = tensor + static_cast<u32>(sums.stage) * COLS;
            ptx::mbarrier_wait(sums_empty + 8 * sums.stage, sums.phase ^ 1u);
            ptx::tensor_fence_after();
            for (int i = 0; i < depth_blocks; ++i, state.advance()) {
                const ptx::SharedAddress stage = stages + state.stage * kStageBytes;
                pipeline.wait(state);
                ptx::tensor_fence_after();
                const u64 a = ptx::tensor_descriptor(stage), b = ptx::tensor_descriptor(stage + kABytes);
                if constexpr (Traits::kScaled) {
                    const ptx::SharedAddress scales = stage + kABytes + kBBytes;
                    // Scales behind the end of k are not defined, so products there are left out.
                    const int steps = static_cast<int>(min(4ll, ceil_div(k - static_cast<i64>(i) * Traits::kDepth, Traits::kDepth / 4)));
                    for (int block = 0; block < Traits::kBlocks && (block == 0 || block < steps); ++block) {
                        ptx::tensor_copy_scales(place_a + 4 * block, ptx::scales_descriptor(scales + 512 * block));
                        ptx::tensor_copy_scales(place_b + 4 * block, ptx::scales_descriptor(scales + kScaleBytes / 2 + 512 * block));
                    }
                    for (int step = 0; step < steps; ++step) {
                        constexpr bool kMx = KIND == ptx::kTensorMxFp8;
                        const u32 byte = kMx ? static_cast<u32>(step) : 0u, words = kMx ? 0u : 4u * static_cast<u32>(step);
                        ptx::tensor_product_scaled<KIND>(
                            d, a + 2 * step, b + 2 * step, tensor_instruction_scaled(Traits::kFormat, COLS, kMx, byte),
                            place_a + words, place_b + words, i + step != 0);
                    }
                } else {
#pragma unroll
                    for (int step = 0; step < 4; ++step)
                        ptx::tensor_product<KIND>(d, a + 2 * step, b + 2 * step,
                                                  tensor_instruction(Traits::kFormat, Traits::kFormat, COLS), i + step != 0);
                }
                ptx::tensor_commit(pipeline.empty(state));
            }
            ptx::tensor_commit(sums_full + 8 * sums.stage);
        }
    } else if (warp < 4) {
        auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };
        const SkinnyStore results = {add, out, out_pitch, add_pitch, type(1), type(2), type(3), (flags & kTensorAccumulate) != 0, false};
        constexpr int kPitch = kWarp + 1;
        float* const staged = reinterpret_cast<float*>(memory + (place + 16 - ptx::shared_address(memory))) + warp * kWarp * kPitch;
        const float global = global_scale == nullptr ? 1.0f : *global_scale;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, sums.advance()) {
            const i64 first_row = static_cast<i64>(tile % tile_rows) * kTensorRows + warp * kWarp, row = first_row + lane;
            const i64 first_column = static_cast<i64>(tile / tile_rows) * COLS;
            const float of_row = row < m && scale_a != nullptr ? scale_a[row * scale_a_step] : 1.0f;
            ptx::mbarrier_wait(sums_full + 8 * sums.stage, sums.phase);
            ptx::tensor_fence_after();
            for (int c = 0; c < COLS && first_column + c < n; c += kWarp) {
                u32 words[kWarp];
                ptx::tensor_load(tensor + (static_cast<u32>(warp * kWarp) << 16) + static_cast<u32>(sums.stage * COLS + c), words);
                // Transposed through shared memory: a lane has one column then, and the warp stores whole rows.
#pragma unroll
                for (int j = 0; j < kWarp; ++j) staged[lane * kPitch + j] = __uint_as_float(words[j]);
                __syncwarp();
                const i64 column = first_column + c + lane;
                float times = global, plus = 0.0f;
                if (column < n) {
                    if (scale_b != nullptr) times *= scale_b[column * scale_b_step];
                    if (bias != nullptr) plus = skinny_load(bias, column, type(0));
                }
#pragma unroll 1
                for (int r = 0; r < kWarp && first_row + r < m; ++r) {
                    const float v = staged[r * kPitch + lane] * times * __shfl_sync(0xffffffffu, of_row, r) + plus;
                    if (column < n) results.put(first_row + r, column, v, 1.0f);
                }
                __syncwarp();
            }
            ptx::tensor_fence_before();
            ptx::mbarrier_arrive(sums_empty + 8 * sums.stage);
        }
    }
    ptx::tensor_fence_before();
    __syncthreads();
    ptx::tensor_fence_after();
    if (warp == 5) ptx::tensor_free<Traits::kColumns>(tensor);
}

}  // namespace rtk
