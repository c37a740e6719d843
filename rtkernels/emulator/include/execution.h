// The CUDA execution model on the host: what a kernel's translation unit sees of it. runtime.cpp implements it.
//
// Every thread of a block is a fiber of one OS thread. A fiber runs until it waits (barrier, warp operation) or
// returns; the scheduler then picks the next one in the launch's thread order. `__shared__` is `thread_local`: the one
// C++ specifier that is also valid after `extern` and makes a local variable static. So all shared variables of a unit
// are in the TLS block of its shared object, which the runtime finds, poisons before each block and checks.
//
// Every load and store of the kernel reaches the runtime: the unit is compiled with -fsanitize=thread, whose
// callbacks (__tsan_read4, ...) the runtime defines itself.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __attribute__((aligned(n)))  // CUDA allows it after __shared__, C++ does not after thread_local

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

#ifdef RTK_EMU_RUNTIME
#define RTK_EMU_BUILTIN extern __attribute__((visibility("default")))
#else
#define RTK_EMU_BUILTIN extern const
#endif
RTK_EMU_BUILTIN uint3 threadIdx;
RTK_EMU_BUILTIN uint3 blockIdx;
RTK_EMU_BUILTIN dim3 blockDim;
RTK_EMU_BUILTIN dim3 gridDim;
constexpr int warpSize = 32;

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#pragma GCC visibility push(default)

// A source location, for reports. Functions that wait take it as a default argument.
struct Site {
    const char* what;
    const char* file;
    int line;
};
#define RTK_EMU_SITE(what) \
    emu::Site { what, file, line }
#define RTK_EMU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Barrier `id` for `threads` threads of the block (0: all of them). Returns how many arrived with `predicate`.
int barrier(int id, int threads, bool predicate, Site site, bool waits = true);

// Waits for the lanes of `mask`, then returns the 32 values they deposited (0 for lanes outside the mask). `orders`:
// orders the lanes' earlier memory accesses before their later ones, as __syncwarp does and no other warp operation.
const u64* gather(u32 mask, u64 value, Site site, bool orders = false);
u64 shuffle(u32 mask, u64 value, u32 source, Site site);

// One access of an instruction wrapper: 1 to 16 bytes, checked as a whole, aligned to its size.
struct Word16 {
    u64 lo, hi;
};
Word16 load(const void* p, u32 bytes);
void store(void* p, Word16 value, u32 bytes);

void check_atomic(const void* p, u32 bytes);

// Words that other blocks read and write concurrently, 16 bytes at a time.
Word16 load_strong(const void* p);
void store_strong(void* p, Word16 value);

// An operand of wgmma in shared memory.
Word16 load_by_wgmma(const void* p, u32 bytes);

// Fills shared memory that is read although its contents do not matter; the GPU writes nothing here, so no fence is
// needed.
void leave_undefined(void* shared, u32 bytes);

// Fences: of shared memory towards TMA and wgmma, and of global memory towards other blocks.
void fence_async();
void threadfence();

// Dependent launches.
void launch_dependents();
void wait_for_previous();

[[noreturn]] void trap(Site site);

u32 lane();

// What a thread has started and not finished (wgmma products): one record each, oldest first. A commit closes a group;
// the thread counts the groups that it has closed.
u64& closed_groups();
void keep_record(const void* record, u32 bytes);
u32 kept_records(u32 bytes);
void take_record(void* record, u32 bytes);

u32 active_mask();  // the lanes of this warp that had not returned when it last waited

// cp.async: the bytes arrive in shared memory when the thread waits for them, not before.
void cp_async(void* shared, const void* global, u32 bytes, u32 from_global);
void cp_async_commit();
void cp_async_wait(u32 groups_in_flight);

// Tensor memory (ptx/tcgen05.cuh). Addresses are lane << 16 | column; matrices are addresses of shared memory.
struct TensorProduct {
    int kind;
    u32 d, scale_a, scale_b, instruction;
    bool add;
    u64 a, b;
};
u32 tensor_alloc(u32 columns);
void tensor_free(u32 address, u32 columns);
void tensor_product(const TensorProduct& product);
void tensor_copy_scales(u32 to, u64 from);
void tensor_commit(void* barrier);
u32 tensor_word(u32 address);

