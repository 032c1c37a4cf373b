// Launches that may begin while the kernel before them in the stream still runs: every block of
// such a kernel calls wait_for_predecessor before it reads what others write.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/check_cuda.h"

namespace replayssm::cuda {

// Of the current device.
inline int device_attribute(cudaDeviceAttr attribute, const char* what) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), what);
  return value;
}
inline int compute_capability(const char* what) {  // its first number
  return device_attribute(cudaDevAttrComputeCapabilityMajor, what);
}
inline int multiprocessors(const char* what) {
  return device_attribute(cudaDevAttrMultiProcessorCount, what);
}

// Whether kernels can wait for their predecessors themselves.
inline bool has_dependent_launch(const char* what) { return compute_capability(what) >= 9; }

// Lets the blocks of a kernel have so many bytes of shared memory.
template <class... Params>
void reserve_shared(const char* what, void (*kernel)(Params...), int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             what);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             what);
}

// `what` names the op.
template <class... Params, class... Args>
void launch_dependent(const char* what, void (*kernel)(Params...), dim3 grid, int threads,
                      int shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = has_dependent_launch(what) ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

// What a grid's y holds.
inline void check_grid_sequences(int64_t sequences) {
  if (sequences > 65535) fail("batch.sequences: expected at most 65535, got ", sequences);
}

}  // namespace replayssm::cuda
