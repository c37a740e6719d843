// Zeroes rows of packed tensors [tokens, heads, width] past the last sequence, and sets their lse to -inf, so that
// padding has a defined output and gradient. Grid: any; blocks return at once where there are no such rows. width is a
// multiple of 8.
#include "attention/softmax_state.cuh"
#include "common/vec.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(256)
    attention_packed_tail(T* x, float* lse, const i32* ends, i64 sequences, i64 total, i64 heads, i64 width, i64 row, i64 head) {
    const i64 first = max(ends[sequences], 0), step = static_cast<i64>(gridDim.x) * blockDim.x;
    const i64 begin = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, vectors = width / 8;
    const float zeros[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (i64 i = begin; i < (total - first) * heads * vectors; i += step) {
        const i64 token = first + i / (heads * vectors), rest = i % (heads * vectors);
        store<T, 8>(x + token * row + rest / vectors * head + rest % vectors * 8, zeros);
    }
    if (lse == nullptr) return;
    for (i64 i = begin; i < (total - first) * heads; i += step)
        lse[i / (total - first) * total + first + i % (total - first)] = negative_infinity();
}

}  // namespace rtk
