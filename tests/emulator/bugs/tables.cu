// Kernels that reach tensors through a table of addresses; test_emulator_tables.py runs them.
#include "common/abi.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

// out[t] = sum of the first sizes[t] elements of tensor t; table: addresses of `n` tensors.
__global__ void sum_each(const i64* table, const i64* sizes, float* out, i64 n) {
    for (i64 t = threadIdx.x; t < n; t += blockDim.x) {
        const float* x = reinterpret_cast<const float*>(table[t]);
        float sum = 0.0f;
        for (i64 i = 0; i < sizes[t]; ++i) sum += x[i];
        out[t] = sum;
    }
}

// Adds 1 to every element of tensor blockIdx.x, by accesses of 16 bytes.
__global__ void add_one(const i64* table, const i64* sizes) {
    float* x = reinterpret_cast<float*>(table[blockIdx.x]);
    for (i64 i = 4 * static_cast<i64>(threadIdx.x); i < sizes[blockIdx.x]; i += 4 * blockDim.x) {
        Raw<16> raw = ptx::ld_stream<16>(x + i);
        for (u32& word : raw.w) word = __float_as_uint(__uint_as_float(word) + 1.0f);
        ptx::st<16>(x + i, raw);
    }
}

// Writes into the table itself, behind the addresses.
__global__ void write_table(i64* table, i64 at) { table[at] = 5; }

}  // namespace rtk
