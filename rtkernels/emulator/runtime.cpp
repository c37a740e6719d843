// Fibers, barriers, warp operations and access checks of the emulator. Compiled once per machine, without the
// sanitizer flag of the kernels; include/execution.h is the interface.
#define RTK_EMU_RUNTIME
#include "execution.h"

#undef __noinline__  // the C library's headers use these words
#undef __host__
#undef alignas

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {
namespace {

// ---- context switch ---------------------------------------------------------------------------------------------

// Saves the callee-saved registers on the current stack, stores its pointer to *from and continues on `to`.
extern "C" void rtk_emu_switch(void** from, void* to);

#if defined(__aarch64__)
__asm__(R"(
    .text
    .globl rtk_emu_switch
    .hidden rtk_emu_switch
    .type rtk_emu_switch, %function
rtk_emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
constexpr int kFrameWords = 20, kReturnWord = 11;
#elif defined(__x86_64__)
__asm__(R"(
    .text
    .globl rtk_emu_switch
    .hidden rtk_emu_switch
    .type rtk_emu_switch, @function
rtk_emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
constexpr int kFrameWords = 8, kReturnWord = 6;  // one word more: a function starts 8 bytes off a multiple of 16
#else
#error "the emulator's context switch knows aarch64 and x86_64"
#endif

// ---- state ------------------------------------------------------------------------------------------------------

enum Kind {
    kOutOfBounds = 1, kMisaligned, kUninitialisedShared, kRace, kDivergentBarrier, kAbsentLanes, kLaunchLimit
};
enum class State : u8 { ready, barrier, warp, done };

constexpr u32 kMaxThreads = 1024;
constexpr u64 kStackBytes = 256 << 10;
constexpr u64 kGap = 1 << 16;  // between tensors in the arena

// What a thread knows of the others' progress, for ordering shared-memory accesses (FastTrack's vector clocks).
// Threads that left the same barrier share one.
struct Clock {
    u32 users;
    u32 seen[kMaxThreads];
};

struct Copy {
    u8* to;
    const u8* from;
    u32 bytes, from_global, group;
};

struct Thread {
    void* stack;
    uint3 index;
    u32 id;
    State state;
    Site site;
    u32 mask;        // warp: lanes waited for
    u64 value;       // warp: own deposit
    u64 all[32];     // warp: everyone's deposit
    int count;       // barrier: its result
    u32 active;      // lanes of its warp that had not returned when it last waited
    Clock* clock;
    u32 now;
    u32 copy_group;
    std::vector<Copy> copies;
};

struct Warp {
    u32 alive;    // lanes that exist and have not returned
    u32 waiting;  // lanes in a warp operation
};

struct Barrier {
    u32 expected, arrived;
    int votes;
    Site site;
    u32 threads[kMaxThreads];
};

// One byte of shared memory: who wrote and read it last, and when on that thread's clock.
struct Shadow {
    u32 write_time, read_time;
    u16 writer, reader;
    u16 written;
};

u8* stacks;
Thread threads[kMaxThreads];
Warp warps[kMaxThreads / 32];
Barrier barriers[16];
std::vector<Clock*> free_clocks;
std::vector<Shadow> shadow;
std::vector<u8> arena;
void* scheduler;
Thread* current;
Launch* launch;
Entry entry;
u32 block_threads, done_threads;
u64 random_state;

struct Range {
    u64 begin, size;
    bool has(u64 a) const { return a - begin < size; }
};
Range stack_range, shared_range, dynamic_range, module_range, runtime_range;
Segment* last_segment;

void suspend() { rtk_emu_switch(&current->stack, scheduler); }

// Records the first error and leaves the block for good.
[[noreturn]] void fail(int kind, const Thread* thread, void* pc, const char* format, ...) {
    Error& e = launch->error;
    e.kind = kind;
    memcpy(e.block, &blockIdx, sizeof(e.block));
    memcpy(e.thread, &thread->index, sizeof(e.thread));
    e.pc = pc && module_range.has(reinterpret_cast<u64>(pc)) ? reinterpret_cast<u64>(pc) - module_range.begin : 0;
    va_list list;
    va_start(list, format);
    vsnprintf(e.detail, sizeof(e.detail), format, list);
    va_end(list);
    void* nowhere;
    rtk_emu_switch(&nowhere, scheduler);
    __builtin_unreachable();
}

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

[[gnu::noinline]] void foreign_access(u64 a, u32 bytes, bool write, void* pc) {
    if (module_range.has(a) || runtime_range.has(a)) return;  // constants and tables of the unit
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
        s = nullptr;
        for (u64 i = 0; i < launch->segment_count; ++i)
            if (a - reinterpret_cast<u64>(launch->segments[i].copy) < launch->segments[i].bytes)
                s = &launch->segments[i];
        if (!s) return foreign_access(a, bytes, write, pc);
        last_segment = s;
    }
    const u64 offset = a - reinterpret_cast<u64>(s->copy);
    const int index = static_cast<int>(s - launch->segments);
    if (bad) report(kMisaligned, bytes, write, index, static_cast<long long>(offset), pc, "");
    if (offset + bytes > s->bytes || !all_valid(s->valid + offset, bytes))
        report(kOutOfBounds, bytes, write, index, static_cast<long long>(offset), pc, "");
    if (write) s->written = 1;
}

// ---- scheduler --------------------------------------------------------------------------------------------------

u64 random_word() {  // splitmix64
    u64 z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void arrange(std::vector<u64>& order, u64 n) {
    if (order.size() != n) {
        order.resize(n);
        for (u64 i = 0; i < n; ++i) order[i] = launch->order == 1 ? n - 1 - i : i;
    }
    if (launch->order > 1)
        for (u64 i = n - 1; i > 0; --i) std::swap(order[i], order[random_word() % (i + 1)]);
}

void finish_copies(u32 end_group);

void fiber_main() {
    u64 args[64];  // a copy on the fiber's own stack, so that reading them is not a tracked access
    memcpy(args, launch->args, launch->arg_count * sizeof(u64));
    entry(args);
    finish_copies(~0u);
    current->state = State::done;
    warps[current->id / 32].alive &= ~(1u << current->id % 32);
    ++done_threads;
    suspend();
    __builtin_unreachable();
}

void wake(Thread* t) {
    t->state = State::ready;
    t->active = warps[t->id / 32].alive;
}

void describe(char* out, size_t n, const Thread& t) {
    const uint3 i = t.index;
    if (t.state == State::done)
        snprintf(out, n, "thread (%u,%u,%u) has returned", i.x, i.y, i.z);
    else
        snprintf(out, n, "thread (%u,%u,%u) waits at %s, %s:%d", i.x, i.y, i.z, t.site.what, t.site.file, t.site.line);
}

// Nothing can run: name one thread that waits and one that keeps it waiting.
void report_stuck() {
    const Thread* waiting = nullptr;
    for (u32 i = 0; i < block_threads && !waiting; ++i)
        if (threads[i].state == State::warp) waiting = &threads[i];
    for (u32 i = 0; i < block_threads && !waiting; ++i)
        if (threads[i].state == State::barrier) waiting = &threads[i];
    const Thread* other = nullptr;
    for (u32 i = 0; i < block_threads && !other; ++i) {
        const Thread& t = threads[i];
        const bool same_wait = t.state == waiting->state && t.site.line == waiting->site.line &&
                               strcmp(t.site.file, waiting->site.file) == 0;
        if (waiting->state == State::warp) {
            if (t.id / 32 != waiting->id / 32 || !(waiting->mask >> (t.id % 32) & 1u)) continue;
            if (!same_wait || t.mask != waiting->mask) other = &t;
        } else if (!same_wait) {
            other = &t;
        }
    }
    char a[300], b[300] = "too few threads of the block reach it";
    describe(a, sizeof(a), *waiting);
    if (other) describe(b, sizeof(b), *other);
    Error& e = launch->error;
    e.kind = waiting->state == State::warp ? kAbsentLanes : kDivergentBarrier;
    memcpy(e.block, &blockIdx, sizeof(e.block));
    memcpy(e.thread, &waiting->index, sizeof(e.thread));
    snprintf(e.detail, sizeof(e.detail), "%s, but %s", a, b);
}

void resume(Thread* t) {
    current = t;
    threadIdx = t->index;
    rtk_emu_switch(&scheduler, t->stack);
}

void start_thread(u32 id, Clock* clock) {
    Thread& t = threads[id];
    u64* top = reinterpret_cast<u64*>(stacks + (id + 1) * kStackBytes) - 2;
    u64* frame = top - kFrameWords;
    memset(frame, 0, kFrameWords * sizeof(u64));
    frame[kReturnWord] = reinterpret_cast<u64>(&fiber_main);
    t.stack = frame;
    t.id = id;
    t.index = {id % blockDim.x, id / blockDim.x % blockDim.y, id / blockDim.x / blockDim.y};
    t.state = State::ready;
    t.active = warps[id / 32].alive;
    t.clock = clock;
    t.now = 1;
    t.copy_group = 0;
    t.copies.clear();
}

void poison(u64 begin, u64 end) {
    memset(reinterpret_cast<void*>(begin), 0xff, end - begin);
    memset(static_cast<void*>(shadow.data() + (begin - shared_range.begin)), 0, (end - begin) * sizeof(Shadow));
}

bool run_block(std::vector<u64>& order) {
    const u64 end = shared_range.begin + shared_range.size;
    if (dynamic_range.size) {  // static variables may lie on both sides
        poison(shared_range.begin, dynamic_range.begin);
        poison(dynamic_range.begin, dynamic_range.begin + launch->shared_bytes);
        poison(dynamic_range.begin + dynamic_range.size, end);
    } else {
        poison(shared_range.begin, end);
    }
    memset(barriers, 0, sizeof(barriers));
    Clock* clock = new_clock();
    memset(clock->seen, 0, sizeof(u32) * block_threads);
    clock->users = block_threads;
    for (u32 i = 0; i < block_threads; i += 32)
        warps[i / 32] = {block_threads - i >= 32 ? ~0u : (1u << (block_threads - i)) - 1u, 0};
    for (u32 i = 0; i < block_threads; ++i) start_thread(i, clock);
    done_threads = 0;
    while (done_threads < block_threads) {
        bool progress = false;
        arrange(order, block_threads);
        for (u64 i : order) {
            if (threads[i].state != State::ready) continue;
            progress = true;
            resume(&threads[i]);
            if (launch->error.kind) return false;
        }
        if (!progress) return report_stuck(), false;
    }
    for (u32 i = 0; i < block_threads; ++i) drop(threads[i].clock);
    return true;
}

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
    // dlpi_tls_data is null for a block nobody asked for in this way yet, even if the thread has one.
    const u64 block[2] = {info->dlpi_tls_modid, 0};
    if (tls.size) m.tls.begin = reinterpret_cast<u64>(__tls_get_addr(block));
    return 1;
}

void place_segments() {
    u64 total = kGap;
    for (u64 i = 0; i < launch->segment_count; ++i) total += launch->segments[i].bytes + kGap + 4096;
    if (arena.size() < total) arena.resize(total);
    u64 at = reinterpret_cast<u64>(arena.data()) + kGap;
    for (u64 i = 0; i < launch->segment_count; ++i) {
        Segment& s = launch->segments[i];
        at += (reinterpret_cast<u64>(s.host) - at) & 255;  // same address modulo 256
        s.copy = reinterpret_cast<u8*>(at);
        s.written = 0;
        memcpy(s.copy, s.host, s.bytes);
        at += s.bytes + kGap;
    }
    for (u32 i = 0; i < launch->arg_count; ++i)
        if (launch->arg_segment[i] >= 0)
            launch->args[i] += reinterpret_cast<u64>(launch->segments[launch->arg_segment[i]].copy);
}

}  // namespace

// ---- interface --------------------------------------------------------------------------------------------------

u32 lane() { return current->id % 32; }

u32 active_mask() { return current->active; }

int barrier(int id, int count, bool predicate, Site site) {
    Thread* me = current;
    me->site = site;
    if (id < 0 || id > 15 || count % 32 != 0)
        fail(kDivergentBarrier, me, nullptr, "%s(%d, %d), %s:%d: an id is 0 to 15, a count a multiple of 32",
             site.what, id, count, site.file, site.line);
    Barrier& b = barriers[id];
    const u32 expected = count ? static_cast<u32>(count) : block_threads;
    if (b.arrived == 0) {
        b.expected = expected, b.votes = 0, b.site = site;
    } else if (b.expected != expected ||
               (count == 0 && (b.site.line != site.line || strcmp(b.site.file, site.file) != 0))) {
        char other[300];
        describe(other, sizeof(other), threads[b.threads[0]]);
        fail(kDivergentBarrier, me, nullptr, "it arrives at %s for %u threads, %s:%d, but %s for %u threads",
             site.what, expected, site.file, site.line, other, b.expected);
    }
    b.threads[b.arrived++] = me->id;
    b.votes += predicate;
    if (b.arrived < b.expected) {
        me->state = State::barrier;
        suspend();
        return me->count;
    }
    synchronise(b.arrived, [&](u32 i) { return &threads[b.threads[i]]; });
    for (u32 i = 0; i < b.arrived; ++i) {
        wake(&threads[b.threads[i]]);
        threads[b.threads[i]].count = b.votes;
    }
    b.arrived = 0;
    return me->count;
}

const u64* gather(u32 mask, u64 value, Site site) {
    Thread* me = current;
    Thread* lanes = &threads[me->id & ~31u];
    Warp& warp = warps[me->id / 32];
    const u32 my_lane = me->id % 32;
    if (!(mask >> my_lane & 1u))
        fail(kAbsentLanes, me, nullptr, "%s with mask 0x%08x, %s:%d, does not name the calling lane %u", site.what,
             mask, site.file, site.line, my_lane);
    if (const u32 absent = mask & ~warp.alive) {
        const u32 lane = static_cast<u32>(__builtin_ctz(absent));
        const bool returned = (me->id & ~31u) + lane < block_threads;
        fail(kAbsentLanes, me, nullptr, "%s with mask 0x%08x, %s:%d, waits for lane %u, which %s", site.what, mask,
             site.file, site.line, lane, returned ? "has returned" : "the block does not have");
    }
    me->site = site, me->mask = mask, me->value = value, me->state = State::warp;
    warp.waiting |= 1u << my_lane;
    u64 all[32];
    Thread* members[32];
    u32 count = 0;
    bool complete = (warp.waiting & mask) == mask;
    for (u32 i = 0; i < 32 && complete; ++i) {
        all[i] = 0;
        if (!(mask >> i & 1u)) continue;
        all[i] = lanes[i].value;
        members[count++] = &lanes[i];
        // Lanes at another operation may still come here, once theirs is complete.
        complete = lanes[i].mask == mask && strcmp(lanes[i].site.what, site.what) == 0;
    }
    if (!complete) {
        suspend();
        return me->all;
    }
    warp.waiting &= ~mask;
    for (u32 i = 0; i < count; ++i) {
        memcpy(members[i]->all, all, sizeof(all));
        wake(members[i]);
    }
    synchronise(count, [&](u32 i) { return members[i]; });
    return me->all;
}

u64 shuffle(u32 mask, u64 value, u32 source, Site site) {
    if (!(mask >> source & 1u))
        fail(kAbsentLanes, current, nullptr, "%s with mask 0x%08x, %s:%d, reads lane %u, which is not in the mask",
             site.what, mask, site.file, site.line, source);
    return gather(mask, value, site)[source];
}

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

void check_atomic(const void* p, u32 bytes) { access(p, bytes, true, true, true, __builtin_return_address(0)); }

void cp_async(void* shared, const void* global, u32 bytes, u32 from_global) {
    void* pc = __builtin_return_address(0);
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

namespace {
// The copies of groups before `end_group` arrive.
void finish_copies(u32 end_group) {
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
}  // namespace

void cp_async_wait(u32 in_flight) { finish_copies(std::max(current->copy_group, in_flight) - in_flight); }

int run(Launch* l, Entry kernel, u8* dynamic_shared, u64 dynamic_capacity) {
    launch = l;
    entry = kernel;
    l->error.kind = 0;
    l->error.segment = -1;
    memcpy(&gridDim, l->grid, sizeof(gridDim));
    memcpy(&blockDim, l->block, sizeof(blockDim));
    block_threads = blockDim.x * blockDim.y * blockDim.z;
    if (!stacks) {
        stacks = static_cast<u8*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        for (u32 i = 0; i < kMaxThreads; ++i) mprotect(stacks + i * kStackBytes, 4096, PROT_NONE);
    }
    Module unit = {reinterpret_cast<u64>(kernel), {0, 0}, {0, 0}}, self = {reinterpret_cast<u64>(&threadIdx), {0, 0}, {0, 0}};
    dl_iterate_phdr(find_module, &unit);
    dl_iterate_phdr(find_module, &self);
    stack_range = {reinterpret_cast<u64>(stacks), kMaxThreads * kStackBytes};
    shared_range = unit.tls;
    dynamic_range = {reinterpret_cast<u64>(dynamic_shared), dynamic_capacity};
    module_range = unit.loaded;
    runtime_range = self.loaded;
    last_segment = nullptr;
    shadow.resize(shared_range.size);
    random_state = l->order;

    const u64 shared_bytes = shared_range.size - dynamic_capacity + l->shared_bytes;
    char* text = l->error.detail;
    if (block_threads == 0 || block_threads > kMaxThreads) {
        l->error.kind = kLaunchLimit;
        snprintf(text, sizeof(l->error.detail), "a block has 1 to %u threads, not %u", kMaxThreads, block_threads);
        return 1;
    }
    if (shared_bytes > l->shared_limit || l->shared_bytes > dynamic_capacity) {
        l->error.kind = kLaunchLimit;
        snprintf(text, sizeof(l->error.detail), "%llu bytes of shared memory (%llu dynamic), the limit is %llu",
                 shared_bytes, l->shared_bytes, dynamic_capacity ? l->shared_limit : shared_range.size);
        return 1;
    }
    place_segments();
    std::vector<u64> block_order, thread_order;
    const u64 blocks = static_cast<u64>(l->grid[0]) * l->grid[1] * l->grid[2];
    if (blocks) arrange(block_order, blocks);
    for (u64 b : block_order) {
        blockIdx = {static_cast<u32>(b % l->grid[0]), static_cast<u32>(b / l->grid[0] % l->grid[1]),
                    static_cast<u32>(b / l->grid[0] / l->grid[1])};
        if (!run_block(thread_order)) break;
    }
    for (u64 i = 0; i < l->segment_count; ++i)
        if (l->segments[i].written) memcpy(l->segments[i].host, l->segments[i].copy, l->segments[i].bytes);
    current = nullptr;
    return l->error.kind;
}

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
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {  // clang calls these three
    emu::access(from, static_cast<emu::u32>(n), false, false, false, __builtin_return_address(0));
    emu::access(to, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
    emu::access(from, static_cast<emu::u32>(n), false, false, false, __builtin_return_address(0));
    emu::access(to, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
    emu::access(to, static_cast<emu::u32>(n), true, false, false, __builtin_return_address(0));
    return memset(to, value, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#pragma GCC visibility pop
