// Backward of the gated RMS normalisation of channel groups (norm/group_rms_norm_gate.cuh).
#include "common/block_sums.cuh"
#include "common/pressure.cuh"
#include "common/row_ring.cuh"
#include "norm/group_rms_norm_gate_rows.cuh"
#include "ptx/forget.cuh"
#include "ptx/integer.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Backward. With a = dy * w * s, the gradient of n:
//     dx = rstd * a - x * rstd^3 * mean(a * x),  dgate = n * a * (1 - s),  dweight = sum over tokens of dy * s * n.
// rstd is recomputed: x is read anyway, and the two row sums share one reduction.
//
// Persistent, for groups of at most CHUNKS * VEC * blockDim channels. RowGroups are numbered across all blocks, however
// many a block has: number u always works on channel group u % groups, so weights and their gradients stay in
// registers, of every lanes-th token from u / groups on. A thread with one vector also keeps its next rows in
// registers: it loads a row, with an L2 policy, as soon as the previous one in the same registers is unpacked. Rows of
// two vectors need too many registers for this and go through a RowRing. Weight gradients are written as rows of fp32
// (`partial`; null if not needed) for column_sum to add up: [lanes, groups * cols] if no block has a channel group
// twice, else one row per block, summed in shared memory; rows of `cols` numbers if groups share the weight. The order
// is fixed by the grid, never by timing. With SIGMOID, s = sigmoid(gate) after the norm, of which dy * s and 1 - s are kept
// until the sums are known; else `gate_form` says how the gate acts, the row stays packed, s is computed twice,
// and blocks of rows in registers have at most 384 threads. The weight (null: ones) is of T, or fp32 if `weight_fp32`. 512 threads of 112
// registers leave room for a block of column_sum; `overlaps_next`: such blocks may start early and wait. *_outer,
// *_inner and x_group are in bytes, less than 2^32.
template <typename T, int CHUNKS, int FORM, bool SIGMOID>
__global__ void __maxnreg__(CHUNKS != 1 ? 128 : !SIGMOID ? 168 : rows_in_registers(FORM, true) == 2 ? 112 : 128)
    group_rms_norm_gate_bwd(const u8* dy, const u8* x, const u8* gate, const void* weight, u8* dx, u8* dgate, float* partial,
                            i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner, i64 x_outer,
                            i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner, i64 dgate_outer, i64 dgate_inner,
                            i64 dx_outer, i64 dx_inner, i64 weight_group, i64 lanes, i64 threads_per_row, i64 by_inner,
                            i64 by_groups, i64 weight_fp32, i64 overlaps_next, i64 gate_form, double eps) {
    constexpr bool kRegisters = CHUNKS == 1;
    constexpr int VEC = 16 / sizeof(T), kStages = kRegisters ? rows_in_registers(FORM, SIGMOID) : 2;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) PairSums<FORM> scratch;
    const RowGroup group = row_group<FORM>(threads_per_row);
    const u32 before = blockIdx.x * group.count;  // RowGroups of other blocks
    const u32 first = divided(before + group.index, by_groups), step = static_cast<u32>(lanes);
    const u32 g = before + group.index - first * static_cast<u32>(groups);
    const u32 inner = static_cast<u32>(inner_size);
    const u32 last = first < step ? static_cast<u32>(tokens) : 0;  // or the RowGroup has nothing to do
    const int end = first < step ? static_cast<int>(cols) : 0;
    const int pitch = group.threads * VEC;
    const int column = group.thread * VEC;
    auto has = [&](int c) { return column + c * pitch < end; };
    const u64 channel = product(g, static_cast<u32>(cols * sizeof(T))) + column * sizeof(T);
    dy = settled(dy + channel), gate = settled(gate + channel);
    dx = settled(dx + channel), dgate = settled(dgate + channel);
    x = settled(x + product(g, static_cast<u32>(x_group)) + column * sizeof(T));
    struct Place {
        u32 o, i;
    };
    const u32 magic = static_cast<u32>(by_inner), shift = static_cast<u32>(by_inner >> 32);
    auto place = [&](u32 token) {
        const u32 o = ptx::mul_hi(token << 1, magic) >> shift;  // as `divided` has it
        return Place{o, token - o * inner};
    };
    // A token of a tensor, at this thread's first channel.
    auto at = [&](auto* tensor, Place p, i64 outer_bytes, i64 inner_bytes) {
        const u64 from = ptx::mad_wide(p.o, static_cast<u32>(outer_bytes), reinterpret_cast<u64>(tensor));
        return reinterpret_cast<decltype(tensor)>(ptx::mad_wide(p.i, static_cast<u32>(inner_bytes), from));
    };
    RowRing<3, CHUNKS, kStages> ring(memory);
    Raw<16> in_flight[kStages][3];  // instead of the ring if kRegisters: dy, x and gate
    auto fetch = [&](u32 token, int stage) {
        const Place p = place(token);
        const u8* const rows[3] = {at(dy, p, dy_outer, dy_inner), at(x, p, x_outer, x_inner),
                                   at(gate, p, gate_outer, gate_inner)};
        if (token < last && has(0)) {
            if constexpr (kRegisters) {
#pragma unroll
                for (int input = 0; input < 3; ++input)
                    in_flight[stage][input] = load_raw<T, VEC>(reinterpret_cast<const T*>(rows[input]));
            } else {
#pragma unroll
                for (int input = 0; input < 3; ++input) {
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c)
                        if (has(c)) ring.copy(input, c, rows[input] + c * group.threads * 16);
                }
            }
        }
        if constexpr (!kRegisters) ring.commit();
    };

    // RowGroups that run out of rows keep reading while others of the warp work, so their address must stay valid.
    auto begin = [&](int stage) {
        if constexpr (kRegisters) {
#pragma unroll
            for (Raw<16>& raw : in_flight[stage]) clear(raw);
            fetch(first + stage * step, stage);
        } else if (stage != kStages - 1) {  // the last one is fetched when work begins
            const bool unused_stages = first + (kStages - 1) * step >= last;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                if (stage == 0 && (unused_stages || !has(c))) ring.zero(memory, c);
            fetch(first + stage * step, stage);
        }
    };
    begin(0);
    AskedGain<T, VEC> asked[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(asked[c].raw);
        if (weight != nullptr && has(c)) asked[c].ask(weight, weight_fp32, g * weight_group + column + c * pitch);
    }
