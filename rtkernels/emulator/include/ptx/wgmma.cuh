// Host version of cuda_src/ptx/wgmma.cuh. Each thread computes its part of a product as late as possible: when it is
// waited for, from the contents of shared memory at that time. Accumulation is as in mma.cuh.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Address and `next` in units of 16 bytes, so that + 1 is 16 bytes here, too.
RTK_DEVICE u64 matrix_descriptor(SharedAddress address, u32 next) {
    return reinterpret_cast<u64>(address) >> 4 | static_cast<u64>(next >> 4) << 48;
}

struct EmulatedMatrix {
    u64 first;
    u32 next;

    // Two neighbours of a row, the first at an even position.
    RTK_DEVICE u32 pair(int row, int column) const {
        const u64 at = first + static_cast<u64>(column / 64 * static_cast<int>(next) + row * 128 + column % 64 * 2);
        return static_cast<u32>(emu::load_by_wgmma(reinterpret_cast<const void*>(at ^ (at >> 7 & 7) << 4), 4).lo);
    }
};

RTK_DEVICE EmulatedMatrix emulated_matrix(u64 descriptor) {
    return {(descriptor & 0xffffffffffffull) << 4, static_cast<u32>(descriptor >> 48) << 4};
}

struct EmulatedProduct {
    float* sums;
    EmulatedMatrix a, b;
    u32 left[2][8];  // a's pairs of this thread's two rows, if they come from registers
    int eights;      // of columns
    bool in_registers, across, add, half;
    u64 group;
    void (*make)(const EmulatedProduct&);  // instead of emulated_product, if not null
    bool across_a;
};
RTK_DEVICE void emulated_product(const EmulatedProduct& p) {
    const int lane = static_cast<int>(emu::lane()), g = lane / 4, t = lane % 4;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + g;
    auto value = [&](u32 pair, int i) {
        const u32 bits = pair >> 16 * i & 0xffffu;
        return static_cast<double>(p.half ? emu::f16_to_f32(bits) : emu::bf16_to_f32(bits));
    };
    double a[2][16];
    for (int r = 0; r < 2; ++r)
        for (int k = 0; k < 16; ++k)
            a[r][k] = p.in_registers ? value(p.left[r][k / 2], k % 2)
                      : p.across_a   ? value(p.a.pair(k, (row + 8 * r) & ~1), row % 2)
                                     : value(p.a.pair(row + 8 * r, k & ~1), k % 2);
    for (int j = 0; j < p.eights; ++j)
        for (int c = 0; c < 2; ++c) {
            const int n = 8 * j + 2 * t + c;
            double sum[2] = {0.0, 0.0};
            for (int k = 0; k < 16; ++k) {
                const double b = p.across ? value(p.b.pair(k, n & ~1), n % 2) : value(p.b.pair(n, k & ~1), k % 2);
                for (int r = 0; r < 2; ++r) sum[r] += a[r][k] * b;
            }
            for (int r = 0; r < 2; ++r) {
                float& d = p.sums[4 * j + 2 * r + c];
                d = static_cast<float>((p.add ? static_cast<double>(d) : 0.0) + sum[r]);
            }
        }
}

RTK_DEVICE void emulated_products_push(EmulatedProduct product) {
    product.group = emu::closed_groups();
    emu::keep_record(&product, sizeof(product));
}

RTK_DEVICE void wgmma_fence() {}

template <int N>
RTK_DEVICE void wgmma_pin(u32 (&)[N]) {}

template <int N>
RTK_DEVICE void wgmma_pin(float (&)[N]) {}

RTK_DEVICE void wgmma_commit() { ++emu::closed_groups(); }

template <int kPending>
RTK_DEVICE void wgmma_wait(RTK_EMU_CALLER) {
    EmulatedProduct p;
    for (u32 count = emu::kept_records(sizeof(p)); count > 0; --count) {
        emu::take_record(&p, sizeof(p));
        if (p.group + kPending < emu::closed_groups()) {
            p.make == nullptr ? emulated_product(p) : p.make(p);
        } else {
            emu::keep_record(&p, sizeof(p));
        }
    }
    // The instruction is for whole warps: each lane knows that all lanes have finished reading.
    emu::gather(0xffffffffu, 0, RTK_EMU_SITE("wgmma_wait"), true);
}

template <typename T, bool kAcross, int N>
RTK_DEVICE void wgmma_shared(float (&d)[N], u64 a, u64 b, u32 add) {
    EmulatedProduct product{};
    product.sums = d, product.eights = N / 4, product.a = emulated_matrix(a), product.b = emulated_matrix(b);
    product.across = kAcross, product.add = add != 0, product.half = !is_same<T, bf16>::value;
    emulated_products_push(product);
}

// The words of this thread's two rows from the registers of its quad: lane t has words t and 4 + t of both.
RTK_DEVICE void emulated_left(EmulatedProduct& product, const u32 (&a)[4], emu::Site site) {
    const u32 first = emu::lane() & ~3u;
    for (int h = 0; h < 2; ++h) {
        const u64* all = emu::gather(0xffffffffu, a[2 * h] | static_cast<u64>(a[2 * h + 1]) << 32, site);
        for (u32 lane = 0; lane < 4; ++lane)
            for (int r = 0; r < 2; ++r)
                product.left[r][4 * h + static_cast<int>(lane)] = static_cast<u32>(all[first + lane] >> 32 * r);
    }
}

template <typename T, bool kAcross = true, int N>
RTK_DEVICE void wgmma_registers(float (&d)[N], const u32 (&a)[4], u64 b, u32 add, RTK_EMU_CALLER) {
    EmulatedProduct product{};
    product.sums = d, product.eights = N / 4, product.b = emulated_matrix(b);
    product.in_registers = true, product.across = kAcross, product.add = add != 0, product.half = !is_same<T, bf16>::value;
    emulated_left(product, a, RTK_EMU_SITE("wgmma_registers"));
    emulated_products_push(product);
}

}  // namespace rtk::ptx
