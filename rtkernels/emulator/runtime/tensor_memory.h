// Tensor memory of a block, and the products of tcgen05 in it.
//
// Products and copies wait in a queue until a commit; the commit arrives as a bulk copy does (mbarrier.h), but in order.
// Then they happen: a stage that is filled again too early gives other sums. A read of words that a product has yet to
// write is a race.
#pragma once
#include "checks.h"
#include "numeric.h"

namespace emu {
namespace {

constexpr u32 kTensorLanes = 128, kTensorColumns = 512;
std::vector<u32> tensor_words;
u32 tensor_columns = 0;  // allocated, from the first on

struct TensorWork {
    TensorProduct product;  // or a copy of scales, if `copies`
    bool copies;
    u64 from;
    u32 first, columns;  // that it writes
};
std::vector<TensorWork> tensor_queue;    // not committed
std::vector<TensorWork> tensor_started;  // committed and not done: what reads must not touch

u32& tensor_at(u32 lane, u32 column) { return tensor_words[(lane % kTensorLanes) * kTensorColumns + column % kTensorColumns]; }

void start_tensor_memory() {
    tensor_columns = 0;
    tensor_queue.clear();
    tensor_started.clear();
}

void require_columns(u32 address, u32 columns, const char* what) {
    if ((address & 0xffffu) + columns > tensor_columns)
        fail(kOutOfBounds, current, nullptr, "%s: columns %u to %u of tensor memory, of which %u are allocated", what,
             address & 0xffffu, (address & 0xffffu) + columns - 1, tensor_columns);
}

float e2m1(u32 code) {
    constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8u ? -kValues[code & 7u] : kValues[code & 7u];
}

float e8m0(u32 code) { return code == 255u ? __builtin_nanf("") : code == 0u ? 0x1p-127f : float_of(code << 23); }

u32 rows_of(const TensorProduct& p) { return (p.instruction >> 24 & 31u) * 16u; }
u32 columns_of(const TensorProduct& p) { return (p.instruction >> 17 & 63u) * 8u; }
bool is_scaled(const TensorProduct& p) { return p.kind >= 2; }

// Element i of the 32 bytes of a row.
double element(const TensorProduct& p, u64 matrix, u32 row, u32 i, bool right) {
    const u32 format = p.instruction >> (right ? 10 : 7) & 7u;
    const u32 byte = p.kind == 0 ? 2 * i : p.kind == 3 ? i / 2 : i;
    const u64 at = matrix + row * 128 + byte, swizzled = at ^ (at >> 7 & 7u) << 4;
    if (p.kind == 0) {
        u16 bits;
        memcpy(&bits, reinterpret_cast<const void*>(swizzled), 2);
        return format == 1 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
    const u32 bits = *reinterpret_cast<const u8*>(swizzled);
    if (p.kind == 3) return e2m1(bits >> 4 * (i % 2) & 15u);
    return format == 1 ? e5m2_to_f32(bits) : e4m3_to_f32(bits);
}

// The scale of element i of a row.
double scale(const TensorProduct& p, u32 row, u32 i, bool right) {
    if (!is_scaled(p)) return 1.0;
    const u32 word = tensor_at(row % 32, (right ? p.scale_b : p.scale_a) + row / 32);
    const u32 byte = p.kind == 3 ? i / 16 : p.instruction >> (right ? 4 : 29) & 3u;
    const u32 code = word >> 8 * byte & 255u;
    return p.instruction >> 23 & 1u ? e8m0(code) : e4m3_to_f32(code & 127u);
}

void multiply(const TensorProduct& p) {
    const u32 depth = p.kind == 0 ? 16 : p.kind == 3 ? 64 : 32, rows = rows_of(p), columns = columns_of(p);
    std::vector<double> a(rows * depth), b(columns * depth);
    for (u32 k = 0; k < depth; ++k) {
        for (u32 row = 0; row < rows; ++row) a[row * depth + k] = element(p, p.a, row, k, false) * scale(p, row, k, false);
        for (u32 row = 0; row < columns; ++row) b[row * depth + k] = element(p, p.b, row, k, true) * scale(p, row, k, true);
    }
    for (u32 row = 0; row < rows; ++row)
        for (u32 column = 0; column < columns; ++column) {
            u32& word = tensor_at(row, (p.d & 0xffffu) + column);
            double sum = p.add ? float_of(word) : 0.0;
            for (u32 k = 0; k < depth; ++k) sum += a[row * depth + k] * b[column * depth + k];
            word = bits_of(static_cast<float>(sum));
        }
}

void copy_scales(const TensorWork& w) {
    for (u32 lane = 0; lane < kTensorLanes; ++lane)
        memcpy(&tensor_at(lane, w.first), reinterpret_cast<const void*>(w.from + lane % 32 * 16), 16);
}

void finish_tensor_work(size_t count) {
    for (size_t i = 0; i < count; ++i) tensor_started[i].copies ? copy_scales(tensor_started[i]) : multiply(tensor_started[i].product);
    tensor_started.erase(tensor_started.begin(), tensor_started.begin() + static_cast<long>(count));
}

void check_operand(u64 matrix, u32 rows, u32 row_bytes, u32 bytes) {
    for (u32 row = 0; row < rows; ++row)
        for (u32 i = 0; i < bytes; i += 16) {
            u64 at = matrix + row * row_bytes + i;
            if (row_bytes == 128) at ^= (at >> 7 & 7u) << 4;
            load_by_wgmma(reinterpret_cast<const void*>(at), 16);
        }
}

}  // namespace

u32 tensor_alloc(u32 columns) {
    if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1)) != 0)
        fail(kLaunchLimit, current, nullptr, "32 to %u columns of tensor memory, a power of two, not %u", kTensorColumns, columns);
    if (tensor_columns != 0) fail(kLaunchLimit, current, nullptr, "tensor memory is allocated twice");
    tensor_words.assign(kTensorLanes * kTensorColumns, 0x7ff57ff5u);
    tensor_columns = columns;
    return 0;
}