#pragma unroll
    for (int stage = 1; stage < kStages; ++stage) begin(stage);
    if (overlaps_next) ptx::launch_dependents();
    float epsilon = static_cast<float>(eps);
    ptx::keep(epsilon);
    const float inverse = 1.0f / static_cast<float>(cols);
    float w[CHUNKS][VEC], dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = 0.0f;
        asked[c].get(weight_fp32, weight == nullptr ? 1.0f : 0.0f, w[c]);
    }

    int phase = 0;
    auto work = [&](u32 token, int stage) {
        if constexpr (!kRegisters) fetch(token + (kStages - 1) * step, stage), ring.wait();
        float opened[CHUNKS][VEC], closed[CHUNKS][VEC];  // dy * s and 1 - s; or dy and the gate
        Raw<16> own[3];                                  // the row, packed, if it is unpacked again
        auto given = [&](int input, int c, float (&f)[VEC]) {
            if constexpr (kRegisters) {
                unpack<T, VEC>(own[input], f);
            } else {
                ring.template read<T>(input, c, f);
            }
        };
        float v[VEC];                                    // x
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if constexpr (!SIGMOID) {
                if constexpr (kRegisters) {
#pragma unroll
                    for (int input = 0; input < 3; ++input) own[input] = in_flight[stage][input], ptx::forget(own[input]);
                }
            } else if constexpr (kRegisters) {
                unpack<T, VEC>(in_flight[stage][0], opened[c]);
                unpack<T, VEC>(in_flight[stage][1], v);
                unpack<T, VEC>(in_flight[stage][2], closed[c]);
                // Unpack everything now: otherwise the next loads need other registers and a move once they arrive.
#pragma unroll
                for (int i = 0; i < VEC; ++i) ptx::keep(opened[c][i]), ptx::keep(v[i]), ptx::keep(closed[c][i]);
            } else {
                ring.template read<T>(0, c, opened[c]);
                ring.template read<T>(2, c, closed[c]);
            }
        }
        if constexpr (kRegisters) fetch(token + kStages * step, stage);
        float square = 0.0f, product = 0.0f;  // sums of x^2 and a * x
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if constexpr (!SIGMOID) given(0, c, opened[c]), given(2, c, closed[c]);
            if constexpr (!SIGMOID || !kRegisters) given(1, c, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if constexpr (SIGMOID) {
                    const Gate s = gate_of<T>(closed[c][i]);
                    opened[c][i] *= s.open;
                    closed[c][i] = s.closed;
                    square += v[i] * v[i];
                    product += opened[c][i] * w[c][i] * v[i];
                } else {
                    const float s = slope_of<T>(closed[c][i], gate_form).value, h = gate_form & kGateFirst ? v[i] * s : v[i];
                    square += h * h;
                    product += opened[c][i] * s * w[c][i] * v[i];
                }
            }
        }
        scratch.sum(square, product, group, kRegisters ? stage : phase);
        if constexpr (!kRegisters) phase ^= 1;
        if constexpr (kRegisters && !SIGMOID) {
#pragma unroll
            for (Raw<16>& raw : own) ptx::forget(raw);
        }
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        const Place p = place(token);
        T* const dx_row = reinterpret_cast<T*>(at(dx, p, dx_outer, dx_inner));
        T* const dgate_row = reinterpret_cast<T*>(at(dgate, p, dgate_outer, dgate_inner));
        if ((FORM >= kWarps || token < last) && has(0)) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if constexpr (!SIGMOID) given(0, c, opened[c]), given(2, c, closed[c]);
                if constexpr (!SIGMOID || !kRegisters) given(1, c, v);  // again: no registers to keep it
                float to_gate[VEC];
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float o = opened[c][i] * rstd;
                    const float a = o * w[c][i];
                    if constexpr (SIGMOID) {
                        dweight[c][i] += o * v[i];
                        to_gate[i] = a * v[i] * closed[c][i];
                        v[i] = a - v[i] * pull;
                    } else {
                        const GateSlope s = slope_of<T>(closed[c][i], gate_form);
                        const float h = v[i] * s.value;
                        const float dh = gate_form & kGateFirst ? a - h * pull : a;
                        dweight[c][i] += o * h;
                        to_gate[i] = dh * v[i] * s.slope;
                        v[i] = gate_form & kGateFirst ? dh * s.value : a * s.value - v[i] * pull;
                    }
                }
                if (has(c)) {
                    store<T, VEC>(dx_row + c * pitch, v);
                    store<T, VEC>(dgate_row + c * pitch, to_gate);
                }
            }
        }
        if constexpr (!kRegisters) ring.next_row();
    };
    // Rows that share warps continue as long as any of the block has a token.
    const u32 lowest_token = FORM >= kWarps ? first : divided(before, by_groups);
    const u32 left = lowest_token < step ? static_cast<u32>(tokens) : 0;
    u32 token = first;
    while (token - first + lowest_token < left) {
#pragma unroll
        for (int stage = 0; stage < (kRegisters ? kStages : 1) && token - first + lowest_token < left; ++stage, token += step)
            work(token, stage);
    }

    if (!overlaps_next) ptx::launch_dependents();
    if (partial == nullptr) return;
    const int size = static_cast<int>(cols), count = static_cast<int>(groups);
    const bool shared = weight_group == 0;
    // The most common case comes last: its code then directly follows the loop and needs no extra instruction fetch.
    if (group.count > count || shared) {
        if constexpr (!kRegisters) ptx::cp_async_wait<0>();
        float* const sums = reinterpret_cast<float*>(memory);
        add_row_groups(dweight, {group, before, first, g, size, count, shared}, by_groups, sums, partial);
        return;
    }
    // [lanes, groups, cols]: the order of RowGroups.
    float* const sums = partial + product(before + group.index, static_cast<u32>(cols)) + column;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (has(c)) store<float, VEC>(sums + c * pitch, dweight[c]);
}

