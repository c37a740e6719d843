// Codes by rows for moe_permute_fp8. They depend on the token alone, not on the expert: a warp computes them once and
// writes them to every row of the token. Scales are left in token order, [tokens, groups]: scattered to their final
// places they would be as many requests as all the codes. moe_permute_fp8_scales moves them there, coalesced, together
// with the probabilities.
#include "common/reduce.cuh"
#include "moe/rows.cuh"
#include "ptx/pdl.cuh"
#include "common/amax.cuh"
#include "quant/experts.cuh"

namespace rtk {

inline constexpr int kLaneColumns = 16;  // of a token's row, handled by one lane at a time
inline constexpr int kStepColumns = kWarp * kLaneColumns;
inline constexpr int kSteps = 4;         // of a warp along the row, loaded together
inline constexpr int kGroupLanes = kTileSide / kLaneColumns;

// Each warp takes tasks: first parts of tokens (kSteps * kStepColumns columns of each), then 32 rows at a time for the
// zeros where no token goes. x [tokens, cols] can be read 16 bytes at a time, cols is a multiple of 16. rows [tokens,
// top_k]: destination of each choice; slots [row_count]: which choice fills each row; offsets[expert_count]: the end of
// the last expert.
template <typename F8, int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_permute_fp8_rows(const bf16* x, const i32* rows, const i32* slots, const i32* offsets, F8* q, float* token_scale,
                         i64 tokens, i64 top_k, i64 row_count, i64 cols, i64 x_stride, i64 expert_count, i64 parts,
                         i64 pow2) {
    ptx::launch_dependents();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, count = static_cast<int>(top_k);
    const i64 groups = ceil_div(cols, kTileSide);
    const i64 used = min(max(static_cast<i64>(offsets[expert_count]), 0ll), row_count);
    const i64 token_tasks = tokens * parts, tasks = token_tasks + ceil_div(row_count, kWarp);
    const i64 step = static_cast<i64>(gridDim.x) * (THREADS / kWarp);
#pragma unroll 1
    for (i64 task = (threadIdx.x / kWarp) * static_cast<i64>(gridDim.x) + blockIdx.x; task < tasks; task += step) {
        if (task >= token_tasks) {
            const i64 first = (task - token_tasks) * kWarp, row = first + lane;
            const bool empty = row < row_count && (row >= used || static_cast<u32>(slots[row]) >= tokens * top_k);
            Raw<16> zeros;
            clear(zeros);
#pragma unroll 1
            for (u32 left = __ballot_sync(0xffffffffu, empty ? 1 : 0); left != 0; left &= left - 1) {
                F8* target = q + (first + __ffs(static_cast<int>(left)) - 1) * cols;
#pragma unroll 1
                for (i64 c = lane * 16; c < cols; c += kWarp * 16) ptx::st<16>(target + c, zeros);
            }
            continue;
        }
        const i64 part = parts == 1 ? 0 : task / tokens, token = task - part * tokens;
        const int first_column = static_cast<int>(part) * kSteps * kStepColumns;
        const int column = first_column + lane * kLaneColumns, left = static_cast<int>(cols) - column;
        const bf16* source = x + token * x_stride + column;
        Raw<16> raw[kSteps][2];
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                clear(raw[s][h]);
                if (s * kStepColumns < left) raw[s][h] = load_raw<bf16, 8>(source + s * kStepColumns + h * 8);
            }
        const i32* own = rows + token * top_k;
        Choices choices;
        choices.load(own, 0, count, used);
        Raw<16> codes[kSteps];
        float own_scale = 0.0f;  // lane l: of the part's group l
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const u32 word = with_larger<bf16>(with_larger<bf16>(0u, raw[s][0]), raw[s][1]);
            const float max_abs = warp_reduce<MaxNumber>(WordMax<bf16>::largest(word), kGroupLanes);
            const float factor = fp8_scale<F8>(max_abs, pow2 != 0), inverse = inverse_scale(factor);
            const float sent = __shfl_sync(0xffffffffu, factor, lane * kGroupLanes % kWarp);
            if (lane / (kWarp / kGroupLanes) == s) own_scale = sent;
            float v[2][8];
            unpack<bf16, 8>(raw[s][0], v[0]);
            unpack<bf16, 8>(raw[s][1], v[1]);
            const Raw<8> low = quantized<F8>(v[0], inverse), high = quantized<F8>(v[1], inverse);
            codes[s] = {low.w[0], low.w[1], high.w[0], high.w[1]};
        }
        const i64 group = first_column / kTileSide + lane;
        if (lane < kSteps * kStepColumns / kTileSide && group < groups) token_scale[token * groups + group] = own_scale;
#pragma unroll 1
        for (int c = 0; c < count; ++c) {
            if (c > 0 && c % kWarp == 0) choices.load(own, c, count, used);
            const i32 row = __shfl_sync(0xffffffffu, choices.row, c % kWarp);
            if (row < 0) continue;
            F8* target = q + row * cols + column;
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                if (s * kStepColumns < left) ptx::st<16>(target + s * kStepColumns, codes[s]);
        }
    }
}

// Per-row results: scale [groups, rows of the expert] by expert from those of the tokens, and probabilities. Rows that
// no token fills get the scale `empty`, those past the last expert 0. A thread owns one row and reads its token's
// scales four at a time. It runs after moe_permute_fp8_rows and may start before that one ends.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_permute_fp8_scales(const float* token_scale, const i32* slots, const i32* offsets, const u8* probs,
                           const i32* experts, float* scale, u8* probs_out, i64 choices, i64 top_k, i64 divisor,
                           i64 row_count, i64 groups, i64 expert_count, i64 prob_kind, i64 prob_columns, double empty) {
    extern __shared__ __align__(16) u8 memory[];
    const i64 row = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const u32 slot = row < row_count ? ptx::ld_keep<4>(slots + row).w[0] : 0u;
    const ExpertTable table(memory, offsets, 0, expert_count, row_count);
    if (row >= row_count) return;
    const bool inside = row < table.entry[table.experts].row, has_token = inside && slot < static_cast<u32>(choices);
    const u32 token = has_token ? divided(slot, divisor) : 0u;
    const float otherwise = inside ? static_cast<float>(empty) : 0.0f;
    float* to = scale + row * groups;
    i64 pitch = 1;
    if (inside) {
        const ExpertRows expert = table.of_row(static_cast<u32>(row));
        to = scale + expert.first_row * groups + expert.above;
        pitch = expert.rows;
    }
    if (probs_out != nullptr) {
        const Probs numbers{probs, experts, prob_kind, prob_columns, static_cast<int>(top_k)};
        const u8* place = has_token ? numbers.place(token, static_cast<int>(slot - token * static_cast<u32>(top_k))) : nullptr;
        store_prob_bits(probs_out + row * numbers.bytes(), prob_kind, place == nullptr ? 0u : numbers.bits(place));
    }
    ptx::wait_for_previous();
    const float* from = token_scale + token * groups;
    const int count = static_cast<int>(groups);
    int g = 0;
    if (count % 4 == 0) {
#pragma unroll 4
        for (; g < count; g += 4) {
            const Raw<16> four = ptx::ld_keep<16>(from + g);
#pragma unroll
            for (int i = 0; i < 4; ++i, to += pitch) *to = has_token ? __uint_as_float(four.w[i]) : otherwise;
        }
    }
#pragma unroll 1
    for (; g < count; ++g, to += pitch) *to = has_token ? __uint_as_float(ptx::ld_keep<4>(from + g).w[0]) : otherwise;
}

}  // namespace rtk