void tensor_free(u32 address, u32 columns) {
    if (address != 0 || columns != tensor_columns)
        fail(kLaunchLimit, current, nullptr, "tensor memory of %u columns is freed as %u", tensor_columns, columns);
    if (!tensor_queue.empty() || !tensor_started.empty())
        fail(kRace, current, nullptr, "tensor memory is freed before its products are done");
    tensor_columns = 0;
}

void tensor_product(const TensorProduct& p) {
    require_columns(p.d, columns_of(p), "sums");
    if (rows_of(p) != kTensorLanes) fail(kTrap, current, nullptr, "a product of %u rows; the emulator has those of 128", rows_of(p));
    if (is_scaled(p)) {
        const u32 words = columns_of(p) / 32;
        require_columns(p.scale_a, 4, "scales of a");
        require_columns(p.scale_b, words, "scales of b");
    }
    check_operand(p.a, rows_of(p), 128, 32);
    check_operand(p.b, columns_of(p), 128, 32);
    tensor_queue.push_back({p, false, 0, p.d & 0xffffu, columns_of(p)});
}

void tensor_copy_scales(u32 to, u64 from) {
    require_columns(to, 4, "scales");
    check_operand(from, 32, 16, 16);
    tensor_queue.push_back({{}, true, from, to & 0xffffu, 4});
}

void tensor_commit(void* barrier) {
    barrier_of_copy(barrier);
    BulkCopy arrival = {nullptr, nullptr, 0, reinterpret_cast<u64>(barrier), {}, moment()};
    arrival.products = static_cast<long>(tensor_queue.size());
    tensor_started.insert(tensor_started.end(), tensor_queue.begin(), tensor_queue.end());
    tensor_queue.clear();
    flying.push_back(arrival);
}

u32 tensor_word(u32 address) {
    const u32 lane = (address >> 16) + emu::lane(), column = address & 0xffffu;
    require_columns(address, 1, "a read");
    if ((address >> 16) != current->id / 32 % 4 * 32)
        fail(kOutOfBounds, current, nullptr, "warp %u reads lane %u of tensor memory", current->id / 32, address >> 16);
    for (const std::vector<TensorWork>* works : {&tensor_queue, &tensor_started})
        for (const TensorWork& w : *works)
            if (column >= w.first && column < w.first + w.columns)
                fail(kRace, current, nullptr, "column %u of tensor memory is read before the product that writes it is done", column);
    return tensor_at(lane, column);
}

}  // namespace emu
