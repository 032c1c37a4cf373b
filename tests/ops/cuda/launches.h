// How tests enqueue a call: as it is, or captured in a graph that may be replayed.
#pragma once

#include <functional>

#include "ops/cuda/device_memory.h"

namespace replayssm::testing {

using Call = std::function<void(cudaStream_t)>;

class Stream {
 public:
  Stream() { cuda::check_cuda(cudaStreamCreate(&stream_), "stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize() const { cuda::check_cuda(cudaStreamSynchronize(stream_), "kernel"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured call.
class Graph {
 public:
  explicit Graph(const Call& call) {
    cudaGraph_t graph = nullptr;
    cuda::check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal), "capture");
    call(stream_.get());
    cuda::check_cuda(cudaStreamEndCapture(stream_.get(), &graph), "capture");
    cuda::check_cuda(cudaGraphInstantiate(&graph_, graph, 0), "instantiate");
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const {
    cuda::check_cuda(cudaGraphLaunch(graph_, stream_.get()), "graph");
    stream_.synchronize();
  }

 private:
  Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
};

// Runs a call and waits for it.
inline void run_call(const Call& call, bool graph = false) {
  if (graph) return Graph(call).replay();
  const Stream stream;
  call(stream.get());
  stream.synchronize();
}

// What `run(graph)` returns: from five runs and a captured one, the same.
template <class Run>
auto same_in_every_run(Run&& run) {
  const auto first = run(false);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(run(false) == first) << "run " << i + 2;
  EXPECT_TRUE(run(true) == first) << "graph";
  return first;
}

}  // namespace replayssm::testing
