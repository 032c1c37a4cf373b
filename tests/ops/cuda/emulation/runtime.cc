// CUDA's runtime and the cursors' kernels on host memory: what tests of the decode step call.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ops/cuda/cursors.h"
#include "replay/step_plan.h"

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return posix_memalign(pointer, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Those of an H200.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
                                                                  : 9;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the emulated runtime"; }

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

// Graphs run while they are captured, and no more.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

namespace replayssm::cuda {

void begin_steps(const SequenceBatch& batch, Cursor* cursors, cudaStream_t) {
  const auto count = static_cast<int32_t>(batch.sequences);
  std::vector<SequencePlan> plans;
  for (int32_t s = 0; s < count; ++s) {
    const int32_t slot = batch.slot[s], token = batch.query_start[s];
    const int32_t window = batch.query_start[s + 1] - token;
    plans.push_back({.sequence = s, .slot = slot, .token = token, .window = window});
    if (slot < 0) continue;
    begin_step(cursors[slot], window, batch.ring);
    plans.back() = plan_sequence(s, slot, token, window, cursors[slot], batch.ring);
  }
  if (batch.plan == nullptr) return;
  const auto folds = [](const SequencePlan& plan) { return plan.folded > 0; };
  const auto all = static_cast<int32_t>(std::ranges::count_if(plans, folds));
  int32_t rank[2] = {};
  for (const SequencePlan& plan : plans)
    batch.plan[planned_place(folds(plan), rank[folds(plan)]++, all, count)] = plan;
}
void commit_steps(const SequenceBatch& batch, const int32_t* accepted, Route route, Cursor* cursors,
                  cudaStream_t) {
  for (int64_t s = 0; s < batch.sequences; ++s)
    if (batch.slot[s] >= 0) commit_step(cursors[batch.slot[s]], accepted[s], route);
}
void commit_folds(const SequenceBatch& batch, const int32_t* target_slot, Cursor* cursors,
                  cudaStream_t) {
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int32_t target = target_slot ? target_slot[s] : batch.slot[s];
    if (batch.slot[s] < 0 || target < 0) continue;
    cursors[target] = cursors[batch.slot[s]];
    commit_fold(cursors[target]);
  }
}

}  // namespace replayssm::cuda
