// The memory of a launch: its kernel's shared variables, copies of its tensors; and the limits of launches.
#pragma once
#include "state.h"

#include <link.h>

namespace emu {
namespace {

extern "C" void* __tls_get_addr(const u64 (&module_and_offset)[2]);  // of the dynamic linker

// The loaded extent and the thread-local block (the shared memory) of the object that holds `address`.
struct Module {
    u64 address;
    Range loaded, tls;
};
int find_module(dl_phdr_info* info, size_t, void* data) {
    Module& m = *static_cast<Module*>(data);
    u64 begin = ~0ull, end = 0;
    Range tls = {0, 0};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& h = info->dlpi_phdr[i];
        if (h.p_type == PT_LOAD) {
            begin = std::min<u64>(begin, info->dlpi_addr + h.p_vaddr);
            end = std::max<u64>(end, info->dlpi_addr + h.p_vaddr + h.p_memsz);
        } else if (h.p_type == PT_TLS) {
            tls = {0, h.p_memsz};
        }
    }
    if (m.address < begin || m.address >= end) return 0;
    m.loaded = {begin, end - begin};
    m.tls = tls;
    // dlpi_tls_data is null until a thread first accesses the block this way, even if the block exists.
    const u64 block[2] = {info->dlpi_tls_modid, 0};
    if (tls.size) m.tls.begin = reinterpret_cast<u64>(__tls_get_addr(block));
    return 1;
}

void place_segments() {
    u64 total = kGap;
    for (u64 i = 0; i < launch->segment_count; ++i) total += launch->segments[i].bytes + kGap + 256;
    arena = static_cast<u8*>(malloc(total));
    u64 at = reinterpret_cast<u64>(arena) + kGap;
    for (u64 i = 0; i < launch->segment_count; ++i) {
        Segment& s = launch->segments[i];
        at += (reinterpret_cast<u64>(s.host) - at) & 255;  // same address modulo 256
        s.copy = reinterpret_cast<u8*>(at);
        s.written = 0;
        memcpy(s.copy, s.host, s.bytes);
        at += s.bytes + kGap;
    }
    forbid(arena, total);
    for (u64 i = 0; i < launch->segment_count; ++i) allow(launch->segments[i].copy, launch->segments[i].bytes);
    for (u32 i = 0; i < launch->arg_count; ++i)
        if (launch->arg_segment[i] >= 0)
            launch->args[i] += reinterpret_cast<u64>(launch->segments[launch->arg_segment[i]].copy);
    for (u64 i = 0; i < launch->relocation_count; ++i) {
        const Relocation& r = launch->relocations[i];
        const u8* target = launch->segments[r.target].copy + r.target_at;
        memcpy(launch->segments[r.segment].copy + r.at, &target, sizeof(target));
    }
}

void copy_back() {
    for (u64 i = 0; i < launch->relocation_count; ++i) {
        const Relocation& r = launch->relocations[i];
        const Segment& s = launch->segments[r.segment];
        memcpy(s.copy + r.at, s.host + r.at, sizeof(u64));
    }
    for (u64 i = 0; i < launch->segment_count; ++i) {
        const Segment& s = launch->segments[i];
        if (s.written) memcpy(s.host, s.copy, s.bytes);
    }
}

// The reason why a launch cannot start, or an empty string.
void check_limits(const Launch& l, u64 dynamic_capacity, char* text, size_t n) {
    const u64 shared_bytes = shared_range.size - dynamic_capacity + l.shared_bytes;
    const u64 all = static_cast<u64>(l.block[0]) * l.block[1] * l.block[2];
    text[0] = 0;
    if (all == 0 || all > kMaxThreads || l.block[2] > 64)
        snprintf(text, n, "a block has 1 to %u threads and at most 64 in z, not (%u, %u, %u)", kMaxThreads, l.block[0],
                 l.block[1], l.block[2]);
    else if (l.max_threads && all > l.max_threads)
        snprintf(text, n, "a block of %llu threads, the __launch_bounds__ of the kernel allow %u", all, l.max_threads);
    else if (l.grid[0] > 0x7fffffffu || l.grid[1] > 65535 || l.grid[2] > 65535)
        snprintf(text, n, "a grid has at most 2147483647 blocks in x and 65535 in y and z, not (%u, %u, %u)", l.grid[0],
                 l.grid[1], l.grid[2]);
    else if (static_cast<u64>(l.grid[0]) * l.grid[1] > 0xffffffffull / std::max(l.grid[2], 1u))
        snprintf(text, n, "the emulator numbers blocks with 32 bits, and (%u, %u, %u) are more", l.grid[0], l.grid[1],
                 l.grid[2]);
    else if (l.cluster == 0 || l.cluster > kMaxCluster || l.grid[0] % l.cluster != 0)
        snprintf(text, n, "clusters of %u blocks, which is not 1 to %u or no divisor of %u", l.cluster, kMaxCluster,
                 l.grid[0]);
    else if (shared_bytes > l.shared_limit || l.shared_bytes > dynamic_capacity)
        snprintf(text, n, "%llu bytes of shared memory (%llu dynamic), the limit is %llu", shared_bytes, l.shared_bytes,
                 dynamic_capacity ? l.shared_limit : shared_range.size);
}

}  // namespace
}  // namespace emu
