// Zeros for the counters of tiles (quant/patch_stream.cuh). The kernel that draws from them may start meanwhile.
#include "ptx/pdl.cuh"

namespace rtk {

template <int COUNT>
__global__ void __launch_bounds__(kWarp) clear_counters(u32* counters) {
    ptx::launch_dependents();
    if (threadIdx.x < COUNT) counters[threadIdx.x] = 0;
}

}  // namespace rtk
