// Every access of a kernel ends here: bounds and alignment; shadow.h and global_order.h check the rest.
#pragma once
#include "global_order.h"

namespace emu {
namespace {

// Bits of a tensor's byte mask; those of `Touched` are for the kernels after this one.
enum Mask : u8 { kElement = 1, kTouchedByWrite = 2, kTouchedByRead = 4, kPending = 0xf0 };

template <typename W>
inline bool touch_word(u8* mask, bool write, bool& pending) {
    constexpr W kEach = static_cast<W>(~static_cast<W>(0)) / 255;
    W w;
    memcpy(&w, mask, sizeof(w));
    if ((w & kEach) != kEach) return false;
    pending = pending || (w & static_cast<W>(kEach * kPending)) != 0;
    w |= static_cast<W>(kEach * (write ? kTouchedByWrite : kTouchedByRead));
    memcpy(mask, &w, sizeof(w));
    return true;
}

// Records an access in the mask; false if a byte belongs to no element. `pending`: an earlier kernel may still use one.
inline bool touch(u8* mask, u32 bytes, bool write, bool& pending) {
    switch (bytes) {
        case 1: return touch_word<u8>(mask, write, pending);
        case 2: return touch_word<u16>(mask, write, pending);
        case 4: return touch_word<u32>(mask, write, pending);
        case 8: return touch_word<u64>(mask, write, pending);
        default:
            for (u32 i = 0; i < bytes; ++i)
                if (!touch_word<u8>(mask + i, write, pending)) return false;
            return true;
        case 16: return touch_word<u64>(mask, write, pending) && touch_word<u64>(mask + 8, write, pending);
    }
}

[[noreturn, gnu::noinline]] void foreign_access(u64 a, u32 bytes, bool write, void* pc) {
    int nearest = -1;
    long long best = 0;
    for (u64 i = 0; i < launch->segment_count; ++i) {
        const Segment& s = launch->segments[i];
        const long long offset = static_cast<long long>(a) - reinterpret_cast<long long>(s.copy);
        const long long distance = offset < 0 ? -offset : std::max(0ll, offset - static_cast<long long>(s.bytes));
        if (nearest < 0 || distance < best) nearest = static_cast<int>(i), best = distance;
    }
    const bool null = a < 4096 || best > static_cast<long long>(kGap);
    if (null) nearest = -1;
    report(kOutOfBounds, bytes, write, nearest,
           static_cast<long long>(a) - (null ? 0 : reinterpret_cast<long long>(launch->segments[nearest].copy)), pc,
           "");
}

// `is_volatile`: no other block sees a part of it, and it may signal other writes to them.
inline void access(const void* p, u32 bytes, bool write, bool aligned, bool atomic, void* pc, bool is_volatile = false) {
    const u64 a = reinterpret_cast<u64>(p);
    if (stack_range.has(a)) return;
    const bool bad = aligned && (a & (bytes - 1)) != 0;
    if (shared_range.has(a)) {
        if (bad) report(kMisaligned, bytes, write, -1, static_cast<long long>(a - shared_range.begin), pc, "");
        return shared_access(a, bytes, write, atomic, pc);
    }
    Segment* s = last_segment;
    if (!s || a - reinterpret_cast<u64>(s->copy) >= s->bytes) {
        if (runtime_range.has(a) || module_range.has(a)) return;  // threadIdx; constants and tables of the unit
        // The copies lie in the order of the segments.
        Segment* const end = launch->segments + launch->segment_count;
        s = std::upper_bound(launch->segments, end, a,
                             [](u64 at, const Segment& next) { return at < reinterpret_cast<u64>(next.copy); });
        if (s-- == launch->segments || a - reinterpret_cast<u64>(s->copy) >= s->bytes)
            foreign_access(a, bytes, write, pc);
        last_segment = s;
    }
    const u64 offset = a - reinterpret_cast<u64>(s->copy);
    const int index = static_cast<int>(s - launch->segments);
    if (bad) report(kMisaligned, bytes, write, index, static_cast<long long>(offset), pc, "");
    bool pending = false;
    if (offset + bytes > s->bytes || !touch(s->mask + offset, bytes, write, pending))
        report(kOutOfBounds, bytes, write, index, static_cast<long long>(offset), pc, "");
    if (pending) check_previous(*s, offset, bytes, write, pc);
    if (tracked) {
        if (is_volatile) strong_access();
        global_access(*s, offset, bytes, write, atomic || (is_volatile && write), pc);
    }
    if (write) s->written = 1;
}

// Checks addresses of shared memory that instructions take: the shadow covers no others.
void require_shared(const void* p, u32 bytes, bool write, const char* what, void* pc) {
    const u64 a = reinterpret_cast<u64>(p);
    if (!shared_range.has(a) || a - shared_range.begin + bytes > shared_range.size)
        report(kOutOfBounds, bytes, write, -1, static_cast<long long>(a), pc, what);
}

}  // namespace

// ---- accesses the compiler does not see as plain loads and stores -----------------------------------------------

Word16 load(const void* p, u32 bytes) {
    access(p, bytes, false, true, false, __builtin_return_address(0));
    Word16 value = {};
    memcpy(&value, p, bytes);
    return value;
}

void store(void* p, Word16 value, u32 bytes) {
    access(p, bytes, true, true, false, __builtin_return_address(0));
    memcpy(p, &value, bytes);
}

void trap(Site site) { fail(kTrap, current, nullptr, "%s, %s:%d", site.what, site.file, site.line); }

void check_atomic(const void* p, u32 bytes) {
    if (!shared_range.has(reinterpret_cast<u64>(p))) strong_access();
    access(p, bytes, true, true, true, __builtin_return_address(0));
}

Word16 load_strong(const void* p) {
    strong_access();
    access(p, 16, false, true, true, __builtin_return_address(0));
    Word16 value;
    memcpy(&value, p, 16);
    return value;
}

void store_strong(void* p, Word16 value) {
    strong_access();
    access(p, 16, true, true, true, __builtin_return_address(0));
    memcpy(p, &value, 16);
}

Word16 load_by_wgmma(const void* p, u32 bytes) {
    void* pc = __builtin_return_address(0);
    require_shared(p, bytes, false, "an operand of wgmma that is not in shared memory", pc);
    access(p, bytes, false, true, false, pc);
    check_proxy(reinterpret_cast<u64>(p) - shared_range.begin, bytes, false, "wgmma", pc);
    Word16 value = {};
    memcpy(&value, p, bytes);
    return value;
}

void leave_undefined(void* shared, u32 bytes) {
    u8* const first = static_cast<u8*>(shared);
    require_shared(first, bytes, true, "not shared memory", __builtin_return_address(0));
    for (u32 i = 0; i < bytes; ++i) {
        access(first + i, 1, true, true, false, __builtin_return_address(0));
        first[i] = kPoison[i % 2];
        shadow[reinterpret_cast<u64>(first + i) - shared_range.begin].state = kCopyEngine;
    }
}

void cp_async(void* shared, const void* global, u32 bytes, u32 from_global) {
    void* pc = __builtin_return_address(0);
    require_shared(shared, bytes, true, "target of cp.async that is not in shared memory", pc);
    if (from_global > bytes)
        report(kOutOfBounds, from_global, false, -1, reinterpret_cast<long long>(global), pc,
               "cp.async reads more than it writes");
    access(shared, bytes, true, true, false, pc);
    if (from_global) access(global, from_global, false, false, false, pc);
    if (reinterpret_cast<u64>(global) % bytes != 0)
        report(kMisaligned, bytes, false, -1, 0, pc, "source of cp.async");
    const u64 offset = reinterpret_cast<u64>(shared) - shared_range.begin;
    for (u32 i = 0; i < bytes; ++i) shadow[offset + i].state = kUnwritten;  // in flight: nobody may read it yet
    current->copies.push_back({static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, from_global,
                               current->copy_group});
}

void cp_async_commit() { ++current->copy_group; }

// The copies of groups before `end_group` arrive.
static void finish_copies(u32 end_group) {
    std::vector<Copy>& queue = current->copies;
    size_t n = 0;
    for (; n < queue.size() && queue[n].group < end_group; ++n) {
        const Copy& c = queue[n];
        memcpy(c.to, c.from, c.from_global);
        memset(c.to + c.from_global, 0, c.bytes - c.from_global);
        for (u64 i = 0, at = reinterpret_cast<u64>(c.to) - shared_range.begin; i < c.bytes; ++i) {
            shadow[at + i].state = kPlain;
            shadow[at + i].time = current->now;
        }
    }
    queue.erase(queue.begin(), queue.begin() + static_cast<long>(n));
}

void cp_async_wait(u32 in_flight) { finish_copies(std::max(current->copy_group, in_flight) - in_flight); }

// Any number of bytes; the last one is checked as well as the first.
static void access_range(const void* p, u64 bytes, bool write, void* pc) {
    constexpr u64 kMaxPart = 1 << 30;
    for (const u8* at = static_cast<const u8*>(p); bytes != 0;) {
        const u64 part = std::min(bytes, kMaxPart);
        access(at, static_cast<u32>(part), write, false, false, pc);
        at += part, bytes -= part;
    }
}

}  // namespace emu

