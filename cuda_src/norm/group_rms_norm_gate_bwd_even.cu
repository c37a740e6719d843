// Backward of the gated normalisation of groups of channels (norm/group_rms_norm_gate.cuh) for rows that just fill two or
// four warps and tokens that lie evenly.
#include "common/pressure.cuh"
#include "norm/group_rms_norm_gate_rows.cuh"
#include "ptx/forget.cuh"
#include "ptx/integer.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// What group_rms_norm_gate_bwd computes, with the same RowGroups, lanes and partial sums, and so the same bits, where that
// needs little code: instructions come from memory too, and each one before the first loads makes all rows 7 ns later.
// There are no masks; `cols` is 2 or 4 warps of 16-byte pieces. The weight (null: ones) is of T. The number of lanes is a
// multiple of that of inner tokens: so a RowGroup has one inner token and every so many-th outer one, `*_step` bytes apart in
// each tensor. *_apart: bytes between outer tokens and between inner ones. All arguments have 32 bits, two in an i64, the
// first one in the lower half: `outer_pace` outer tokens, of which a RowGroup has every pace-th; `inverse_bits` are those
// of 1 / cols, a float.
template <typename T, int FORM>
__global__ void __maxnreg__(112)
    group_rms_norm_gate_bwd_even(const u8* dy, const u8* x, const u8* gate, const T* weight, u8* dx, u8* dgate, float* partial,
                                 i64 outer_pace, i64 groups_inner, i64 dy_apart, i64 x_apart, i64 gate_apart,
                                 i64 dgate_apart, i64 dx_apart, i64 dy_x_step, i64 gate_dgate_step, i64 dx_step_x_group,
                                 i64 by_inner, i64 by_groups, i64 weight_group_early, i64 inverse_bits, double eps) {
    constexpr int VEC = 16 / sizeof(T), kThreads = (FORM == kTwoWarps ? 2 : 4) * kWarp, kCols = kThreads * VEC;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) PairSums<FORM> scratch;
    const u64 policy = ptx::l2_last();
    const RowGroup group = row_group<FORM>(kThreads);
    const u32 before = blockIdx.x * group.count;  // RowGroups of other blocks
    const u32 groups = lower(groups_inner);
    const u32 lane = divided(before + group.index, by_groups);
    const u32 g = before + group.index - lane * groups;
    const u32 pace = upper(outer_pace);
    const u32 o = divided(lane, by_inner), i = lane - o * upper(groups_inner);
    const u32 last = o < pace ? lower(outer_pace) : 0;  // or the RowGroup has nothing to do, and one row to read
    const int column = group.thread * VEC;
    const u64 channel = product(g, kCols * sizeof(T)) + column * sizeof(T);
    // This thread's piece of the first row.
    auto from = [&](auto* tensor, i64 apart, u64 offset) {
        const u64 at = ptx::mad_wide(min(o, pace - 1), lower(apart), reinterpret_cast<u64>(tensor) + offset);
        return settled(reinterpret_cast<decltype(tensor)>(ptx::mad_wide(i, upper(apart), at)));
    };
    // Of a later one.
    auto row = [](auto* tensor, u32 turn, u32 bytes) {
        return reinterpret_cast<decltype(tensor)>(ptx::mad_wide(turn, bytes, reinterpret_cast<u64>(tensor)));
    };
    dy = from(dy, dy_apart, channel), gate = from(gate, gate_apart, channel);
    x = from(x, x_apart, product(g, upper(dx_step_x_group)) + column * sizeof(T));

    Raw<16> ahead[2][3];  // two rows of dy, x and gate
    auto fetch = [&](u32 turn, int stage) {
        const u8* const rows[3] = {row(dy, turn, lower(dy_x_step)), row(x, turn, upper(dy_x_step)),
                                   row(gate, turn, lower(gate_dgate_step))};
#pragma unroll
        for (int input = 0; input < 3; ++input)
            ahead[stage][input] = load_raw<T, VEC>(reinterpret_cast<const T*>(rows[input]), policy);
    };
    fetch(0, 0);
    Raw<16> weights;  // ones if there are none
#pragma unroll
    for (u32& word : weights.w)
        word = sizeof(T) == 4 ? 0x3f800000u : is_same<T, bf16>::value ? 0x3f803f80u : 0x3c003c00u;
    if (weight != nullptr) weights = ptx::ld_keep<16>(weight + g * lower(weight_group_early) + column);
#pragma unroll
    for (Raw<16>& raw : ahead[1]) clear(raw);
    if (o + pace < last) fetch(1, 1);
    const bool early = upper(weight_group_early);
    if (early) ptx::launch_dependents();
    dx = from(dx, dx_apart, channel), dgate = from(dgate, dgate_apart, channel);
    const float inverse = __uint_as_float(lower(inverse_bits));
    float epsilon = static_cast<float>(eps);
    ptx::keep(epsilon);
    float w[VEC], dweight[1][VEC];
#pragma unroll
    for (float& sum : dweight[0]) sum = 0.0f;
    unpack<T, VEC>(weights, w);

    u32 turn = 0;
    auto work = [&](u32 token, int stage) {
        float opened[VEC], v[VEC], closed[VEC];  // dy * s, x, 1 - s
        unpack<T, VEC>(ahead[stage][0], opened);
        unpack<T, VEC>(ahead[stage][1], v);
        unpack<T, VEC>(ahead[stage][2], closed);
        // All of it now: else what is fetched next needs other registers, and has to come before it can be moved.
#pragma unroll
        for (int k = 0; k < VEC; ++k) ptx::keep(opened[k]), ptx::keep(v[k]), ptx::keep(closed[k]);
        if (token + 2 * pace < last) fetch(turn + 2, stage);
        float square = 0.0f, product = 0.0f;  // sums of x^2 and a * x
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const Gate s = gate_of<T>(closed[k]);
            opened[k] *= s.open;
            closed[k] = s.closed;
            square += v[k] * v[k];
            product += opened[k] * w[k] * v[k];
        }
        scratch.sum(square, product, group, stage);
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        float to_gate[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const float d = opened[k] * rstd;
            const float a = d * w[k];
            dweight[0][k] += d * v[k];
            to_gate[k] = a * v[k] * closed[k];
            v[k] = a - v[k] * pull;
        }
        store<T, VEC>(reinterpret_cast<T*>(row(dx, turn, lower(dx_step_x_group))), v);
        store<T, VEC>(reinterpret_cast<T*>(row(dgate, turn, upper(gate_dgate_step))), to_gate);
        ++turn;
    };
    u32 token = o;
    while (token < last) {
#pragma unroll
        for (int stage = 0; stage < 2 && token < last; ++stage, token += pace) work(token, stage);
    }

    if (!early) ptx::launch_dependents();
    if (partial == nullptr) return;
    const int count = static_cast<int>(groups);
    const bool shared = lower(weight_group_early) == 0;
    // What most need comes last: then its code follows the loop's, and need not be fetched from elsewhere in the end.
    if (group.count > count || shared) {
        float* const sums = reinterpret_cast<float*>(memory);
        add_row_groups(dweight, {group, before, lane, g, kCols, count, shared}, by_groups, sums, partial);
        return;
    }
    // [lanes, groups, cols]: the numbers of RowGroups.
    if (last != 0) store<float, VEC>(partial + product(before + group.index, kCols) + column, dweight[0]);
}

}  // namespace rtk
