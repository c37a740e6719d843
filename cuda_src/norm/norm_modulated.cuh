// Shared by norm/norm_modulated.cu and norm/norm_in_registers.cu.
#pragma once
#include "common/row_output.cuh"
#include "norm/common.cuh"

namespace rtk {

// The first element of an operand that has a row for every `each` rows of x.
RTK_DEVICE i64 modulation_row(i64 row, i64 stride, i64 each) {
    if (stride == 0) return 0;
    return (each == 1 ? row : static_cast<u32>(row) / static_cast<u32>(each)) * stride;
}

// Statistics of a row. first_pass(use) and second_pass(use) call use(h, valid) for all vectors of the thread, the first
// one as h is computed.
template <int N, typename First, typename Second>
RTK_DEVICE RowStatistics row_statistics(bool centred, i64 cols, double eps, const RowGroup& group, GroupScratch<1>& scratch,
                                        GroupScratch<2>& pair_scratch, First first_pass, Second second_pass) {
    const float count = static_cast<float>(cols), epsilon = static_cast<float>(eps);
    float sum = 0.0f;
    first_pass([&](const float(&h)[N], int) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum += centred ? h[i] * kSmallPart : h[i] * h[i];
    });
    sum = group_reduce<Sum, false>(sum, group, scratch, 0);
    if (!centred) return {0.0f, rstd_of(sum, count, epsilon)};
    const float rough = mean_of_parts(sum, count);
    float differences = 0.0f, squares = 0.0f;
    second_pass([&](const float(&h)[N], int valid) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float off = i < valid ? h[i] - rough : 0.0f;
            differences += off, squares += off * off;
        }
    });
    group_reduce_pair<Sum, false>(differences, squares, group, pair_scratch, 0);
    return statistics_of(rough, differences, squares, count, epsilon);
}

}  // namespace rtk
