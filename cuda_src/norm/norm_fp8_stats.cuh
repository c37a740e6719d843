// The statistics of one row: 1/sqrt(mean square + eps), of the row or (centred) of its differences from its mean.
#pragma once
#include "norm/common.cuh"

namespace rtk {

// Computed by the threads that share `reduce(value, phase)`, which sums over them; thread `thread` of `threads`. The
// row is x, or the rounded sum of x and residual (may be null), which is then written to `sum`. CENTRED: `centred` says
// whether there is a mean. If so, the row is read twice: the variance uses differences from the mean, whose sum also
// corrects the rounding error of the mean, so a mean far from zero costs no precision. Phases: 1 comes first and last.
template <typename T, int VEC, bool CENTRED, int IN_FLIGHT, typename Reduce>
RTK_DEVICE RowStatistics row_statistics(const T* x, const T* residual, T* sum, i64 cols, float count, float eps,
                                        bool centred, int thread, int threads, const Reduce& reduce) {
    const i64 pitch = static_cast<i64>(threads) * VEC;
    // `use(h, n)`: called for every vector of the row that exists.
    auto walk = [&](bool write, auto use) {
#pragma unroll 1
        for (i64 first = static_cast<i64>(thread) * VEC; first < cols; first += pitch * IN_FLIGHT) {
            Raw<sizeof(T) * VEC> raw[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                clear(raw[k]);
                if (first + k * pitch < cols) raw[k] = load_raw<T, VEC>(x + first + k * pitch);
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                const bool inside = first + k * pitch < cols;
                if (residual != nullptr && inside) {
                    raw[k] = add_rounded<T, VEC>(raw[k], load_raw<T, VEC>(residual + first + k * pitch));
                    if (write) ptx::st<sizeof(T) * VEC>(sum + first + k * pitch, raw[k]);
                }
                float h[VEC];
                unpack<T, VEC>(raw[k], h);
                use(h, inside);
            }
        }
    };
    RowStatistics found = {0.0f, 0.0f};
    if (CENTRED && centred) {
        const float per_column = ptx::rcp(count);  // the products cannot overflow, their sum neither
        float total = 0.0f;
        walk(true, [&](const float(&h)[VEC], bool) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) total += h[i] * per_column;
        });
        found.mean = reduce(total, 1);
    }
    float differences = 0.0f, square = 0.0f;
    walk(!(CENTRED && centred), [&](const float(&h)[VEC], bool inside) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float d = CENTRED ? (inside ? h[i] - found.mean : 0.0f) : h[i];
            square += d * d;
            if (CENTRED) differences += d;
        }
    });
    if (CENTRED && centred) {
        differences = reduce(differences, 0);
        return statistics_of(found.mean, differences, reduce(square, 1), count, eps);
    }
    found.rstd = rstd_of(reduce(square, 1), count, eps);
    return found;
}

// This lane's part of the sums of squares of two rows: twice as much in flight, and two chains of additions, in the
// order of row_statistics.
template <typename T, int VEC, int IN_FLIGHT>
RTK_DEVICE void squares_of_two(const T* upper, const T* lower, i64 cols, int lane, float (&square)[2]) {
    const i64 pitch = kWarp * VEC;
    square[0] = square[1] = 0.0f;
#pragma unroll 1
    for (i64 first = lane * VEC; first < cols; first += pitch * IN_FLIGHT) {
        Raw<sizeof(T) * VEC> raw[IN_FLIGHT][2];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            clear(raw[k][0]);
            clear(raw[k][1]);
            if (first + k * pitch < cols) {
                raw[k][0] = load_raw<T, VEC>(upper + first + k * pitch);
                raw[k][1] = load_raw<T, VEC>(lower + first + k * pitch);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float h[VEC];
                unpack<T, VEC>(raw[k][row], h);
#pragma unroll
                for (int i = 0; i < VEC; ++i) square[row] += h[i] * h[i];
            }
        }
    }
}

}  // namespace rtk
