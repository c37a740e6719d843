// out = in * factor over lists of tensors, in fp32 with one rounding. With one list in and out are the same tensors;
// with two, list 0 is written and list 1 read, and the dtypes may differ (a cast is a factor of 1).
//
// factor = scale * *by, or, with `max_norm` >= 0 and the total norm in *by, min(1, max_norm / (norm + 1e-6)): clipping.
// Nothing is touched where clipping changes nothing. Persistent blocks loop over the chunks, so that such a launch is
// short.
#include "multi/list.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// kCount vectors of N elements, kMultiThreads vectors apart; all are loaded before the first is used.
template <typename In, typename Out, int N, int kCount>
RTK_DEVICE void scale_vectors(const In* in, Out* out, float factor) {
    float value[kCount][N];
#pragma unroll
    for (int k = 0; k < kCount; ++k) load_parts<In, N>(in + k * kMultiThreads * N, value[k]);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
        for (float& v : value[k]) v *= factor;
        store<Out, N>(out + k * kMultiThreads * N, value[k]);
    }
}

template <int kInFlight>
__global__ void __launch_bounds__(kMultiThreads)
    multi_scale(const i64* table, const float* by, i64 tensors, i64 lists, i64 shift, i64 chunks, double scale,
                double max_norm) {
    ptx::wait_for_previous();
    float factor = static_cast<float>(scale);
    if (max_norm >= 0.0) {
        factor = static_cast<float>(max_norm) / (*by + 1e-6f);
        if (factor >= 1.0f) return;
    } else if (by != nullptr) {
        factor *= *by;
    }
    const int source = static_cast<int>(lists) - 1;
    const bool in_place = source == 0;
    const int me = static_cast<int>(threadIdx.x);
    for (i64 index = blockIdx.x; index < chunks; index += gridDim.x) {
        const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), index);
        with_type(chunk.kind(source), [&](auto from) {
            using In = decltype(from);
            const In* in = chunk.at<const In>(source);
            const auto move = [&](auto to) {
                using Out = decltype(to);
                // Accesses of 16 bytes of the wider type: the threads of a warp then touch whole lines.
                constexpr int N = sizeof(In) + sizeof(Out) == 4 ? 8 : 4;
                Out* out = chunk.at<Out>(0);
                const int vectors = chunk.aligned() ? chunk.count / N : 0;
                int i = me;
#pragma unroll 1
                for (; i + (kInFlight - 1) * kMultiThreads < vectors; i += kInFlight * kMultiThreads)
                    scale_vectors<In, Out, N, kInFlight>(in + i * N, out + i * N, factor);
#pragma unroll 1
                for (; i < vectors; i += kMultiThreads) scale_vectors<In, Out, N, 1>(in + i * N, out + i * N, factor);
#pragma unroll 1
                for (i = vectors * N + me; i < chunk.count; i += kMultiThreads)
                    scale_vectors<In, Out, 1, 1>(in + i, out + i, factor);
            };
            if (in_place) {
                move(from);
            } else {
                with_type(chunk.kind(0), move);
            }
        });
    }
}

}  // namespace rtk
