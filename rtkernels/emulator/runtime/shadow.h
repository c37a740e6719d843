// Accesses to shared memory: which threads wrote and read each byte, and whether something orders the accesses.
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

// Everything these threads have done happens before anything they do from now on.
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

// ---- reports -------------------------------------------------------------------------------------------------------

[[noreturn]] void report(int kind, u32 bytes, bool write, int segment, long long offset, void* pc,
                         const char* detail) {
    Error& e = launch->error;
    e.write = write, e.size = bytes, e.segment = segment, e.offset = offset;
    fail(kind, current, pc, "%s", detail);
}

// A write or read of shared memory that conflicts with another one; `how` says what the other thread did.
[[noreturn]] void report_race(u64 offset, u32 bytes, bool write, u32 other, const char* how, void* pc) {
    char text[200];
    const uint3 o = threads[other].index;
    snprintf(text, sizeof(text), "thread (%u,%u,%u) %s it and no barrier lies between the two", o.x, o.y, o.z, how);
    report(kRace, bytes, write, -1, static_cast<long long>(offset), pc, text);
}

// ---- readers ----------------------------------------------------------------------------------------------------

bool before_me(const Readers& r) { return r.thread == current->id || r.time <= current->clock->seen[r.thread]; }

u32 new_node() {
    if (!free_nodes.empty()) {
        const u32 node = free_nodes.back();
        free_nodes.pop_back();
        return node;
    }
    reader_nodes.push_back({});
    return static_cast<u32>(reader_nodes.size() - 1);
}

// Removes the nodes of a list for which `unneeded` is true.
template <typename F>
void sweep(Readers& head, F unneeded) {
    u32 kept[2] = {0, 0}, length = 0, next;  // first and last of the new list
    for (u32 n = head.more; n; n = next) {
        next = reader_nodes[n].reader.more;
        if (unneeded(reader_nodes[n].reader)) {
            free_nodes.push_back(n);
            continue;
        }
        (kept[0] ? reader_nodes[kept[1]].reader.more : kept[0]) = n;
        kept[1] = n;
        ++length;
    }
    if (kept[0]) reader_nodes[kept[1]].reader.more = 0;
    head.more = kept[0];
    for (u32 n = head.more; n; n = reader_nodes[n].reader.more) reader_nodes[n].length = length--;
}

// Of several reads of a byte by one thread, only the newest is kept.
[[gnu::noinline]] void compact(Readers& head) {
    static u16 newest[kMaxThreads];
    memset(newest, 0, block_threads * sizeof(u16));
    newest[head.thread] = head.bytes;
    sweep(head, [&](const Readers& r) {
        const bool known = (r.bytes & ~newest[r.thread]) == 0;
        newest[r.thread] |= r.bytes;
        return known;
    });
}

inline void note_read(Readers& r, u16 bytes) {
    const u32 now = current->now;
    const u16 me = static_cast<u16>(current->id);
    if (r.bytes == 0) {
        r = {now, 0, me, bytes};
    } else if (r.thread == me && r.time == now) {
        r.bytes |= bytes;
    } else if ((r.bytes & ~bytes) == 0 && before_me(r)) {  // who is ordered after me is ordered after that reader
        if (r.more && r.thread != me) sweep(r, [&](const Readers& o) { return (o.bytes & ~bytes) == 0 && before_me(o); });
        r.time = now, r.thread = me, r.bytes = bytes;
    } else {
        const u32 node = new_node(), length = r.more ? reader_nodes[r.more].length + 1 : 1;
        reader_nodes[node] = {r, length};
        r = {now, node, me, bytes};
        if (length > 2 * block_threads && length % block_threads == 0) compact(r);
    }
}

// All readers of these bytes must come before me; then they can be dropped, because the next writer has to come after
// me.
[[gnu::noinline]] void check_readers(Readers& r, u16 bytes, u64 offset, u32 size, void* pc) {
    const auto check = [&](Readers& one) {
        if ((one.bytes & bytes) && !before_me(one)) report_race(offset, size, true, one.thread, "read", pc);
        one.bytes &= static_cast<u16>(~bytes);
    };
    check(r);
    for (u32 n = r.more; n; n = reader_nodes[n].reader.more) check(reader_nodes[n].reader);
    sweep(r, [](const Readers& one) { return one.bytes == 0; });
    if (r.bytes == 0 && r.more) {
        const u32 first = r.more;
        r = reader_nodes[first].reader;
        free_nodes.push_back(first);
    }
}

