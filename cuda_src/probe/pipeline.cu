// Moves rows of 128 numbers through a pipeline (common/pipeline.cuh), to test the pipeline alone: y = 2 x. The first
// warp produces, by bulk copies if BULK, otherwise by plain stores; each of the others doubles its part of every row.
// `fault` plants a wrong use, which the emulator must report.
#include "common/pipeline.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace rtk {

inline constexpr int kRow = 128;
inline constexpr int kRowBytes = 4 * kRow;
inline constexpr int kNoInitBarrier = 1, kNoAcquire = 2, kNoWait = 3, kReleaseBeforeRead = 4, kNoRelease = 5,
                     kReleaseTwice = 6, kMissingBytes = 7, kUnfencedWrite = 8, kFencedWrite = 9, kNoCommit = 10,
                     kReleaseWithoutSyncwarp = 11, kNoDrain = 12;

template <int STAGES, bool BULK>
__global__ void __launch_bounds__(256) probe_pipeline(const float* x, float* y, i64 rows, i64 fault) {
    __shared__ __align__(16) float stages[STAGES][kRow];
    __shared__ __align__(8) u64 barriers[Pipeline<STAGES>::kBytes / 8];
    const Pipeline<STAGES> pipeline{ptx::shared_address(barriers)};
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int consumers = static_cast<int>(blockDim.x) / kWarp - 1, consumer = static_cast<int>(threadIdx.x) / kWarp - 1;
    if (threadIdx.x == 0) pipeline.init(1, static_cast<u32>(consumers));
    if (fault != kNoInitBarrier) __syncthreads();
    PipelineState<STAGES> state;
    if (consumer < 0) {
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x, state.advance()) {
            if constexpr (BULK) {
                if (lane != 0) continue;
                if (fault != kNoAcquire) pipeline.acquire(state);
                const ptx::SharedAddress full = pipeline.expect(state, fault == kMissingBytes ? kRowBytes / 2 : kRowBytes);
                for (int half = 0; half < 2; ++half)
                    ptx::bulk_load(ptx::shared_address(stages[state.stage] + half * (kRow / 2)),
                                   x + row * kRow + half * (kRow / 2), kRowBytes / 2, full);
            } else {
                if (fault != kNoAcquire) pipeline.acquire(state);
                for (int i = lane; i < kRow; i += kWarp) stages[state.stage][i] = x[row * kRow + i];
                if (fault != kNoCommit) pipeline.commit_warp(state);
            }
        }
        if (lane == 0) {  // the stages are reused, as by an epilogue
            if (fault != kNoDrain) pipeline.drain(state);
            for (int stage = 0; stage < STAGES; ++stage) stages[stage][0] = 0.0f;
        }
    } else {
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x, state.advance()) {
            if (fault != kNoWait) pipeline.wait(state);
            if (fault == kReleaseBeforeRead) pipeline.release_warp(state);
            for (int i = consumer * kWarp + lane; i < kRow; i += consumers * kWarp)
                y[row * kRow + i] = 2.0f * stages[state.stage][i];
            if (fault == kUnfencedWrite || fault == kFencedWrite) {
                __syncwarp();
                for (int i = consumer * kWarp + lane; i < kRow; i += consumers * kWarp) stages[state.stage][i] = 0.0f;
            }
            if (fault == kFencedWrite) ptx::fence_async_shared();
            if (fault == kReleaseWithoutSyncwarp) {
                if (lane == 0) pipeline.release(state);
            } else if (fault != kReleaseBeforeRead && fault != kNoRelease) {
                pipeline.release_warp(state);
            }
            if (fault == kReleaseTwice) pipeline.release_warp(state);
        }
    }
}

// The state after `first` single steps and then one of `uses`: y[0] its stage, y[1] its phase.
template <int STAGES>
__global__ void probe_pipeline_state(i64* y, i64 first, i64 uses) {
    PipelineState<STAGES> state;
    for (i64 i = 0; i < first; ++i) state.advance();
    state.advance(static_cast<int>(uses));
    y[0] = state.stage;
    y[1] = state.phase;
}

}  // namespace rtk
