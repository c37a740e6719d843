// The stacks of fibers, and what AddressSanitizer must be told about them where the runtime is compiled with it
// (tests/emulator/test_sanitized.py).
#pragma once
#include "switch.h"

#include <errno.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RTK_EMU_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define RTK_EMU_SANITIZED 1
#endif

#ifdef RTK_EMU_SANITIZED
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define RTK_EMU_UNCHECKED __attribute__((no_sanitize("address")))
#else
#define RTK_EMU_UNCHECKED
#endif

namespace emu {
namespace {

constexpr u32 kMaxThreads = 1024, kMaxCluster = 8;
constexpr u64 kGuardBytes = 64 << 10;  // a whole page on every machine
#ifdef RTK_EMU_SANITIZED
constexpr u64 kStackBytes = 1 << 20;  // frames have red zones between their variables
#else
constexpr u64 kStackBytes = 256 << 10;
#endif
constexpr u64 kAllStacks = kGuardBytes + kMaxCluster * kMaxThreads * (kStackBytes + kGuardBytes);

u8* stacks;  // guard, stack, guard, stack, ..., guard; a guard can be neither read nor written
u64 stacks_in_use;

u8* stack_of(u32 rank, u32 thread) {
    return stacks + kGuardBytes + (rank * kMaxThreads + thread) * (kStackBytes + kGuardBytes);
}

// Stacks for the threads of so many blocks; false if there is no memory for them.
bool map_stacks(u32 blocks) {
    if (!stacks) {
        void* const all = mmap(nullptr, kAllStacks, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) return false;
        stacks = static_cast<u8*>(all);
    }
    for (; stacks_in_use < blocks * kMaxThreads; ++stacks_in_use)
        if (mprotect(stack_of(0, static_cast<u32>(stacks_in_use)), kStackBytes, PROT_READ | PROT_WRITE) != 0) return false;
    return true;
}

// ---- the sanitizer ----------------------------------------------------------------------------------------------

#ifdef RTK_EMU_SANITIZED
const void* host_stack;
size_t host_stack_bytes;

// Called before a switch to a fiber's stack, or to that of the scheduler; and after one. A fiber that has ended never
// returns from these functions, so their frames must have no red zones.
RTK_EMU_UNCHECKED void leave_for(const u8* stack) {
    void* nothing;  // without detect_stack_use_after_return
    __sanitizer_start_switch_fiber(&nothing, stack, kStackBytes);
}
RTK_EMU_UNCHECKED void leave_for_scheduler() {
    void* nothing;
    __sanitizer_start_switch_fiber(&nothing, host_stack, host_stack_bytes);
}
void arrive_in_fiber() { __sanitizer_finish_switch_fiber(nullptr, &host_stack, &host_stack_bytes); }
void arrive_in_scheduler() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }

// Fibers that were abandoned inside a function keep the red zones of its frame; the next ones start with clean stacks.
void clean_stacks() {
    for (u64 i = 0; i < stacks_in_use; ++i)
        __asan_unpoison_memory_region(stack_of(0, static_cast<u32>(i)), kStackBytes);
}
void forbid(const u8* first, u64 bytes) { __asan_poison_memory_region(first, bytes); }
void allow(const u8* first, u64 bytes) { __asan_unpoison_memory_region(first, bytes); }
#else
void leave_for(const u8*) {}
void leave_for_scheduler() {}
void arrive_in_fiber() {}
void arrive_in_scheduler() {}
void clean_stacks() {}
void forbid(const u8*, u64) {}
void allow(const u8*, u64) {}
#endif

}  // namespace
}  // namespace emu
