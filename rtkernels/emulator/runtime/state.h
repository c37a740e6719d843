// What the runtime knows of the launch, its threads and its memory. One launch runs at a time.
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

#include "switch.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// A report about a running thread passes here, on its stack: the place for a breakpoint.
extern "C" __attribute__((noinline, visibility("default"))) void rtk_emu_error() { __asm__ volatile(""); }

namespace emu {
namespace {

enum Kind {
    kOutOfBounds = 1, kMisaligned, kUninitialisedShared, kRace, kDivergentBarrier, kAbsentLanes, kLaunchLimit, kTrap
};
enum class State : u8 { ready, barrier, warp, counting, cluster, polling, done };

constexpr u32 kMaxThreads = 1024, kMaxCluster = 8;
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
    u32 met;  // `now` when the cluster last met
    u32 copy_group;
    u32 word;  // own_word()
    std::vector<Copy> copies;
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

// One byte of shared memory: who wrote and read it last, and when on that thread's clock.
struct Shadow {
    u32 write_time, read_time;
    u16 writer, reader;
    u16 written;
};

u8* stacks;
u64 guarded_stacks;
Thread* threads;  // these, `shadow` and blockIdx are those of the block that runs (cluster.h)
Warp* warps;
Barrier* barriers;
u32 done_threads;
std::vector<Clock*> free_clocks;
std::vector<Shadow> shadow;
u8* arena;  // the tensors of the launch
void* scheduler;
Thread* current;
Launch* launch;
Entry entry;
u32 block_threads;
u64 random_state;
u64 events;  // things that somebody who polls may look for

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
    rtk_emu_error();
    void* nowhere;
    rtk_emu_switch(&nowhere, scheduler);
    __builtin_unreachable();
}

}  // namespace
}  // namespace emu
