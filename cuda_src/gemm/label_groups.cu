// Where groups of rows begin and end, from a label per row: cuts[g] is the first row of group g, cuts[groups + g] the row behind its
// last one; groups lie one behind the other, with rows labelled otherwise (padding) between them. Groups without rows keep
// the zeros that `cuts` came with. A thread per row; grid: all rows.
#include "common/abi.cuh"

namespace rtk {

template <int THREADS>
__global__ void __launch_bounds__(THREADS) label_groups(const i32* labels, i32* cuts, i64 rows, i64 groups) {
    const i64 row = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= rows) return;
    const i32 label = labels[row];
    if (label < 0 || label >= groups) return;
    if (row == 0 || labels[row - 1] != label) cuts[label] = static_cast<i32>(row);
    if (row + 1 == rows || labels[row + 1] != label) cuts[groups + label] = static_cast<i32>(row) + 1;
}

}  // namespace rtk