// ---- what the compiler calls before every load and store --------------------------------------------------------

#define RTK_EMU_HOOK(name, bytes, write, aligned, ...)                                                    \
    extern "C" __attribute__((visibility("default"))) void name(void* p) {                                \
        emu::access(p, bytes, write, aligned, false, __builtin_return_address(0), ##__VA_ARGS__);         \
    }
#define RTK_EMU_HOOKS(n)                                \
    RTK_EMU_HOOK(__tsan_read##n, n, false, true)        \
    RTK_EMU_HOOK(__tsan_write##n, n, true, true)        \
    RTK_EMU_HOOK(__tsan_unaligned_read##n, n, false, false) \
    RTK_EMU_HOOK(__tsan_unaligned_write##n, n, true, false) \
    RTK_EMU_HOOK(__tsan_volatile_read##n, n, false, true, true) \
    RTK_EMU_HOOK(__tsan_volatile_write##n, n, true, true, true)
RTK_EMU_HOOKS(1)
RTK_EMU_HOOKS(2)
RTK_EMU_HOOKS(4)
RTK_EMU_HOOKS(8)
RTK_EMU_HOOKS(16)

#pragma GCC visibility push(default)
extern "C" {
void __tsan_read_range(void* p, unsigned long n) { emu::access_range(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { emu::access_range(p, n, true, __builtin_return_address(0)); }
// clang's names for copies it does not expand; older ones call the C functions, which the linker wraps.
#define RTK_EMU_COPY(name, function)                                                                              \
    void* name(void* to, const void* from, unsigned long n) {                                                     \
        emu::access_range(from, n, false, __builtin_return_address(0));                                           \
        emu::access_range(to, n, true, __builtin_return_address(0));                                              \
        return function(to, from, n);                                                                             \
    }
#define RTK_EMU_SET(name)                                                                                         \
    void* name(void* to, int value, unsigned long n) {                                                            \
        emu::access_range(to, n, true, __builtin_return_address(0));                                              \
        return memset(to, value, n);                                                                              \
    }
RTK_EMU_COPY(__tsan_memcpy, memcpy)
RTK_EMU_COPY(__wrap_memcpy, memcpy)
RTK_EMU_COPY(__tsan_memmove, memmove)
RTK_EMU_COPY(__wrap_memmove, memmove)
RTK_EMU_SET(__tsan_memset)
RTK_EMU_SET(__wrap_memset)
#ifdef RTK_EMU_SANITIZED
// Kernels compiled with AddressSanitizer call it through these (_compiler.py). Of two accesses to one address it may
// report the first only, a read before a write, so every tensor that is touched counts as written.
#define RTK_EMU_SANITIZED_ACCESS(kind, size, write)                                        \
    void __asan_##kind##size(void* p);                                                     \
    void __wrap___asan_##kind##size(void* p) {                                             \
        emu::access(p, size, write, false, false, __builtin_return_address(0));            \
        if (emu::last_segment) emu::last_segment->written = 1;                             \
        __asan_##kind##size(p);                                                            \
    }
#define RTK_EMU_SANITIZED_ACCESSES(kind, write)                                            \
    RTK_EMU_SANITIZED_ACCESS(kind, 1, write)                                               \
    RTK_EMU_SANITIZED_ACCESS(kind, 2, write)                                               \
    RTK_EMU_SANITIZED_ACCESS(kind, 4, write)                                               \
    RTK_EMU_SANITIZED_ACCESS(kind, 8, write)                                               \
    RTK_EMU_SANITIZED_ACCESS(kind, 16, write)                                              \
    void __asan_##kind##N(void* p, unsigned long n);                                       \
    void __wrap___asan_##kind##N(void* p, unsigned long n) {                               \
        emu::access_range(p, n, write, __builtin_return_address(0));                       \
        if (emu::last_segment) emu::last_segment->written = 1;                             \
        __asan_##kind##N(p, n);                                                            \
    }
RTK_EMU_SANITIZED_ACCESSES(load, false)
RTK_EMU_SANITIZED_ACCESSES(store, true)
RTK_EMU_COPY(__wrap___asan_memcpy, memcpy)
RTK_EMU_COPY(__wrap___asan_memmove, memmove)
RTK_EMU_SET(__wrap___asan_memset)
#endif
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#pragma GCC visibility pop
