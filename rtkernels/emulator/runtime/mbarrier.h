// Barriers in shared memory that count arrivals and bytes, and the copies of bytes or boxes that bring the bytes.
//
// Copies arrive as late as possible: when no thread can run, one of them does, in the launch's order (the oldest, the
// newest, or any). Until then nobody may read its target, and afterwards only threads that waited for the end of the
// phase. bulk_store.h handles the other direction.
#pragma once
#include "checks.h"

#include <map>

namespace emu {
namespace {

struct CountingBarrier {
    u32 arrivals, pending;
    long long bytes;  // announced and not yet copied
    u32 phase;        // the current one
    u32 maker, since;  // the thread that initialised it, and when
    std::vector<u32> arrived, seen;  // per thread, how far it was: in arrivals so far, and when the last phase ended
    std::vector<Thread*> waiting;
};
std::map<u64, CountingBarrier> counting;  // by address; of the block that runs

struct BulkCopy {
    u8* to;
    const u8* from;
    u32 bytes;
    u64 barrier;
    std::vector<u8> box;     // instead of `from`, if not empty
    std::vector<u32> asked;  // clock of the issuing thread
    long products = -1;      // of tensor memory that are done when this commit arrives; -1: a copy
};
std::vector<BulkCopy> flying;
void finish_tensor_work(size_t count);

constexpr u32 kMaxMbarrierCount = (1u << 20) - 1u;  // arrivals, and bytes, that the instructions can count

void join(std::vector<u32>& into, const std::vector<u32>& from) {
    for (u32 i = 0; i < block_threads; ++i) into[i] = std::max(into[i], from[i]);
}

// Everything that happened before now, as the current thread sees it.
std::vector<u32> moment() {
    std::vector<u32> now(current->clock->seen, current->clock->seen + block_threads);
    now[current->id] = current->now++;
    return now;
}

void learn(const std::vector<u32>& from) {
    Clock* joined = new_clock();
    joined->users = 1;
    for (u32 i = 0; i < block_threads; ++i) joined->seen[i] = std::max(from[i], current->clock->seen[i]);
    drop(current->clock);
    current->clock = joined;
}

CountingBarrier& barrier_at(void* p, const char* what) {
    const auto found = counting.find(reinterpret_cast<u64>(p));
    if (found == counting.end())
        report(kUninitialisedShared, 8, false, -1, static_cast<long long>(reinterpret_cast<u64>(p) - shared_range.begin),
               nullptr, what);
    CountingBarrier& b = found->second;
    if (launch->races && b.maker != current->id && b.since > current->clock->seen[b.maker])
        report_race(reinterpret_cast<u64>(p) - shared_range.begin, 8, false, b.maker, "initialised", nullptr);
    return b;
}

// TMA sees a barrier once the thread that initialised it has fenced it.
CountingBarrier& barrier_of_copy(void* p) {
    CountingBarrier& b = barrier_at(p, "an mbarrier that is not there");
    if (b.since > std::max(threads[b.maker].init_fenced, threads[b.maker].fenced))
        report(kMissingFence, 8, false, -1, static_cast<long long>(reinterpret_cast<u64>(p) - shared_range.begin), nullptr,
               "an mbarrier without the mbarrier_fence_init that makes it visible to TMA");
    return b;
}

void end_phase_if_complete(CountingBarrier& b) {
    if (b.pending != 0 || b.bytes != 0) return;
    b.pending = b.arrivals;
    b.seen = b.arrived;
    ++b.phase;
    for (Thread* t : b.waiting) t->state = State::ready;
    b.waiting.clear();
}

// TMA is about to write 16 bytes of shared memory here.
void overwrite(u8* shared, void* pc) {
    const u64 a = reinterpret_cast<u64>(shared);
    check_proxy(a - shared_range.begin, 16, true, "TMA", pc);
    access(shared, 16, true, true, false, pc);
}

// One copy arrives; false if there is none.
bool deliver(u64 choice) {
    if (flying.empty()) return false;
    size_t at = launch->order == 0 ? 0 : launch->order == 1 ? flying.size() - 1 : choice % flying.size();
    if (flying[at].products >= 0)  // commits arrive in order
        for (at = 0; flying[at].products < 0;) ++at;
    const BulkCopy c = flying[at];
    flying.erase(flying.begin() + static_cast<long>(at));
    if (c.products >= 0) {
        finish_tensor_work(static_cast<size_t>(c.products));
        CountingBarrier& b = counting[c.barrier];
        ++events;
        --b.pending;
        join(b.arrived, c.asked);
        end_phase_if_complete(b);
        return true;
    }
    memcpy(c.to, c.box.empty() ? c.from : c.box.data(), c.bytes);
    Written* w = &shadow[reinterpret_cast<u64>(c.to) - shared_range.begin];
    for (u32 i = 0; i < c.bytes; ++i) w[i].state = kCopyEngine;
    CountingBarrier& b = counting[c.barrier];
    ++events;
    b.bytes -= c.bytes;
    join(b.arrived, c.asked);
    end_phase_if_complete(b);
    return true;
}

}  // namespace

void mbarrier_init(void* p, u32 arrivals) {
    access(p, 8, true, true, false, __builtin_return_address(0));
    require_shared(p, 8, true, "an mbarrier that is not in shared memory", __builtin_return_address(0));
    if (arrivals == 0 || arrivals > kMaxMbarrierCount)
        fail(kDivergentBarrier, current, nullptr, "an mbarrier counts 1 to %u arrivals, not %u", kMaxMbarrierCount, arrivals);
    const std::vector<u32> nothing(block_threads, 0);
    counting[reinterpret_cast<u64>(p)] = {arrivals, arrivals, 0, 0, current->id, current->now, nothing, nothing, {}};
}

void mbarrier_fence_init() { current->init_fenced = current->now++; }

void mbarrier_arrive(void* p, u32 bytes) {
    CountingBarrier& b = barrier_at(p, "an mbarrier that is not there");
    if (b.pending == 0) fail(kDivergentBarrier, current, nullptr, "more threads arrive at an mbarrier than it counts");
    --b.pending;
    ++events;
    b.bytes += bytes;
    if (b.bytes > static_cast<long long>(kMaxMbarrierCount))
        fail(kDivergentBarrier, current, nullptr, "an mbarrier waits for at most %u bytes, not %lld", kMaxMbarrierCount, b.bytes);
    join(b.arrived, moment());
    end_phase_if_complete(b);
}

void mbarrier_wait(void* p, u32 parity, Site site) {
    CountingBarrier& b = barrier_at(p, "an mbarrier that is not there");
    while ((b.phase & 1u) == parity) {
        current->site = site;
        current->state = State::counting;
        b.waiting.push_back(current);
        suspend();
    }
    learn(b.seen);
}

void poll(Site site) {
    current->site = site;
    current->state = State::polling;
    suspend();
}

void note() { ++events; }

bool mbarrier_test(void* p, u32 parity, Site site) {
    CountingBarrier& b = barrier_at(p, "an mbarrier that is not there");
    if ((b.phase & 1u) == parity) poll(site);
    if ((b.phase & 1u) == parity) return false;
    learn(b.seen);
    return true;
}

void bulk_load(void* shared, const void* global, u32 bytes, void* p) {
    void* pc = __builtin_return_address(0);
    barrier_of_copy(p);
    require_shared(shared, bytes, true, "target of a bulk copy that is not in shared memory", pc);
    if (bytes % 16 != 0) report(kMisaligned, bytes, true, -1, 0, pc, "size of a bulk copy");
    const u64 offset = reinterpret_cast<u64>(shared) - shared_range.begin;
    for (u32 i = 0; i < bytes; i += 16) {
        access(static_cast<const u8*>(global) + i, 16, false, true, false, pc);
        overwrite(static_cast<u8*>(shared) + i, pc);
    }
    for (u32 i = 0; i < bytes; ++i) shadow[offset + i].state = kUnwritten;  // in flight: nobody may read it yet
    flying.push_back({static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, reinterpret_cast<u64>(p), {},
                      moment()});
}

// A tensor map, as rtkernels/runtime/launch/tensor_map.py writes it: the tensor and the bytes from its start to the
// first element, bytes of an element, dimensions, swizzle (0, 64 bytes, or 1: 128); then 5 words each of sizes, strides in bytes, and
// sizes of the box.
struct Box {
    static constexpr u32 kMapWords = 20;
    u8* first;
    const long long *sizes, *strides, *box;
    u32 rank, row_bytes, rows, element;
    u64 swizzle;  // vectors of 16 bytes that change places, less one

