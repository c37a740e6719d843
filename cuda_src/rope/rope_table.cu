// factor times cos and sin of position * scaling * rate, [rows, pairs] dense: fp64 arithmetic, rounded to fp32 and then to T,
// as torch does. positions may be null: row r then has position r. A thread owns one angle. Grid: any; block: 256 threads.
#include "common/vec.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(256) rope_table(const double* rates, const double* positions, T* cosines, T* sines, i64 rows,
                                                  i64 pairs, double scaling, double factor) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * pairs; i += step) {
        const i64 row = i / pairs;
        const double position = positions == nullptr ? static_cast<double>(row) : positions[row];
        double sin_of, cos_of;
        sincos(position * scaling * rates[i - row * pairs], &sin_of, &cos_of);
        const float cosine[1] = {static_cast<float>(factor * cos_of)}, sine[1] = {static_cast<float>(factor * sin_of)};
        store<T, 1>(cosines + i, cosine);
        store<T, 1>(sines + i, sine);
    }
}

}  // namespace rtk
