// One token of Mamba-2's SSD for each sequence, the state [sequences][heads][d_v][d_k] in place:
//     dt = clamp(softplus(dt + bias)),  S = exp(A dt) S + dt x B^T,  out = S C + skip x.
// A warp owns four rows of the state; a lane has four neighbours of every 128 and loads those of all rows first. Sums in fp32,
// out rounded once. Grid: tiles of 32 rows, heads, sequences.
#include "attention/gates.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(256)
    ssd_step(const T* x, const float* dt, const float* rate, const T* b, const T* c, const float* skip, const float* bias,
             float* state, T* out, i64 heads, i64 groups, i64 d_k, i64 d_v, i64 x_batch, i64 x_head, i64 b_batch, i64 b_head,
             i64 c_batch, i64 c_head, i64 softplus, double low, double high) {
    constexpr int kWarps = 8, kRows = 4;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 head = blockIdx.y, batch = blockIdx.z, group = head / (heads / groups);
    const i64 row0 = (static_cast<i64>(blockIdx.x) * kWarps + warp) * kRows;
    if (row0 >= d_v) return;
    float time = dt[batch * heads + head] + (bias == nullptr ? 0.0f : bias[head]);
    if (softplus) time = rtk::softplus(time);
    time = time < static_cast<float>(low) ? static_cast<float>(low) : time;
    time = time > static_cast<float>(high) ? static_cast<float>(high) : time;
    const float decay = expf(rate[head] * time);
    float values[kRows], sums[kRows];
    x += batch * x_batch + head * x_head + row0;
    load_keep<T, kRows>(x, values);  // widths are multiples of 8
    float* const own = state + ((batch * heads + head) * d_v + row0) * d_k;
    b += batch * b_batch + group * b_head;
    c += batch * c_batch + group * c_head;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
#pragma unroll 1
    for (int column = 4 * lane; column < static_cast<int>(d_k); column += 4 * kWarp) {
        float s[kRows][4], key[4], query[4];
#pragma unroll
        for (int r = 0; r < kRows; ++r) load_stream<float, 4>(own + r * d_k + column, s[r]);
        load_keep<T, 4>(b + column, key);
        load_keep<T, 4>(c + column, query);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[r][i] = decay * s[r][i] + time * values[r] * key[i];
                sums[r] += s[r][i] * query[i];
            }
            store<float, 4>(own + r * d_k + column, s[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        sums[r] = warp_reduce<Sum>(sums[r]);
        if (skip != nullptr) sums[r] += skip[head] * values[r];
    }
    if (lane == 0) store<T, kRows>(out + (batch * heads + head) * d_v + row0, sums);
}

}  // namespace rtk
