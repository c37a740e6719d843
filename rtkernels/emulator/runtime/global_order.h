// Order of global accesses between kernels and blocks: what the previous kernel of the stream may still do, and what a
// block reads that another one wrote in the same launch.
#pragma once
#include "shadow.h"

namespace emu {
namespace {

// ---- dependent launches -----------------------------------------------------------------------------------------

// Bits of a segment's mask (_dependent.py sets them): the previous kernels may still write or read the byte, until this
// kernel waits or during all of it.
enum : u8 { kWrittenUntilWait = 0x10, kReadUntilWait = 0x20, kWrittenForGood = 0x40, kReadForGood = 0x80 };

struct Waited {
    u32 thread, time;
};
std::vector<Waited> waited;  // threads of the block that runs; kept by cluster.h while others run
bool triggered;              // the same block has let dependents start

bool has_waited() {
    if (current->waited) return true;
    for (const Waited& w : waited)
        if (!launch->races || w.time <= current->clock->seen[w.thread]) return current->waited = true;
    return false;
}

[[gnu::noinline]] void check_previous(const Segment& s, u64 offset, u32 bytes, bool write, void* pc) {
    u8 bits = 0;
    for (u32 i = 0; i < bytes; ++i) bits |= s.mask[offset + i];
    bits &= write ? 0xf0 : kWrittenUntilWait | kWrittenForGood;
    const bool for_good = bits & (kWrittenForGood | kReadForGood);
    if (bits == 0 || (!for_good && has_waited())) return;
    char text[200];
    snprintf(text, sizeof(text), "%s may still %s it%s", for_good ? "a kernel before the previous one" : "the previous kernel",
             bits & (kWrittenUntilWait | kWrittenForGood) ? "write" : "read",
             for_good ? ", for which the previous one did not wait" : ": no wait_for_previous lies before");
    report(kBeforeWait, bytes, write, static_cast<int>(&s - launch->segments), static_cast<long long>(offset), pc, text);
}

// ---- blocks of one launch ---------------------------------------------------------------------------------------

// Writes that another block may read: by which thread, and when on its clock. A launch is rerun with tracking as soon
// as it performs a strong global access (an atomic, or ptx/words.cuh), because without one blocks cannot wait for each
// other.
struct Epoch {
    u32 block, cluster, time;
    u16 thread;
};
std::vector<Epoch> epochs;                 // 0: none
std::vector<std::vector<u32>> stamps;      // per segment and byte, the epoch of the last plain write
struct Published {
    std::vector<u32> seen;  // per thread: writes up to here came before a __threadfence that came before a strong access
    bool looked, acquired;  // the block has performed a strong access; and a __threadfence after it
};
std::vector<Published> published;  // by block
u32 linear_block() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }

void start_tracking() {
    epochs.assign(1, {});
    stamps.assign(launch->segment_count, {});
    for (u64 i = 0; i < launch->segment_count; ++i) stamps[i].assign(launch->segments[i].bytes, 0);
    published.assign(static_cast<u64>(gridDim.x) * gridDim.y * gridDim.z, {});
}

[[gnu::noinline]] void global_access(const Segment& s, u64 offset, u32 bytes, bool write, bool atomic, void* pc) {
    const u64 index = static_cast<u64>(&s - launch->segments);
    u32* const stamp = &stamps[index][offset];
    if (atomic) {
        if (write) std::fill(stamp, stamp + bytes, 0);
        return;
    }
    const u32 block = linear_block();
    if (write) {
        if (current->epoch_time != current->now) {
            current->epoch = static_cast<u32>(epochs.size());
            current->epoch_time = current->now;
            epochs.push_back({block, block / launch->cluster, current->now, static_cast<u16>(current->id)});
        }
        std::fill(stamp, stamp + bytes, current->epoch);
        return;
    }
    for (u32 i = 0; i < bytes; ++i) {
        const Epoch& e = epochs[stamp[i]];
        if (stamp[i] == 0 || e.block == block || (!launch->resident && launch->cluster > 1 && e.cluster == block / launch->cluster))
            continue;
        const Published& there = published[e.block];
        const bool released = !there.seen.empty() && there.seen[e.thread] >= e.time;
        if (released && published[block].acquired) continue;
        char text[200];
        snprintf(text, sizeof(text), "block %u wrote it, and no __threadfence lies %s", e.block,
                 released ? "between this block's atomic and the read" : "between that and its atomic");
        report(kMissingFence, bytes, false, static_cast<int>(index), static_cast<long long>(offset), pc, text);
    }
}

// Called before an access by which blocks may learn of each other.
void strong_access() {
    if (!tracked) fail(kRestart, current, nullptr, "");
    Published& mine = published[linear_block()];
    mine.looked = true;
    if (mine.seen.empty()) mine.seen.resize(block_threads);
    for (u32 i = 0; i < block_threads; ++i) {
        // Its own fence covers what it had seen; fences of others that it has seen cover their own writes.
        const std::vector<u32>& own = current->published;
        const std::vector<u32>& theirs = threads[i].published;
        if (!own.empty()) mine.seen[i] = std::max(mine.seen[i], own[i]);
        if (!theirs.empty() && theirs[i] <= current->clock->seen[i]) mine.seen[i] = std::max(mine.seen[i], theirs[i]);
    }
}

}  // namespace

void threadfence() {
    if (!tracked) return;
    Published& mine = published[linear_block()];
    mine.acquired = mine.acquired || mine.looked;
    current->published.assign(current->clock->seen, current->clock->seen + block_threads);
    current->published[current->id] = current->now++;
}

void wait_for_previous() {
    if (!triggered) launch->waited_first = 1;
    launch->waited = 1;
    current->waited = true;
    waited.push_back({current->id, current->now++});
}

void launch_dependents() { triggered = true; }

}  // namespace emu
