// Host version of cuda_src/ptx/tma.cuh.
#pragma once
#include "ptx/bulk.cuh"

namespace rtk::ptx {

// What rtkernels/runtime/launch/tensor_map.py writes for the emulator: words that describe the tensor's address and
// layout.
struct TensorMap {
    const long long* words;
};

// As many coordinates as the map has dimensions; the runtime checks that.
template <int N>
RTK_DEVICE void emulated_load(SharedAddress to, const TensorMap& map, SharedAddress barrier, const int (&at)[N]) {
    emu::tensor_load(to, map.words, barrier, at, N);
}
template <int N>
RTK_DEVICE void emulated_store(const TensorMap& map, SharedAddress from, const int (&at)[N], bool adds = false) {
    emu::tensor_store(map.words, from, at, N, adds);
}

RTK_DEVICE void tma_prefetch_map(const TensorMap&) {}
RTK_DEVICE void tma_load_2d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 column, i32 row) {
    const int at[] = {column, row};
    emulated_load(to, map, barrier, at);
}
RTK_DEVICE void tma_load_2d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 column, i32 row, u64) {
    tma_load_2d(to, map, barrier, column, row);
}
RTK_DEVICE void tma_load_3d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second,
                            i32 third) {
    const int at[] = {first, second, third};
    emulated_load(to, map, barrier, at);
}
RTK_DEVICE void tma_load_3d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            u64) {
    const int at[] = {first, second, third};
    emulated_load(to, map, barrier, at);
}
RTK_DEVICE void tma_load_4d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            i32 fourth) {
    const int at[] = {first, second, third, fourth};
    emulated_load(to, map, barrier, at);
}
RTK_DEVICE void tma_load_5d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            i32 fourth, i32 fifth) {
    const int at[] = {first, second, third, fourth, fifth};
    emulated_load(to, map, barrier, at);
}
RTK_DEVICE void tma_store_2d(const TensorMap& map, SharedAddress from, i32 column, i32 row) {
    const int at[] = {column, row};
    emulated_store(map, from, at);
}
RTK_DEVICE void tma_store_3d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third) {
    const int at[] = {first, second, third};
    emulated_store(map, from, at);
}
RTK_DEVICE void tma_store_4d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third, i32 fourth) {
    const int at[] = {first, second, third, fourth};
    emulated_store(map, from, at);
}
RTK_DEVICE void tma_add_3d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third) {
    const int at[] = {first, second, third};
    emulated_store(map, from, at, true);  // fp32 only
}
RTK_DEVICE void fence_async_shared() { emu::fence_async(); }

}  // namespace rtk::ptx