    Box(const long long* map, u32 coordinates, void* pc) : Box(checked(map, coordinates, pc)) {}

    explicit Box(const long long* map)
        : first(reinterpret_cast<u8*>(map[0]) + map[1]), sizes(map + 5), strides(map + 10), box(map + 15),
          rank(static_cast<u32>(map[3])), row_bytes(static_cast<u32>(map[15] * map[2])), rows(1),
          element(static_cast<u32>(map[2])), swizzle(map[4] == 0 ? 0 : map[4] == 64 ? 3 : 7) {
        for (u32 d = 1; d < rank; ++d) rows *= static_cast<u32>(box[d]);
    }

    // The words of a map; checks that an instruction with so many coordinates may use it.
    static const long long* checked(const long long* map, u32 coordinates, void* pc) {
        access(map, kMapWords * sizeof(*map), false, false, false, pc);
        if (map[3] != coordinates)
            fail(kTrap, current, pc, "a tensor map of %lld dimensions, and %u coordinates", map[3], coordinates);
        return map;
    }

    u32 bytes() const { return rows * row_bytes; }

    // Calls f(offset in shared memory, address, bytes) for the valid parts of the box at `at`, 16 bytes at most.
    template <typename F>
    void each(const void* shared, const int* at, F f) const {
        for (u32 row = 0; row < rows; ++row) {
            u8* start = first;
            bool exists = true;
            for (u32 d = 1, rest = row; d < rank; rest /= static_cast<u32>(box[d]), ++d) {
                const long long i = at[d] + static_cast<long long>(rest % static_cast<u32>(box[d]));
                exists = exists && i >= 0 && i < sizes[d];
                start += i * strides[d];
            }
            for (u32 b = 0; exists && b < row_bytes; b += 16) {
                const long long column = at[0] + static_cast<long long>(b / element);
                const long long left = (sizes[0] - column) * element, bytes = left < 16 ? left : 16;
                if (column < 0 || bytes <= 0) continue;
                u64 to = reinterpret_cast<u64>(shared) + row * row_bytes + b;
                to ^= (to >> 7 & swizzle) << 4;
                f(static_cast<u32>(to - reinterpret_cast<u64>(shared)), start + column * element, static_cast<u32>(bytes));
            }
        }
    }
};

void tensor_load(void* shared, const long long* map, void* p, const int* at, u32 coordinates) {
    void* pc = __builtin_return_address(0);
    const Box box(map, coordinates, pc);
    const u32 bytes = box.bytes();
    barrier_of_copy(p);
    require_shared(shared, bytes, true, "target of a box that is not in shared memory", pc);
    if (reinterpret_cast<u64>(shared) % (box.swizzle != 0 ? 1024 : 128) != 0)
        report(kMisaligned, bytes, true, -1, 0, pc, "place of a box in shared memory");
    if (at[0] * static_cast<long long>(box.element) % 16 != 0)  // of a box that is read; an H200 refuses it
        report(kMisaligned, bytes, true, -1, 0, pc, "place of a box in its tensor: the first coordinate, in bytes");
    std::vector<u8> data(bytes, 0);
    for (u32 i = 0; i < bytes; i += 16) overwrite(static_cast<u8*>(shared) + i, pc);
    box.each(shared, at, [&](u32 to, const u8* from, u32 size) {
        access(from, size, false, false, false, pc);
        memcpy(data.data() + to, from, size);
    });
    const u64 offset = reinterpret_cast<u64>(shared) - shared_range.begin;
    for (u32 i = 0; i < bytes; ++i) shadow[offset + i].state = kUnwritten;  // in flight: nobody may read it yet
    flying.push_back({static_cast<u8*>(shared), nullptr, bytes, reinterpret_cast<u64>(p), data, moment()});
}

}  // namespace emu
