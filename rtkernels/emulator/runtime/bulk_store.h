// TMA stores. They read shared memory as late as possible, when the issuing thread waits for that, and write to global
// memory when the block has returned. Until then nobody may overwrite what they read.
#pragma once
#include "mbarrier.h"

namespace emu {
namespace {

struct StoredPart {
    const u8* from;
    u8* to;
    u32 bytes;  // of 16 in shared memory
    bool adds;  // floats, to what is there
};
struct BulkStore {
    u32 thread, group;
    std::vector<StoredPart> parts;
};
std::vector<BulkStore> storing;  // not read yet; of the block that runs

struct Landing {
    u8* to;
    u8 data[16];
    u32 bytes;
    bool adds;
};
std::vector<Landing> landing;  // read, and not written yet; of all blocks

u64 shared_offset(const u8* p) { return reinterpret_cast<u64>(p) - shared_range.begin; }

void mark(const BulkStore& store, bool reads) {
    for (const StoredPart& part : store.parts)
        for (u32 i = 0; i < 16; ++i) {
            u16& state = shadow[shared_offset(part.from) + i].state;
            state = static_cast<u16>(reads ? state | kStoreReads : state & kStates);
        }
}

void begin_store(BulkStore store, void* pc) {
    for (const StoredPart& part : store.parts) {
        require_shared(part.from, 16, false, "source of a bulk store that is not in shared memory", pc);
        access(part.from, 16, false, true, false, pc);
        check_proxy(shared_offset(part.from), 16, false, "TMA", pc);
        access(part.to, part.bytes, true, false, false, pc);
    }
    mark(store, true);
    storing.push_back(std::move(store));
}

void land() {
    for (const Landing& part : landing) {
        float sum[4], more[4];
        memcpy(more, part.data, 16);
        memcpy(sum, part.to, part.bytes);
        for (u32 i = 0; i < part.bytes / 4; ++i) sum[i] += more[i];
        memcpy(part.to, part.adds ? static_cast<const void*>(sum) : part.data, part.bytes);
    }
    landing.clear();
}

}  // namespace

void bulk_store(void* global, const void* shared, u32 bytes, bool adds) {
    void* pc = __builtin_return_address(0);
    if (bytes % 16 != 0) report(kMisaligned, bytes, true, -1, 0, pc, "size of a bulk copy");
    if (reinterpret_cast<u64>(global) % 16 != 0) report(kMisaligned, 16, true, -1, 0, pc, "target of a bulk copy");
    BulkStore store = {current->id, current->store_group, {}};
    for (u32 i = 0; i < bytes; i += 16)
        store.parts.push_back({static_cast<const u8*>(shared) + i, static_cast<u8*>(global) + i, 16, adds});
    begin_store(std::move(store), pc);
}

void tensor_store(const long long* map, const void* shared, const int* at, u32 coordinates, bool adds) {
    void* pc = __builtin_return_address(0);
    const Box box(map, coordinates, pc);
    BulkStore store = {current->id, current->store_group, {}};
    for (u32 d = 0; d < box.rank; ++d)  // past the tensor TMA skips elements; before it, an H200 traps
        if (at[d] < 0) report(kOutOfBounds, 16, true, -1, at[d], pc, "a box that is stored begins before the tensor");
    box.each(shared, at, [&](u32 offset, u8* to, u32 size) {
        store.parts.push_back({static_cast<const u8*>(shared) + offset, to, size, adds});
    });
    begin_store(std::move(store), pc);
}

void bulk_store_commit() { ++current->store_group; }

void bulk_store_wait_read(u32 pending) {
    std::vector<BulkStore> left;
    for (BulkStore& store : storing) {
        if (store.thread != current->id || store.group + pending >= current->store_group) {
            left.push_back(std::move(store));
            continue;
        }
        for (const StoredPart& part : store.parts) {
            Landing done = {part.to, {}, part.bytes, part.adds};
            memcpy(done.data, part.from, 16);
            landing.push_back(done);
            const u64 offset = shared_offset(part.from);
            if (launch->races)
                for (u64 word = offset / 4; word < offset / 4 + 4; ++word) note_read(readers[word], 15);
        }
        mark(store, false);
    }
    storing.swap(left);
    for (const BulkStore& store : storing) mark(store, true);
}

void bulk_store_wait() {
    bulk_store_wait_read();
    land();
}

// Called when a thread returns: nobody can wait for its stores any more.
static void end_stores() {
    for (const BulkStore& store : storing)
        if (store.thread == current->id && launch->races && !store.parts.empty())
            report(kRace, 16, false, -1, static_cast<long long>(shared_offset(store.parts[0].from)), nullptr,
                   "the thread returns while its store by TMA still reads it");
    ++current->store_group;
    if (!storing.empty()) bulk_store_wait_read();
}

}  // namespace emu
