// Tokens on their way through shared memory (sm_90 and up): one warp has the copy engine bring them to a ring of stages,
// one makes their rotations, and consumers, each of several warps, take one token after the other.
//
// Each warp that waits sees every phase of the stages it waits for (stages are a multiple of the consumers; the warp that
// makes rotations has all tokens), because a barrier's parity tells only neighbouring phases apart.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "rope/qk_norm_rope.cuh"

namespace rtk {

// Where a head is: bytes from the start of a stage to its gradient and to its x, elements from where the results of the
// token are to its own.
struct alignas(16) HeadPlace {
    int g, x, result, exists;
};

// The stages of a ring in shared memory: heads of a token and their rotation; then, for all stages, barriers
// (full: the copies and the rotation have come; empty: the consumer is done) and where results go; then the places.
struct TokenRing {
    u8* memory;
    int stages, heads_bytes, rotation_bytes;

    RTK_DEVICE u8* heads(int stage) const { return memory + stage * heads_bytes; }
    RTK_DEVICE u8* turn(int stage) const { return memory + stages * heads_bytes + stage * rotation_bytes; }
    RTK_DEVICE u8* behind() const { return memory + stages * (heads_bytes + rotation_bytes); }
    RTK_DEVICE ptx::SharedAddress full(int stage) const { return ptx::shared_address(behind()) + 8 * stage; }
    RTK_DEVICE ptx::SharedAddress empty(int stage) const { return full(stages + stage); }
    RTK_DEVICE i64& result(int stage) const { return reinterpret_cast<i64*>(behind())[2 * stages + stage]; }
    RTK_DEVICE HeadPlace* places() const { return reinterpret_cast<HeadPlace*>(behind() + 32 * stages); }
};

// A place in it: the stage of a token, and the parity of its phase there.
struct RingStage {
    int stage;
    u32 phase;

    RTK_DEVICE explicit RingStage(int first) : stage(first), phase(0) {}
    RTK_DEVICE void advance(int by, int stages) {
        stage += by;
        if (stage >= stages) stage -= stages, phase ^= 1u;
    }
};

}  // namespace rtk
