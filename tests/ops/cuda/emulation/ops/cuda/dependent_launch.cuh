// Launches that return when the kernel has run.
#pragma once

#include "block.h"
#include "core/check.h"

namespace replayssm::cuda {

inline bool has_dependent_launch(const char*) { return false; }

template <class... Params>
void reserve_shared(const char*, void (*)(Params...), int) {}

template <class... Params, class... Args>
void launch_dependent_clusters(const char* what, void (*kernel)(Params...), dim3 grid, dim3 cluster,
                               int threads, int shared_bytes, cudaStream_t, const Args&... args) {
  if (cluster.x * cluster.y * cluster.z > 1) fail(what, ": clusters of blocks are not emulated");
  emulation::run([&] { kernel(args...); }, grid, threads, shared_bytes);
}

template <class... Params, class... Args>
void launch_dependent(const char* what, void (*kernel)(Params...), dim3 grid, int threads,
                      int shared_bytes, cudaStream_t stream, const Args&... args) {
  launch_dependent_clusters(what, kernel, grid, dim3(1), threads, shared_bytes, stream, args...);
}

}  // namespace replayssm::cuda