template <typename T, typename W, int VEC>
RTK_DEVICE void long_groups(const T* dy, const T* x, const T* gate, const void* weights, T* dx, T* dgate, float* rstd_out,
                            i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner, i64 x_outer,
                            i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner, i64 dgate_outer, i64 dgate_inner,
                            i64 dx_outer, i64 dx_inner, i64 weight_group, i64 threads_per_row, i64 form, double eps,
                            GroupScratch<1>& scratch, GroupScratch<1>& product_scratch) {
    const W* const weight = static_cast<const W*>(weights);
    const RowGroup group(threads_per_row);
    const i64 rows = tokens * groups;
    const i64 pitch = group.threads * VEC;
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 token = row / groups, g = row % groups;
        const i64 o = token / inner_size, i = token % inner_size;
        const T* dy_row = dy + o * dy_outer + i * dy_inner + g * cols;
        const T* x_row = x + o * x_outer + i * x_inner + g * x_group;
        const T* gate_row = gate + o * gate_outer + i * gate_inner + g * cols;
        T* dgate_row = dgate + o * dgate_outer + i * dgate_inner + g * cols;
        T* dx_row = dx + o * dx_outer + i * dx_inner + g * cols;
        float square = 0.0f, product = 0.0f;  // x^2, a * x
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float d[VEC], v[VEC], t[VEC], w[VEC];
            load_stream<T, VEC>(dy_row + column, d);
            load_stream<T, VEC>(x_row + column, v);
            load_stream<T, VEC>(gate_row + column, t);
            load_gain<W, VEC>(weight, g * weight_group + column, 0.0f, w);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const float s = gate_slope<T>(t[k], form).value, h = form & kGateFirst ? v[k] * s : v[k];
                square += h * h;
                product += d[k] * s * w[k] * v[k];
            }
        }
        square = group_reduce<Sum, false>(square, group, scratch, phase);
        product = group_reduce<Sum, false>(product, group, product_scratch, phase);
        const float rstd = inverse_rms(square, cols, eps);
        const float pull = product / static_cast<float>(cols) * rstd * rstd * rstd;
        if (rstd_out != nullptr && row < rows && group.thread == 0) rstd_out[row] = rstd;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += pitch) {
            float d[VEC], v[VEC], t[VEC], w[VEC];
            load_stream<T, VEC>(dy_row + column, d);
            load_stream<T, VEC>(x_row + column, v);
            load_stream<T, VEC>(gate_row + column, t);
            load_gain<W, VEC>(weight, g * weight_group + column, 0.0f, w);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const GateSlope s = gate_slope<T>(t[k], form);
                if (form & kGateFirst) {
                    const float dh = d[k] * w[k] * rstd - v[k] * s.value * pull;
                    t[k] = dh * v[k] * s.slope;
                    v[k] = dh * s.value;
                } else {
                    const float a = d[k] * s.value * w[k];
                    t[k] = d[k] * w[k] * (v[k] * rstd) * s.slope;
                    v[k] = a * rstd - v[k] * pull;
                }
            }
            store<T, VEC>(dx_row + column, v);
            store<T, VEC>(dgate_row + column, t);
        }
    }
}

