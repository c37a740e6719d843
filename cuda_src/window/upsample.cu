// Nearest upsampling of the last two dimensions of (planes, height, width), and its gradient. Results are dense; the input of the
// forward has any strides, that of the gradient is dense. The forward moves bytes. Grid: threads / 256.
#include "window/places.cuh"

namespace rtk {

// The nearest element above and to the left, at `scale` elements of x per result element. With `vectors` a thread owns
// 16 bytes of a row of the result, else an element; `count` and `out_columns` count these.
template <int BYTES>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_nearest(const u8* x, u8* y, i64 count, i64 channels, i64 height, i64 width, i64 out_height, i64 out_columns,
                     i64 x_batch, i64 x_channel, i64 x_row, i64 x_column, i64 height_divisor, i64 width_divisor,
                     double scale_h, double scale_w, i64 vectors) {
    constexpr int kEach = 16 / BYTES;
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, out_height, out_columns, height_divisor, width_divisor);
    const float across = static_cast<float>(scale_w);
    const int w = static_cast<int>(width), row = nearest(place.row, static_cast<float>(scale_h), static_cast<int>(height));
    x += (plane_offset(place.plane, channels, x_batch, x_channel) + row * x_row) * BYTES;
    if (!vectors) {
        const i64 from = nearest(place.column, across, w) * x_column;
        ptx::st<BYTES>(y + at * BYTES, ptx::ld_keep<BYTES>(x + from * BYTES));
        return;
    }
    Raw<16> repeated{};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const Raw<BYTES> one = ptx::ld_keep<BYTES>(x + nearest(place.column * kEach + i, across, w) * x_column * BYTES);
        constexpr u32 kMask = BYTES == 4 ? 0xffffffffu : (1u << (8 * BYTES % 32)) - 1u;
        repeated.w[i * BYTES / 4] |= (one.w[0] & kMask) << (i * BYTES % 4 * 8);
    }
    ptx::st<16>(y + at * 16, repeated);
}

// Each element of x four times, as two neighbours in two rows. A thread owns 8 bytes of a row of x, with adjacent
// columns, so that a warp writes whole cache lines of both rows.
template <int BYTES>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_twice(const u8* x, u8* y, i64 count, i64 channels, i64 height, i64 vectors, i64 x_batch, i64 x_channel, i64 x_row,
                   i64 height_divisor, i64 width_divisor) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, vectors, height_divisor, width_divisor);
    const i64 offset = plane_offset(place.plane, channels, x_batch, x_channel) + place.row * x_row;
    const Raw<8> one = ptx::ld_stream<8>(x + offset * BYTES + place.column * 8);
    Raw<16> repeated;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 half = one.w[i / 2] >> (i % 2 * 16) & 0xffffu;
        u32 word = one.w[i / 2];
        if constexpr (BYTES == 2) word = half * 0x10001u;
        repeated.w[i] = word;
    }
    y += (2 * (place.plane * height + place.row) * vectors + place.column) * 16;
    ptx::st<16>(y, repeated);
    ptx::st<16>(y + vectors * 16, repeated);
}

// The result elements [first, end) whose nearest one is `at`; for an integer `factor` if that is not 0.
struct Copies {
    int first, end;
    RTK_DEVICE Copies(int at, float scale, int size, int count, int factor) {
        if (factor != 0) {
            first = at * factor, end = first + factor;
            return;
        }
        const float near = static_cast<float>(at) / scale;  // within 2^-22 of itself: search from a bit before
        first = max(static_cast<int>(near - near * 1e-6f), 0);
        while (first < count && nearest(first, scale, size) < at) ++first;
        end = first;
        while (end < count && nearest(end, scale, size) == at) ++end;
    }
};

// A thread owns an element of dx and sums the gradients of its copies, in order.
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_nearest_bwd(const T* dy, T* dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width,
                         i64 height_divisor, i64 width_divisor, double scale_h, double scale_w, i64 factor_h, i64 factor_w) {
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const PoolPlace place(at, height, width, height_divisor, width_divisor);
    const Copies down(place.row, static_cast<float>(scale_h), static_cast<int>(height), static_cast<int>(out_height),
                      static_cast<int>(factor_h));
    const Copies across(place.column, static_cast<float>(scale_w), static_cast<int>(width), static_cast<int>(out_width),
                        static_cast<int>(factor_w));
    dy += place.plane * out_height * out_width;
    float sum = 0.0f;
    for (int row = down.first; row < down.end; ++row) {
        const T* line = dy + row * out_width;
        for (int column = across.first; column < across.end; ++column) sum += element(line, column);
    }
    const float repeated[1] = {sum};
    store<T, 1>(dx + at, repeated);
}

// The same for twice the height and width: a thread owns 16 bytes of dx.
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    upsample_twice_bwd(const T* dy, T* dx, i64 count, i64 vectors, i64 width_divisor) {
    constexpr int kEach = 16 / sizeof(T);
    const i64 at = static_cast<i64>(blockIdx.x) * kPoolThreads + threadIdx.x;
    if (at >= count) return;
    const i64 line = width_divisor != 0 ? divided(static_cast<u32>(at), width_divisor) : quotient(at, vectors);
    dy += (line * 4 * vectors + (at - line * vectors) * 2) * kEach;  // rows of all planes, stacked
    Raw<16> raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = ptx::ld_stream<16>(dy + ((i / 2) * 2 * vectors + i % 2) * kEach);
    float sum[kEach];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float upper_line[kEach], lower_line[kEach];
        unpack<T, kEach>(raw[half], upper_line);
        unpack<T, kEach>(raw[half + 2], lower_line);
#pragma unroll
        for (int i = 0; i < kEach / 2; ++i)
            sum[half * kEach / 2 + i] = upper_line[2 * i] + upper_line[2 * i + 1] + lower_line[2 * i] + lower_line[2 * i + 1];
    }
    store<T, kEach>(dx + at * kEach, sum);
}

}  // namespace rtk
