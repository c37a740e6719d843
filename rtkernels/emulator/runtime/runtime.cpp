// Blocks, fibers, barriers and warp operations of the emulator. Compiled once per machine, without the sanitizer flag
// of the kernels; include/execution.h is the interface.
#define RTK_EMU_RUNTIME
#include "cluster.h"
#include "tensor_memory.h"
#include "memory.h"

#include <set>

namespace emu {
namespace {

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

// The kernel gets a copy of its arguments on the fiber's own stack, so that reading them is not a tracked access.
[[gnu::noinline]] void call_entry() {
    u64* const args = static_cast<u64*>(__builtin_alloca(launch->arg_count * sizeof(u64)));
    memcpy(args, launch->args, launch->arg_count * sizeof(u64));
    entry(args);
}

RTK_EMU_UNCHECKED void fiber_main() {
    arrive_in_fiber();
    call_entry();
    finish_copies(~0u);
    end_stores();
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

// Deadlock: names one thread that waits and one that keeps it waiting.
void report_stuck() {
    const Thread* waiting = nullptr;
    for (u32 i = 0; i < block_threads && !waiting; ++i)
        if (threads[i].state == State::warp) waiting = &threads[i];
    for (u32 i = 0; i < block_threads && !waiting; ++i)
        if (threads[i].state != State::ready && threads[i].state != State::done) waiting = &threads[i];
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
    leave_for(stack_of(rank_now, t->id));
    rtk_emu_switch(&scheduler, t->stack);
    arrive_in_scheduler();
}

void start_thread(u32 id, Clock* clock) {
    Thread& t = threads[id];
    u64* top = reinterpret_cast<u64*>(stack_of(rank_now, id) + kStackBytes) - 2;
    u64* frame = top - kFrameWords;
    memset(frame, 0, kFrameWords * sizeof(u64));
    frame[kReturnWord] = reinterpret_cast<u64>(&fiber_main);
    t.stack = frame;
    t.id = id;
    t.index = {id % blockDim.x, id / blockDim.x % blockDim.y, id / blockDim.x / blockDim.y};
    t.state = State::ready;
    t.active = warps[id / 32].alive;
    t.clock = clock;
    t.now = t.met = 1;
    t.copy_group = 0;
    t.closed_groups = 0;
    t.records.clear();
    t.copies.clear();
    t.fenced = t.init_fenced = t.store_group = t.epoch = t.epoch_time = 0;
    t.fence_clock = nullptr;
    t.waited = false;
    t.published.clear();
}

void poison(u64 begin, u64 end) {
    if (begin == end) return;
    u8* const p = reinterpret_cast<u8*>(begin);
    const u64 bytes = end - begin, first = begin - shared_range.begin;
    p[0] = kPoison[begin % 2];
    if (bytes > 1) p[1] = kPoison[1 - begin % 2];
    for (u64 done = 2; done < bytes; done *= 2) memcpy(p + done, p, std::min(done, bytes - done));
    memset(static_cast<void*>(&shadow[first]), 0, bytes * sizeof(Written));  // kUnwritten, by nobody
    memset(static_cast<void*>(&readers[first / 4]), 0, (bytes + 3) / 4 * sizeof(Readers));
}

constexpr int kLooks = 8;           // idle rounds of polling threads before other blocks take their turn
constexpr int kIdleRounds = 64;     // idle rounds of all blocks before they count as stuck

u32 let_polling_look() {
    u32 woken = 0;
    for (u32 i = 0; i < block_threads; ++i) {
        if (threads[i].state != State::polling) continue;
        wake(&threads[i]);
        ++woken;
    }
    return woken;
}

// Runs the block's threads, each until it waits or returns, until none of them can or an error is found.
void run_threads(std::vector<u64>& order) {
    u64 seen = events;
    for (int looks = 0; done_threads < block_threads;) {
        bool progress = false;
        arrange(order, block_threads);
        for (u64 i : order) {
            if (threads[i].state != State::ready) continue;
            progress = true;
            resume(&threads[i]);
            if (launch->error.kind) return;
        }
        if (progress || deliver(random_word())) continue;
        if (events != seen) seen = events, looks = 0;
        if (looks++ == kLooks || let_polling_look() == 0) return;
    }
}

void start_block() {
    const u64 end = shared_range.begin + shared_range.size;
    if (dynamic_range.size) {  // static variables may lie on both sides
        poison(shared_range.begin, dynamic_range.begin);
        poison(dynamic_range.begin, dynamic_range.begin + launch->shared_bytes);
        poison(dynamic_range.begin + dynamic_range.size, end);
    } else {
        poison(shared_range.begin, end);
    }
    memset(barriers, 0, 16 * sizeof(Barrier));
    counting.clear();
    flying.clear();
    start_tensor_memory();
    storing.clear();
    waited.clear();
    triggered = false;
    Clock* clock = new_clock();
    memset(clock->seen, 0, sizeof(u32) * block_threads);
    clock->users = block_threads;
    for (u32 i = 0; i < block_threads; i += 32)
        warps[i / 32] = {block_threads - i >= 32 ? ~0u : (1u << (block_threads - i)) - 1u, 0};
    for (u32 i = 0; i < block_threads; ++i) start_thread(i, clock);
    done_threads = 0;
}

// All threads of the cluster that have not returned wait for each other: they continue.
void meet() {
    cluster_met = true;
    for (u32 rank = 0; rank < launch->cluster; ++rank) {
        enter(rank);
        if (!receive()) return;
        std::vector<Thread*> waiting;
        for (u32 i = 0; i < block_threads; ++i)
            if (threads[i].state == State::cluster) waiting.push_back(&threads[i]);
        if (!waiting.empty()) synchronise(static_cast<u32>(waiting.size()), [&](u32 i) { return waiting[i]; });
        for (Thread* t : waiting) {
            wake(t);
            t->met = t->now;
        }
        leave();
    }
    far_stores.clear();
}

// Lets the blocks of a cluster take turns until all have returned or an error is found.
void run_blocks(std::vector<u64>& order) {
    const u32 size = launch->cluster;
    int idle = 0;
    for (u32 done = 0; done < size * block_threads;) {
        u32 waiting = 0, polling = 0, stuck = size;
        const u64 before = events;
        done = 0;
        for (u32 i = 0; i < size; ++i) {
            const u32 rank = launch->order == 1 ? size - 1 - i : i;
            enter(rank);
            run_threads(order);
            if (launch->error.kind) return;
            u32 here = 0, looking = 0;
            for (u32 t = 0; t < block_threads; ++t) {
                here += threads[t].state == State::cluster;
                looking += threads[t].state == State::polling;
            }
            idle = events == before ? idle : 0;
            if (here + done_threads < block_threads && (looking == 0 || idle == kIdleRounds)) stuck = rank;
            waiting += here, polling += looking, done += done_threads;
            leave();
        }
        if (stuck < size) {
            enter(stuck);
            return report_stuck();
        }
        ++idle;
        if (waiting && !polling) meet();
        if (launch->error.kind) return;
    }
}

// A cluster from block `first` on; a single block if the launch has no clusters.
bool run_cluster(u64 first, std::vector<u64>& order) {
    const u32 size = launch->cluster;
    cluster_met = false;
    far_stores.clear();
    reader_nodes.resize(1);  // the first one means none
    free_nodes.clear();
    landing.clear();
    for (u32 rank = 0; rank < size; ++rank) {
        enter(rank);
        const u64 b = first + rank;
        blocks[rank].index = blockIdx = {static_cast<u32>(b % gridDim.x), static_cast<u32>(b / gridDim.x % gridDim.y),
                                          static_cast<u32>(b / gridDim.x / gridDim.y)};
        start_block();
        leave();
    }
    run_blocks(order);
    for (u32 rank = 0; rank < size; ++rank)
        for (u32 i = 0; i < block_threads; ++i) {
            drop(blocks[rank].threads[i].clock);
            if (Clock* fenced = blocks[rank].threads[i].fence_clock) drop(fenced);
        }
    land();
    return launch->error.kind == 0;
}

}  // namespace

// ---- interface --------------------------------------------------------------------------------------------------

u32 lane() { return current->id % 32; }

u64& closed_groups() { return current->closed_groups; }

void keep_record(const void* record, u32 bytes) {
    const u8* const first = static_cast<const u8*>(record);
    current->records.insert(current->records.end(), first, first + bytes);
}

u32 kept_records(u32 bytes) { return static_cast<u32>(current->records.size() / bytes); }

void take_record(void* record, u32 bytes) {
    memcpy(record, current->records.data(), bytes);
    current->records.erase(current->records.begin(), current->records.begin() + bytes);
}

u32 active_mask() { return current->active; }

int barrier(int id, int count, bool predicate, Site site, bool waits) {
    Thread* me = current;
    me->site = site;
    if (id < 0 || id > 15 || count % 32 != 0)
        fail(kDivergentBarrier, me, nullptr, "%s(%d, %d), %s:%d: an id is 0 to 15, a count a multiple of 32",
             site.what, id, count, site.file, site.line);
    Barrier& b = barriers[id];
    const u32 expected = count ? static_cast<u32>(count) : block_threads;
    if (b.arrived == 0) {
        b.expected = expected, b.votes = 0, b.site = site, b.first = me->id, b.waiting = 0, b.passed = false;
    } else if (b.expected != expected ||
               (count == 0 && (b.site.line != site.line || strcmp(b.site.file, site.file) != 0))) {
        char other[300];
        describe(other, sizeof(other), threads[b.first]);
        fail(kDivergentBarrier, me, nullptr, "it arrives at %s for %u threads, %s:%d, but %s for %u threads",
             site.what, expected, site.file, site.line, other, b.expected);
    }
    ++b.arrived;
    b.votes += predicate;
    if (waits) {
        b.threads[b.waiting++] = me->id;
    } else {
        const std::vector<u32> now = moment();
        for (u32 i = 0; i < block_threads; ++i) b.seen[i] = std::max(b.passed ? b.seen[i] : 0, now[i]);
        b.passed = true;
    }
    if (b.arrived < b.expected) {
        if (!waits) return 0;
        me->state = State::barrier;
        suspend();
        return me->count;
    }
    synchronise(b.waiting, [&](u32 i) { return &threads[b.threads[i]]; });
    for (u32 i = 0; i < b.waiting; ++i) {
        Thread& t = threads[b.threads[i]];
        if (b.passed) {
            current = &t;
            learn(std::vector<u32>(b.seen, b.seen + block_threads));
            current = me;
        }
        wake(&t);
        t.count = b.votes;
    }
    b.arrived = 0;
    return me->count;
}

const u64* gather(u32 mask, u64 value, Site site, bool orders) {
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
        // Lanes at another operation may still arrive here, once theirs is complete.
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
    if (orders) synchronise(count, [&](u32 i) { return members[i]; });
    return me->all;
}

u64 shuffle(u32 mask, u64 value, u32 source, Site site) {
    if (!(mask >> source & 1u))
        fail(kAbsentLanes, current, nullptr, "%s with mask 0x%08x, %s:%d, reads lane %u, which is not in the mask",
             site.what, mask, site.file, site.line, source);
    return gather(mask, value, site)[source];
}

int run(Launch* l, Entry kernel, u8* dynamic_shared, u64 dynamic_capacity, int max_threads) {
    static std::set<Entry> with_strong_accesses;
    launch = l;
    entry = kernel;
    l->error.kind = 0;
    l->error.segment = -1;
    l->max_threads = static_cast<u32>(max_threads);
    memcpy(&gridDim, l->grid, sizeof(gridDim));
    memcpy(&blockDim, l->block, sizeof(blockDim));
    block_threads = blockDim.x * blockDim.y * blockDim.z;
    Module unit = {reinterpret_cast<u64>(kernel), {0, 0}, {0, 0}};
    Module self = {reinterpret_cast<u64>(&threadIdx), {0, 0}, {0, 0}};
    dl_iterate_phdr(find_module, &unit);
    dl_iterate_phdr(find_module, &self);
    shared_range = unit.tls;
    dynamic_range = {reinterpret_cast<u64>(dynamic_shared), dynamic_capacity};
    module_range = unit.loaded;
    runtime_range = self.loaded;
    check_limits(*l, dynamic_capacity, l->error.detail, sizeof(l->error.detail));
    if (l->error.detail[0]) return l->error.kind = kLaunchLimit;
    if (!map_stacks(l->cluster)) {
        snprintf(l->error.detail, sizeof(l->error.detail), "no memory for the stacks of %u threads: %s",
                 l->cluster * kMaxThreads, strerror(errno));
        return l->error.kind = kLaunchLimit;
    }
    stack_range = {reinterpret_cast<u64>(stacks), kAllStacks};
    size_shadow();

    const std::vector<u64> args(l->args, l->args + l->arg_count);
    do {
        tracked = with_strong_accesses.count(kernel) != 0;
        l->error.kind = 0;
        l->waited = l->waited_first = 0;
        last_segment = nullptr;
        random_state = l->order;
        std::copy(args.begin(), args.end(), l->args);
        place_segments();
        if (tracked) start_tracking();
        std::vector<u64> block_order, thread_order;
        const u64 clusters = static_cast<u64>(l->grid[0]) * l->grid[1] * l->grid[2] / l->cluster;
        if (clusters) arrange(block_order, clusters);
        for (u64 c : block_order)
            if (!run_cluster(c * l->cluster, thread_order)) break;
        if (l->error.kind == kRestart) {
            with_strong_accesses.insert(kernel);
        } else {
            copy_back();
        }
        if (l->error.kind) clean_stacks();
        free(arena);
    } while (l->error.kind == kRestart);
    current = nullptr;
    return l->error.kind;
}

}  // namespace emu