// Backward for groups that do not fit in registers or, without `aligned16`, allow only narrow accesses, and for any number
// of tokens: reads its inputs twice and leaves rstd of every row (fp32, [tokens, groups]; null when not wanted) for
// group_rms_norm_gate_bwd_weight. The weight is of T, or fp32.
template <typename T>
__global__ void __launch_bounds__(512, 1)
    group_rms_norm_gate_bwd_long(const T* dy, const T* x, const T* gate, const void* weight, T* dx, T* dgate,
                                 float* rstd_out, i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer,
                                 i64 dy_inner, i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner,
                                 i64 dgate_outer, i64 dgate_inner, i64 dx_outer, i64 dx_inner, i64 weight_group,
                                 i64 threads_per_row, i64 weight_fp32, i64 aligned16, i64 form, double eps) {
    constexpr int N = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch, product_scratch;
#define RTK_LONG_GROUPS(W, VEC)                                                                                           \
    long_groups<T, W, VEC>(dy, x, gate, weight, dx, dgate, rstd_out, tokens, inner_size, groups, cols, dy_outer, dy_inner, \
                           x_outer, x_inner, x_group, gate_outer, gate_inner, dgate_outer, dgate_inner, dx_outer,         \
                           dx_inner, weight_group, threads_per_row, form, eps, scratch, product_scratch)
    if (weight_fp32) {
        aligned16 ? RTK_LONG_GROUPS(float, N) : RTK_LONG_GROUPS(float, 1);
    } else {
        aligned16 ? RTK_LONG_GROUPS(T, N) : RTK_LONG_GROUPS(T, 1);
    }
#undef RTK_LONG_GROUPS
}