// ---- accesses ---------------------------------------------------------------------------------------------------

void check_written(const Written& w, u64 offset, u32 bytes, bool write, bool atomic, void* pc) {
#ifdef RTK_EMU_SANITIZED
    return;  // kernels do not report accesses to static shared arrays then
#endif
    const u32 state = w.state & kStates;
    if ((!write || atomic) && state == kUnwritten)
        report(kUninitialisedShared, bytes, write, -1, static_cast<long long>(offset), pc, "");
    if (!launch->races) return;
    if (write && (w.state & kStoreReads))
        report(kRace, bytes, write, -1, static_cast<long long>(offset), pc,
               "a TMA store that nobody has waited for still reads it");
    if (w.thread == current->id || w.time <= current->clock->seen[w.thread]) return;
    // Lanes of one warp may store to one address with one instruction: which value wins is undefined, but it is legal.
    if ((state == kPlain || state == kCopyEngine) && (atomic || !(write && w.thread / 32 == current->id / 32)))
        report_race(offset, bytes, write, w.thread, "wrote", pc);
    if (state == kAtomic && write && !atomic) report_race(offset, bytes, write, w.thread, "changed", pc);
}

void shared_access(u64 a, u32 bytes, bool write, bool atomic, void* pc) {
    const u64 offset = a - shared_range.begin;
    if (offset + bytes > shared_range.size || (dynamic_range.has(a + bytes - 1) &&
                                               a + bytes - dynamic_range.begin > launch->shared_bytes)) {
        char text[120];
        snprintf(text, sizeof(text), "the launch gave it %llu bytes of dynamic shared memory", launch->shared_bytes);
        report(kOutOfBounds, bytes, write, -2, static_cast<long long>(a - dynamic_range.begin), pc, text);
    }
    Written* const first = &shadow[offset];
    u64 word, other;
    memcpy(&word, first, sizeof(word));
    check_written(first[0], offset, bytes, write, atomic, pc);
    for (u32 i = 1; i < bytes; ++i) {
        memcpy(&other, first + i, sizeof(other));
        if (other != word) check_written(first[i], offset, bytes, write, atomic, pc);
    }
    if (write) {
        const Written mine = {current->now, static_cast<u16>(current->id), atomic ? kAtomic : kPlain};
        for (u32 i = 0; i < bytes; ++i) {
            // My plain write stays visible to race checks until something orders it, whatever I add to it.
            const bool own = first[i].state == kPlain && first[i].thread == mine.thread && first[i].time == mine.time;
            if (!(atomic && own)) first[i] = mine;
        }
    }
    if (!launch->races || atomic) return;
    for (u64 at = offset; at < offset + bytes;) {
        const u32 from = at % 4, count = std::min<u32>(4 - from, static_cast<u32>(offset + bytes - at));
        const u16 mask = static_cast<u16>(((1u << count) - 1u) << from);
        Readers& r = readers[at / 4];
        if (!write) {
            note_read(r, mask);
        } else if (r.bytes) {
            check_readers(r, mask, offset, bytes, pc);
        }
        at += count;
    }
}

// Writes of threads become visible to TMA and wgmma by a proxy fence only: of the thread that wrote, or of the issuing
// thread after it learned of the write.
void check_proxy(u64 offset, u32 bytes, bool write, const char* reader, void* pc) {
    for (const Written *w = &shadow[offset], *end = w + bytes; w != end; ++w) {
        const u32 state = w->state & kStates;
        if ((state != kPlain && state != kAtomic) || w->time <= threads[w->thread].fenced) continue;
        if (current->fence_clock && w->time <= current->fence_clock->seen[w->thread]) continue;
        char text[200];
        const uint3 o = threads[w->thread].index;
        snprintf(text, sizeof(text), "thread (%u,%u,%u) wrote it without a fence_async_shared that lets %s see it", o.x,
                 o.y, o.z, reader);
        report(kMissingFence, bytes, write, -1, static_cast<long long>(offset), pc, text);
    }
}

}  // namespace

void fence_async() {
    if (current->fence_clock) drop(current->fence_clock);
    current->fence_clock = current->clock;
    ++current->clock->users;
    current->fenced = current->now++;
}

}  // namespace emu
