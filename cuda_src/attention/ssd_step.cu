// One token of Mamba-2's SSD for each sequence, the state [sequences][heads][d_v][d_k] in place:
//     dt = clamp(softplus(dt + bias)),  S = exp(A dt) S + dt x B^T,  out = S C + skip x.
// A warp owns a row of the state; a lane has four neighbours of every 128. Sums in fp32, out rounded once.
// Grid: tiles of 8 rows, heads, sequences.
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(256)
    ssd_step(const T* x, const float* dt, const float* rate, const T* b, const T* c, const float* skip, const float* bias,
             float* state, T* out, i64 heads, i64 groups, i64 d_k, i64 d_v, i64 x_batch, i64 x_head, i64 b_batch, i64 b_head,
             i64 c_batch, i64 c_head, i64 softplus, double low, double high) {
    constexpr int kWarps = 8;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 head = blockIdx.y, batch = blockIdx.z, group = head / (heads / groups);
    const i64 row = static_cast<i64>(blockIdx.x) * kWarps + warp;
    if (row >= d_v) return;
    float time = dt[batch * heads + head] + (bias == nullptr ? 0.0f : bias[head]);
    if (softplus && time <= 20.0f) time = log1pf(expf(time));
    time = time < static_cast<float>(low) ? static_cast<float>(low) : time;
    time = time > static_cast<float>(high) ? static_cast<float>(high) : time;
    const float decay = expf(rate[head] * time);
    float value[1];
    load_keep<T, 1>(x + batch * x_batch + head * x_head + row, value);
    float* const own = state + ((batch * heads + head) * d_v + row) * d_k;
    b += batch * b_batch + group * b_head;
    c += batch * c_batch + group * c_head;
    float sum = 0.0f;
#pragma unroll 2
    for (int column = 4 * lane; column < static_cast<int>(d_k); column += 4 * kWarp) {
        float s[4], key[4], query[4];
        load_stream<float, 4>(own + column, s);
        load_keep<T, 4>(b + column, key);
        load_keep<T, 4>(c + column, query);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] = decay * s[i] + time * value[0] * key[i];
            sum += s[i] * query[i];
        }
        store<float, 4>(own + column, s);
    }
    sum = warp_reduce<Sum>(sum);
    if (skip != nullptr) sum += skip[head] * value[0];
    const float result[1] = {sum};
    if (lane == 0) store<T, 1>(out + (batch * heads + head) * d_v + row, result);
}

}  // namespace rtk
