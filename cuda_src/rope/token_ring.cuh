// Tokens pass through shared memory (sm_90 and up): one warp issues TMA loads into a ring of stages, one computes their
// rotations, and consumers, each of several warps, take one token after the other.
//
// Each waiting warp sees every phase of the stages it waits for (the number of stages is a multiple of the number of
// consumers; the warp that computes rotations handles all tokens), because a barrier's parity distinguishes only
// neighbouring phases.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "rope/qk_norm_rope.cuh"

namespace rtk {

// Position of a head: bytes from the start of a stage to its gradient and to its x, elements from the token's results
// to its own.
struct alignas(16) HeadPlace {
    int g, x, result, exists;
};

// The stages of a ring in shared memory: heads of a token and their rotation; then, for all stages, barriers (full: the
// copies and the rotation have arrived; empty: the consumer is done) and destinations of results; then the positions.
struct TokenRing {
    u8* memory;
    int stages, heads_bytes, rotation_bytes;

    RTK_DEVICE u8* heads(int stage) const { return memory + stage * heads_bytes; }
    RTK_DEVICE u8* rotation(int stage) const { return memory + stages * heads_bytes + stage * rotation_bytes; }
    RTK_DEVICE u8* behind() const { return memory + stages * (heads_bytes + rotation_bytes); }
    RTK_DEVICE ptx::SharedAddress full(int stage) const { return ptx::shared_address(behind()) + 8 * stage; }
    RTK_DEVICE ptx::SharedAddress empty(int stage) const { return full(stages + stage); }
    RTK_DEVICE i64& result(int stage) const { return reinterpret_cast<i64*>(behind())[2 * stages + stage]; }
    RTK_DEVICE HeadPlace* places() const { return reinterpret_cast<HeadPlace*>(behind() + 32 * stages); }
};

// A position in the ring: the stage of a token, and the parity of its phase there.
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