template <typename T, int VEC>
RTK_DEVICE void weight_gradients(const T* dy, const T* x, const T* gate, const float* rstd, float* partial, i64 tokens,
                                 i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner, i64 x_outer, i64 x_inner,
                                 i64 x_group, i64 gate_outer, i64 gate_inner, i64 form) {
    const i64 channel = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (channel >= groups * cols) return;
    const i64 g = channel / cols;
    const i64 x_channel = g * x_group + channel % cols;
    float total[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) total[k] = 0.0f;
    for (i64 token = blockIdx.y; token < tokens; token += gridDim.y) {
        const i64 o = token / inner_size, i = token % inner_size;
        float d[VEC], v[VEC], t[VEC];
        load_stream<T, VEC>(dy + o * dy_outer + i * dy_inner + channel, d);
        load_stream<T, VEC>(x + o * x_outer + i * x_inner + x_channel, v);
        load_stream<T, VEC>(gate + o * gate_outer + i * gate_inner + channel, t);
        const float scale = rstd[token * groups + g];
#pragma unroll
        for (int k = 0; k < VEC; ++k) total[k] += d[k] * gate_slope<T>(t[k], form).value * (v[k] * scale);
    }
    store<float, VEC>(partial + blockIdx.y * (groups * cols) + channel, total);
}

// Partial weight gradients for the kernel above: block (x, y) sums dy * s * n over every gridDim.y-th token for the
// blockDim.x channels (times 16 / sizeof(T) if `aligned16`) it owns, into row y of `partial` [gridDim.y, groups *
// cols].
template <typename T>
__global__ void __launch_bounds__(256)
    group_rms_norm_gate_bwd_weight(const T* dy, const T* x, const T* gate, const float* rstd, float* partial,
                                   i64 tokens, i64 inner_size, i64 groups, i64 cols, i64 dy_outer, i64 dy_inner,
                                   i64 x_outer, i64 x_inner, i64 x_group, i64 gate_outer, i64 gate_inner, i64 aligned16,
                                   i64 form) {
    if (aligned16) {
        weight_gradients<T, 16 / sizeof(T)>(dy, x, gate, rstd, partial, tokens, inner_size, groups, cols, dy_outer, dy_inner,
                                            x_outer, x_inner, x_group, gate_outer, gate_inner, form);
    } else {
        weight_gradients<T, 1>(dy, x, gate, rstd, partial, tokens, inner_size, groups, cols, dy_outer, dy_inner, x_outer,
                               x_inner, x_group, gate_outer, gate_inner, form);
    }
}

}  // namespace rtk
