// The blocks of a cluster: they take turns, each until none of its threads can run, and share only what they write to
// each other's shared memory.
//
// Shared memory has one address for all of them (see execution.h), so that of an inactive block is kept elsewhere.
// Writes to another block wait for the cluster's next barrier: a block that reads earlier sees the previous contents.
#pragma once
#include "bulk_store.h"

namespace emu {
namespace {

struct Block {
    Thread threads[kMaxThreads];
    Warp warps[kMaxThreads / 32];
    Barrier barriers[16];
    u32 done_threads;
    uint3 index;
    // While another block is active:
    std::vector<u8> memory;
    std::vector<Written> shadow;
    std::vector<Readers> readers;
    std::map<u64, CountingBarrier> counting;
    std::vector<BulkCopy> flying;
    std::vector<BulkStore> storing;
    std::vector<Waited> waited;
    bool triggered;
};
Block blocks[kMaxCluster];  // by rank
u32 rank_now;
bool cluster_met;  // at least once

struct FarStore {
    u32 to, from, thread, word;
    u64 offset;
};
std::vector<FarStore> far_stores;  // since the cluster last met

void swap_with(Block& b) {
    shadow.swap(b.shadow), readers.swap(b.readers), counting.swap(b.counting), flying.swap(b.flying);
    storing.swap(b.storing), waited.swap(b.waited), std::swap(triggered, b.triggered);
}

void size_shadow() {
    shadow.resize(shared_range.size);
    readers.resize(shared_range.size / 4 + 1);
}

// Makes a block the active one. `leave` ends that.
void enter(u32 rank) {
    Block& b = blocks[rank];
    rank_now = rank;
    threads = b.threads, warps = b.warps, barriers = b.barriers;
    done_threads = b.done_threads;
    blockIdx = b.index;
    if (launch->cluster == 1) return;
    b.memory.resize(shared_range.size);
    memcpy(reinterpret_cast<void*>(shared_range.begin), b.memory.data(), shared_range.size);
    swap_with(b);
    size_shadow();
}

void leave() {
    Block& b = blocks[rank_now];
    b.done_threads = done_threads;
    if (launch->cluster == 1) return;
    memcpy(b.memory.data(), reinterpret_cast<void*>(shared_range.begin), shared_range.size);
    swap_with(b);
}

// Applies the writes to the active block. No thread of it may have touched those bytes since the last cluster barrier;
// false if one has.
bool receive() {
    for (const FarStore& f : far_stores) {
        if (f.to != rank_now) continue;
        Readers& r = readers[f.offset / 4];
        const Readers* reader = r.bytes ? &r : nullptr;
        for (u32 n = r.more; n && reader->time < threads[reader->thread].met; n = reader->more)
            reader = &reader_nodes[n].reader;
        const bool read = reader && reader->time >= threads[reader->thread].met;
        for (Written *w = &shadow[f.offset], *end = w + 4; w != end; ++w) {
            const bool wrote = w->state != kUnwritten && w->time >= threads[w->thread].met;
            if (launch->races && (wrote || read)) {
                const uint3 i = threads[wrote ? w->thread : reader->thread].index, b = blocks[f.from].index;
                const uint3 t = blocks[f.from].threads[f.thread].index;
                Error& e = launch->error;
                e.kind = kRace, e.write = wrote, e.size = 4, e.segment = -1;
                e.offset = static_cast<long long>(f.offset);
                memcpy(e.block, &blockIdx, sizeof(e.block));
                memcpy(e.thread, &i, sizeof(e.thread));
                snprintf(e.detail, sizeof(e.detail),
                         "thread (%u,%u,%u) of block (%u,%u,%u) writes it and no cluster barrier lies between the two",
                         t.x, t.y, t.z, b.x, b.y, b.z);
                return false;
            }
            *w = {0, 0, kPlain};
        }
        sweep(r, [](const Readers&) { return true; });
        r = {};
        memcpy(reinterpret_cast<void*>(shared_range.begin + f.offset), &f.word, 4);
    }
    return true;
}

}  // namespace

u32 cluster_rank() { return rank_now; }

void cluster_barrier(Site site) {
    current->site = site;
    current->state = State::cluster;
    suspend();
}

void cluster_store(void* p, u32 rank, u32 word) {
    void* pc = __builtin_return_address(0);
    const u64 a = reinterpret_cast<u64>(p), offset = a - shared_range.begin;
    if (a % 4 != 0) report(kMisaligned, 4, true, -1, static_cast<long long>(offset), pc, "");
    if (!shared_range.has(a) || offset + 4 > shared_range.size || (dynamic_range.has(a) && a + 4 - dynamic_range.begin > launch->shared_bytes))
        report(kOutOfBounds, 4, true, -2, static_cast<long long>(a - dynamic_range.begin), pc, "of another block");
    if (rank >= launch->cluster)
        report(kOutOfBounds, 4, true, -2, static_cast<long long>(a - dynamic_range.begin), pc,
               "of a block that the cluster does not have");
    if (!cluster_met) report(kRace, 4, true, -1, static_cast<long long>(offset), pc, "the block may not have started");
    if (blocks[rank].done_threads == block_threads)
        report(kRace, 4, true, -1, static_cast<long long>(offset), pc, "the block has returned");
    for (const FarStore& f : far_stores)
        if (launch->races && f.to == rank && f.offset == offset && (f.from != rank_now || f.thread != current->id))
            report(kRace, 4, true, -1, static_cast<long long>(offset), pc, "another thread of the cluster wrote it too");
    far_stores.push_back({rank, rank_now, current->id, word, offset});
}

}  // namespace emu
