// Begin and commit: one thread per sequence, with the host's own arithmetic.

#include "core/check.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/recurrent.h"
#include "replay/cursor.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;

__device__ int64_t sequence_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void begin_kernel(SequenceBatch batch, Cursor* cursors) {
  const int64_t s = sequence_of_thread();
  if (s >= batch.sequences || batch.slot[s] < 0) return;
  begin_step(cursors[batch.slot[s]], batch.query_start[s + 1] - batch.query_start[s], batch.ring);
  __threadfence();  // the first layer may read it as soon as this block is gone
}

__global__ void commit_kernel(SequenceBatch batch, const int32_t* accepted, Route route,
                              Cursor* cursors) {
  const int64_t s = sequence_of_thread();
  if (s >= batch.sequences || batch.slot[s] < 0) return;
  commit_step(cursors[batch.slot[s]], accepted[s], route);
}

__global__ void commit_fold_kernel(SequenceBatch batch, Cursor* cursors) {
  const int64_t s = sequence_of_thread();
  if (s >= batch.sequences || batch.slot[s] < 0) return;
  commit_fold(cursors[batch.slot[s]]);
}

unsigned blocks(const SequenceBatch& batch) {
  return static_cast<unsigned>((batch.sequences + kThreads - 1) / kThreads);
}

}  // namespace

void begin_steps(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  if (batch.sequences == 0) return;
  begin_kernel<<<blocks(batch), kThreads, 0, stream>>>(batch, cursors);
  check_cuda(cudaGetLastError(), "begin_steps");
}

void commit_steps(const SequenceBatch& batch, const int32_t* accepted, Route route, Cursor* cursors,
                  cudaStream_t stream) {
  if (batch.sequences == 0) return;
  commit_kernel<<<blocks(batch), kThreads, 0, stream>>>(batch, accepted, route, cursors);
  check_cuda(cudaGetLastError(), "commit_steps");
}

void commit_folds(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  if (batch.sequences == 0) return;
  commit_fold_kernel<<<blocks(batch), kThreads, 0, stream>>>(batch, cursors);
  check_cuda(cudaGetLastError(), "commit_folds");
}

}  // namespace replayssm::cuda
