// Every access of a kernel ends here: bounds, alignment, shared memory never written, unordered conflicts.
#pragma once
#include "state.h"

namespace emu {
namespace {

// ---- order of accesses ------------------------------------------------------------------------------------------

Clock* new_clock() {
    if (free_clocks.empty()) return new Clock;
    Clock* clock = free_clocks.back();
    free_clocks.pop_back();
    return clock;
}
void drop(Clock* clock) {
    if (--clock->users == 0) free_clocks.push_back(clock);
}

// Everything these threads did so far happens before anything they do from now on.
template <typename F>
void synchronise(u32 count, F thread_at) {
    if (!launch->races) return;
    Clock* joined = new_clock();
    const Clock* previous = thread_at(0)->clock;
    memcpy(joined->seen, previous->seen, block_threads * sizeof(u32));
    joined->users = count;
    for (u32 i = 1; i < count; ++i) {
        const Clock* other = thread_at(i)->clock;
        if (other == previous) continue;
        for (u32 j = 0; j < block_threads; ++j) joined->seen[j] = std::max(joined->seen[j], other->seen[j]);
        previous = other;
    }
    for (u32 i = 0; i < count; ++i) {
        Thread* t = thread_at(i);
        joined->seen[t->id] = t->now++;
        drop(t->clock);
        t->clock = joined;
    }
}

// ---- access checks ----------------------------------------------------------------------------------------------

[[noreturn]] void report(int kind, u32 bytes, bool write, int segment, long long offset, void* pc,
                         const char* detail) {
    Error& e = launch->error;
    e.write = write, e.size = bytes, e.segment = segment, e.offset = offset;
    fail(kind, current, pc, "%s", detail);
}

[[noreturn]] void report_race(u64 a, u32 bytes, bool write, u32 other, bool other_write, void* pc) {
    char text[200];
    const uint3 o = threads[other].index;
    snprintf(text, sizeof(text), "thread (%u,%u,%u) %s it and no barrier lies between the two", o.x, o.y, o.z,
             other_write ? "wrote" : "read");
    report(kRace, bytes, write, -1, static_cast<long long>(a - shared_range.begin), pc, text);
}

void shared_access(u64 a, u32 bytes, bool write, bool atomic, void* pc) {
    const u64 offset = a - shared_range.begin;
    if (offset + bytes > shared_range.size || (dynamic_range.has(a + bytes - 1) &&
                                               a + bytes - dynamic_range.begin > launch->shared_bytes)) {
        char text[120];
        snprintf(text, sizeof(text), "the launch gave it %llu bytes of dynamic shared memory", launch->shared_bytes);
        report(kOutOfBounds, bytes, write, -2, static_cast<long long>(a - dynamic_range.begin), pc, text);
    }
    const u32 me = current->id, now = current->now, *seen = current->clock->seen;
    for (Shadow *s = &shadow[offset], *end = s + bytes; s != end; ++s) {
        if ((!write || atomic) && !s->written)
            report(kUninitialisedShared, bytes, write, -1, static_cast<long long>(offset), pc, "");
        if (launch->races && !atomic) {
            // Lanes of one warp may store to one place with one instruction: which wins is undefined, but it is legal.
            if (s->written == 1 && s->writer != me && s->write_time > seen[s->writer] &&
                !(write && s->writer / 32 == me / 32))
                report_race(a, bytes, write, s->writer, true, pc);
            if (write && s->read_time && s->reader != me && s->read_time > seen[s->reader])
                report_race(a, bytes, write, s->reader, false, pc);
        }
        if (write) {
            s->writer = static_cast<u16>(me), s->write_time = now, s->written = atomic ? 2 : 1;
        } else if (!s->read_time || s->read_time <= seen[s->reader] || s->reader == me) {
            s->reader = static_cast<u16>(me), s->read_time = now;
        }
    }
}

bool all_valid(const u8* valid, u32 bytes) {
    u64 a, b;
    switch (bytes) {
        case 4: { u32 w; memcpy(&w, valid, 4); return w == 0x01010101u; }
        case 8: memcpy(&a, valid, 8); return a == 0x0101010101010101ull;
        case 16: memcpy(&a, valid, 8), memcpy(&b, valid + 8, 8); return (a & b) == 0x0101010101010101ull;
        default:
            for (u32 i = 0; i < bytes; ++i)
                if (!valid[i]) return false;
            return true;
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

inline void access(const void* p, u32 bytes, bool write, bool aligned, bool atomic, void* pc) {
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
    if (offset + bytes > s->bytes || !all_valid(s->valid + offset, bytes))
        report(kOutOfBounds, bytes, write, index, static_cast<long long>(offset), pc, "");
    if (write) s->written = 1;
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

void check_atomic(const void* p, u32 bytes) { access(p, bytes, true, true, true, __builtin_return_address(0)); }

void cp_async(void* shared, const void* global, u32 bytes, u32 from_global) {
    void* pc = __builtin_return_address(0);
    if (!shared_range.has(reinterpret_cast<u64>(shared)))
        report(kOutOfBounds, bytes, true, -1, reinterpret_cast<long long>(shared), pc, "");
    access(shared, bytes, true, true, false, pc);
    if (from_global) access(global, from_global, false, false, false, pc);
    if (reinterpret_cast<u64>(global) % bytes != 0)
        report(kMisaligned, bytes, false, -1, 0, pc, "source of cp.async");
    const u64 offset = reinterpret_cast<u64>(shared) - shared_range.begin;
    for (u32 i = 0; i < bytes; ++i) shadow[offset + i].written = 0;  // in flight: nobody may read it yet
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
            shadow[at + i].written = 1;
            shadow[at + i].write_time = current->now;
        }
    }
    queue.erase(queue.begin(), queue.begin() + static_cast<long>(n));
}

void cp_async_wait(u32 in_flight) { finish_copies(std::max(current->copy_group, in_flight) - in_flight); }

}  // namespace emu

// ---- what the compiler calls before every load and store --------------------------------------------------------

#define RTK_EMU_HOOK(name, bytes, write, aligned)                                    \
    extern "C" __attribute__((visibility("default"))) void name(void* p) {           \
        emu::access(p, bytes, write, aligned, false, __builtin_return_address(0));   \
    }
#define RTK_EMU_HOOKS(n)                                \
    RTK_EMU_HOOK(__tsan_read##n, n, false, true)        \
    RTK_EMU_HOOK(__tsan_write##n, n, true, true)        \
    RTK_EMU_HOOK(__tsan_unaligned_read##n, n, false, false) \
    RTK_EMU_HOOK(__tsan_unaligned_write##n, n, true, false)
RTK_EMU_HOOKS(1)
RTK_EMU_HOOKS(2)
RTK_EMU_HOOKS(4)
RTK_EMU_HOOKS(8)
RTK_EMU_HOOKS(16)

#pragma GCC visibility push(default)
extern "C" {
void __tsan_read_range(void* p, unsigned long n) {
    emu::access(p, static_cast<emu::u32>(n), false, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long n) {
    emu::access(p, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));
}
// clang's names for copies it does not expand; older ones call the C functions, which the linker wraps.
#define RTK_EMU_COPY(name, function)                                                                              \
    void* name(void* to, const void* from, unsigned long n) {                                                     \
        emu::access(from, static_cast<emu::u32>(n), false, false, false, __builtin_return_address(0));            \
        emu::access(to, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));               \
        return function(to, from, n);                                                                             \
    }
#define RTK_EMU_SET(name)                                                                                         \
    void* name(void* to, int value, unsigned long n) {                                                            \
        emu::access(to, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));               \
        return memset(to, value, n);                                                                              \
    }
RTK_EMU_COPY(__tsan_memcpy, memcpy)
RTK_EMU_COPY(__wrap_memcpy, memcpy)
RTK_EMU_COPY(__tsan_memmove, memmove)
RTK_EMU_COPY(__wrap_memmove, memmove)
RTK_EMU_SET(__tsan_memset)
RTK_EMU_SET(__wrap_memset)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#pragma GCC visibility pop
