// Gradient of torch's glu, y = a * sigmoid(b) for the halves a and b of one dimension of x:  da = dy * sigmoid(b),
// db = dy * a * sigmoid(b) * (1 - sigmoid(b)).
//
// All tensors are dense: x and dx [outer][2][inner], dy [outer][inner], inner in multiples of 16 bytes. A thread owns
// two vectors of dy, one block apart, and writes both halves for each; all its loads are in flight before it computes.
// Grid: as many blocks as needed; block: 256 threads. Arithmetic: fp32, rounded once.
#include "pointwise/functors.cuh"

namespace rtk {

// `count` and `inner` are in vectors. divider: of `inner`, for fewer than 2^31 vectors; else 0.
template <typename T>
__global__ void __launch_bounds__(kPointwiseThreads)
    glu_backward(const T* dy, const T* x, T* dx, i64 count, i64 inner, i64 divider) {
    constexpr int N = 16 / sizeof(T), kInFlight = 2;
    Raw<16> gradient[kInFlight], first[kInFlight], gate[kInFlight];
    i64 place[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        const i64 vector = (static_cast<i64>(blockIdx.x) * kInFlight + u) * kPointwiseThreads + threadIdx.x;
        place[u] = -1;
        if (vector < count) {
            const i64 outer = divider != 0 ? static_cast<i64>(divided(static_cast<u32>(vector), divider)) : vector / inner;
            place[u] = (vector + outer * inner) * N;
            gradient[u] = ptx::ld_stream<16>(dy + vector * N);
            gate[u] = ptx::ld_stream<16>(x + place[u] + inner * N);
            first[u] = ptx::ld_stream<16>(x + place[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
        if (place[u] < 0) continue;
        float g[N], a[N], b[N];
        unpack<T, N>(gradient[u], g);
        unpack<T, N>(first[u], a);
        unpack<T, N>(gate[u], b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float open = logistic(b[i]);
            b[i] = glu_gate_gradient(g[i], a[i], open);
            a[i] = g[i] * open;
        }
        store<T, N>(dx + place[u], a);
        store<T, N>(dx + place[u] + inner * N, b);
    }
}

}  // namespace rtk