// mbarriers: a phase ends when all threads have arrived and all announced bytes have been copied. wait: until the phase
// with `parity` has ended; the phase before the first counts as ended, with parity 1.
void mbarrier_init(void* barrier, u32 arrivals);
void mbarrier_fence_init();
void mbarrier_arrive(void* barrier, u32 bytes);
void mbarrier_wait(void* barrier, u32 parity, Site site);
bool mbarrier_test(void* barrier, u32 parity, Site site);
void bulk_load(void* shared, const void* global, u32 bytes, void* barrier);
void bulk_store(void* global, const void* shared, u32 bytes, bool adds = false);
void tensor_load(void* shared, const long long* map, void* barrier, const int* at, u32 coordinates);
void tensor_store(const long long* map, const void* shared, const int* at, u32 coordinates, bool adds = false);
void bulk_store_commit();
void bulk_store_wait_read(u32 pending = 0);
void bulk_store_wait();

// poll: before looking for something that others do. Those who poll go on when nobody else can, and now and then when
// nothing has happened, which a note says has.
void poll(Site site);
void note();

// Clusters: the blocks of a cluster take turns. Writes to another block's memory become visible at the cluster barrier.
u32 cluster_rank();
void cluster_barrier(Site site);
void cluster_store(void* shared, u32 rank, u32 word);

// ---- launch -----------------------------------------------------------------------------------------------------

// Bytes of one or more overlapping tensors. They are copied into an arena with gaps around them that count as unmapped,
// so running off one tensor never lands in another; `mask` marks (1) the bytes that belong to a tensor's elements, and
// collects which were touched (checks.h).
struct Segment {
    u8* host;
    u8* mask;
    u64 bytes;
    u8* copy;
    u64 written;
};

// A word of a tensor that holds the address of another one: it is replaced by the address of that one's copy.
struct Relocation {
    u64 segment, at;         // where the word is
    u64 target, target_at;   // what it points to
};

struct Error {
    int kind;  // 0: none; the names are in runtime/launch/driver.py
    u32 block[3], thread[3];
    int write;
    u64 size;
    int segment;    // nearest segment of a global access, -1: none
    long long offset;  // from the segment's first byte, or into shared memory
    u64 pc;         // in the kernel's shared object, relative to its load address
    char detail[1024];
};

struct Launch {
    u32 grid[3], block[3];
    u64 shared_bytes, shared_limit;
    u64 order;  // 0: forward, 1: reverse, else the seed of a random order
    u32 races;  // report conflicting shared-memory accesses that no barrier orders
    u32 arg_count;
    u32 cluster;       // blocks in x of a cluster, or of those that run by turns:
    u32 resident;      // the launch asks that all blocks run at the same time
    u32 max_threads;   // of a block, as __launch_bounds__ says; 0: it does not
    u32 waited;        // set: a thread waited for the previous kernel,
    u32 waited_first;  // and one did before its block let dependents start
    u32 unused;
    u64* args;
    const int* arg_segment;  // -1: not a pointer into a segment; else args[i] is an offset into it
    Segment* segments;
    u64 segment_count;
    const Relocation* relocations;
    u64 relocation_count;
    Error error;
};

using Entry = void (*)(const u64* args);
int run(Launch* launch, Entry entry, u8* dynamic_shared, u64 dynamic_capacity, int max_threads);

constexpr int launch_bounds(int max_threads, ...) { return max_threads; }

// The fill of uninitialised memory, by address: NaN in every float format of at least 2 bytes, and never a number that
// a kernel would take for an index or for "unused". Mirrored in runtime/launch/driver.py.
constexpr u8 kPoison[2] = {0xf5, 0x7f};

#pragma GCC visibility pop

// ---- from the packed argument buffer to a call ------------------------------------------------------------------

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

template <typename T>
T argument(const u64* slot) {
    static_assert(sizeof(T) % 8 == 0, "kernel parameters are pointers, long long and double, or structs of these");
    T value;
    __builtin_memcpy(&value, slot, sizeof(T));
    return value;
}

// The first word of parameter `nth`.
template <typename... P>
constexpr int place_of(int nth) {
    const int words[] = {static_cast<int>(sizeof(P) / 8)..., 0};
    int place = 0;
    for (int i = 0; i < nth; ++i) place += words[i];
    return place;
}

template <typename... P, int... I>
void call_with(void (*kernel)(P...), const u64* args, Indices<I...>) {
    kernel(argument<P>(args + place_of<P...>(I))...);
}

template <typename... P>
void call(void (*kernel)(P...), const u64* args) {
    call_with(kernel, args, typename MakeIndices<sizeof...(P)>::type());
}

}  // namespace emu
