// The runtime's state: the launch, its threads and its memory. One launch runs at a time.
#pragma once
#include "execution.h"

#undef __noinline__  // the C library's headers use these words
#undef __host__
#undef alignas

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "stacks.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// A report about a running thread passes through here, on its stack: set breakpoints here.
extern "C" __attribute__((noinline, visibility("default"))) void rtk_emu_error() { __asm__ volatile(""); }

namespace emu {
namespace {

enum Kind {
    kOutOfBounds = 1, kMisaligned, kUninitialisedShared, kRace, kDivergentBarrier, kAbsentLanes, kLaunchLimit, kTrap,
    kMissingFence, kBeforeWait,
    kRestart = 100  // no error: the launch is to be run from its beginning, with `tracked` on (global_order.h)
};
enum class State : u8 { ready, barrier, warp, counting, cluster, polling, done };

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
    u32 met;  // `now` when the cluster last met
    u32 copy_group;
    u64 closed_groups;
    std::vector<u8> records;  // of keep_record, in order
    std::vector<Copy> copies;
    u32 fenced;          // `now` at its last proxy fence, 0: none
    Clock* fence_clock;  // its clock at that time, or null
    u32 init_fenced;     // `now` at its last fence of new mbarriers
    u32 store_group;     // of TMA stores
    bool waited;         // for the previous kernel, or knows of a thread that has
    u32 epoch;           // of its global writes (global_order.h)
    u32 epoch_time;      // `now` in that epoch, 0: none yet
    std::vector<u32> published;  // what it had seen at its last __threadfence
};

struct Warp {
    u32 alive;    // lanes that exist and have not returned
    u32 waiting;  // lanes in a warp operation
};

struct Barrier {
    u32 expected, arrived, waiting;
    int votes;
    Site site;
    u32 first;                 // that arrived
    u32 threads[kMaxThreads];  // that wait
    bool passed;               // by threads that arrived without waiting; what they had seen then:
    u32 seen[kMaxThreads];
};

// One byte of shared memory: who wrote it last, and when on that thread's clock.
enum : u16 { kUnwritten = 0, kPlain = 1, kAtomic = 2, kCopyEngine = 3, kStates = 7, kStoreReads = 8 };
struct Written {
    u32 time;
    u16 thread;
    u16 state;  // and kStoreReads while a TMA store has not read it
};

// Four bytes of shared memory: who read which of them since they were last written. The newest reader is here, those that
// nothing orders before it are in `reader_nodes`.
struct Readers {
    u32 time;
    u32 more;  // index of a node, 0: none
    u16 thread;
    u16 bytes;  // a bit each; none: nobody
};
struct ReaderNode {
    Readers reader;
    u32 length;  // of the list from here
};

Thread* threads;  // these, the shadow memory and blockIdx are those of the active block (cluster.h)
Warp* warps;
Barrier* barriers;
u32 done_threads;
std::vector<Clock*> free_clocks;
std::vector<Written> shadow;
std::vector<Readers> readers;
std::vector<ReaderNode> reader_nodes;  // of all blocks
std::vector<u32> free_nodes;
u8* arena;  // the tensors of the launch
void* scheduler;
Thread* current;
Launch* launch;
Entry entry;
u32 block_threads;
u64 random_state;
u64 events;  // events that a polling thread may look for
bool tracked;  // the order of global accesses between blocks, in this launch

struct Range {
    u64 begin, size;
    bool has(u64 a) const { return a - begin < size; }
};
Range stack_range, shared_range, dynamic_range, module_range, runtime_range;
Segment* last_segment;

RTK_EMU_UNCHECKED void suspend() {
    leave_for_scheduler();
    rtk_emu_switch(&current->stack, scheduler);
    arrive_in_fiber();
}

// Records the first error and abandons the block.
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
    if (kind != kRestart) rtk_emu_error();
    void* nowhere;
    leave_for_scheduler();
    rtk_emu_switch(&nowhere, scheduler);
    __builtin_unreachable();
}

}  // namespace
}  // namespace emu
