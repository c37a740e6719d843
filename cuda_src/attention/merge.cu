// Merges two partial attentions, each with its log-sum-exp: out = wa * a + wb * b, w = exp(lse of the part - lse).
//
// One warp per row of [batch, length, heads, width], dense; lse is [batch, heads, length]. Element types are those of
// common/any_type.cuh, known at run time; arithmetic is fp32, rounded once. A part that saw no key (lse -inf) has
// weight 0 whatever its row holds; two such parts give 0 and -inf.
#include "attention/softmax_state.cuh"
#include "common/any_type.cuh"
#include "common/reduce.cuh"

namespace rtk {

struct MergeRow {
    i64 first;                 // element of out
    i64 at;                    // of lse
    float weight_a, weight_b;
    float lse;

    RTK_DEVICE MergeRow(i64 row, const float* lse_a, const float* lse_b, i64 length, i64 heads, i64 width) {
        const i64 head = row % heads, token = row / heads % length, batch = row / heads / length;
        first = row * width;
        at = (batch * heads + head) * length + token;
        const float a = lse_a[at], b = lse_b[at], top = fmaxf(a, b);
        const float from = top == negative_infinity() ? 0.0f : top;
        const float exp_a = ptx::ex2((a - from) * kLog2e), exp_b = ptx::ex2((b - from) * kLog2e);
        const float total = exp_a + exp_b, times = total == 0.0f ? 0.0f : 1.0f / total;
        weight_a = exp_a * times, weight_b = exp_b * times;
        lse = total == 0.0f ? top : from + log2f(total) * kLn2;
    }
};

// WARPS: of a block.
template <int WARPS>
__global__ void __launch_bounds__(WARPS * kWarp)
    attention_merge_fwd(const void* a, const float* lse_a, const void* b, const float* lse_b, void* out, float* lse, i64 rows,
                        i64 length, i64 heads, i64 width, i64 type_a, i64 type_b, i64 type_out) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (row >= rows) return;
    const MergeRow merge(row, lse_a, lse_b, length, heads, width);
    for (i64 column = lane; column < width; column += kWarp) {
        float value = 0.0f;
        if (merge.weight_a != 0.0f) value += merge.weight_a * load_any(a, static_cast<int>(type_a), merge.first + column);
        if (merge.weight_b != 0.0f) value += merge.weight_b * load_any(b, static_cast<int>(type_b), merge.first + column);
        store_any(out, static_cast<int>(type_out), merge.first + column, value);
    }
    if (lane == 0) lse[merge.at] = merge.lse;
}

// da = wa * dout, dlse_a = wa * (dout . (a - out) + dlse), likewise for b; out is recomputed in fp32.
template <int WARPS>
__global__ void __launch_bounds__(WARPS * kWarp)
    attention_merge_bwd(const void* dout, const float* dlse, const void* a, const float* lse_a, const void* b,
                        const float* lse_b, void* da, float* dlse_a, void* db, float* dlse_b, i64 rows, i64 length, i64 heads,
                        i64 width, i64 type_a, i64 type_b, i64 type_out) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (row >= rows) return;
    const MergeRow merge(row, lse_a, lse_b, length, heads, width);
    float dot_a = 0.0f, dot_b = 0.0f;
    for (i64 column = lane; column < width; column += kWarp) {
        const float g = load_any(dout, static_cast<int>(type_out), merge.first + column);
        if (merge.weight_a != 0.0f) dot_a += g * load_any(a, static_cast<int>(type_a), merge.first + column);
        if (merge.weight_b != 0.0f) dot_b += g * load_any(b, static_cast<int>(type_b), merge.first + column);
        store_any(da, static_cast<int>(type_a), merge.first + column, g * merge.weight_a);
        store_any(db, static_cast<int>(type_b), merge.first + column, g * merge.weight_b);
    }
    dot_a = warp_reduce<Sum>(dot_a), dot_b = warp_reduce<Sum>(dot_b);
    if (lane == 0) {
        const float rest = (dlse == nullptr ? 0.0f : dlse[merge.at]) - (merge.weight_a * dot_a + merge.weight_b * dot_b);
        dlse_a[merge.at] = merge.weight_a * (dot_a + rest);
        dlse_b[merge.at] = merge.weight_b * (dot_b + rest);
    }
}

}  // namespace rtk
