#include "model/cuda/graphs.h"

#include <algorithm>

#include "ops/cuda/check_cuda.h"

namespace replayssm {
namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};

cudaGraphExec_t capture(cudaStream_t stream, const std::function<void()>& enqueue) {
  cuda::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "graph capture");
  cudaGraph_t captured = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);
    if (captured) cudaGraphDestroy(captured);
    throw;
  }
  cuda::check_cuda(cudaStreamEndCapture(stream, &captured), "graph capture");
  const std::unique_ptr<CUgraph_st, DestroyGraph> graph(captured);
  cudaGraphExec_t executable = nullptr;
  cuda::check_cuda(cudaGraphInstantiate(&executable, graph.get(), 0), "graph instantiation");
  return executable;
}

}  // namespace

PassKey pass_key(const PassPlaces& places, const StateView& state, bool timed) {
  PassKey key{.places = places, .route = state.route, .timed = timed, .pointers = {}};
  key.pointers.push_back(state.cursors);
  for (const RecurrentState& layer : state.recurrent) {
    key.pointers.insert(key.pointers.end(), {layer.checkpoint, layer.ring_v, layer.ring_k,
                                             layer.ring_b, layer.read_copy.data});
  }
  for (const auto& pointers : {state.conv_inputs, state.kv_keys, state.kv_values, state.snapshots})
    key.pointers.insert(key.pointers.end(), pointers.begin(), pointers.end());
  return key;
}

size_t Graphs::run(const PassKey& key, int64_t generation, cudaStream_t stream,
                   const std::function<void(size_t number)>& enqueue) {
  if (generation != generation_) entries_.clear();
  generation_ = generation;
  const auto entry = std::ranges::find(entries_, key, &Entry::key);
  const auto number = static_cast<size_t>(entry - entries_.begin());
  if (entry == entries_.end()) {
    enqueue(number);
    entries_.push_back({key, nullptr});
    return number;
  }
  if (!entry->graph) entry->graph.reset(capture(stream, [&] { enqueue(number); }));
  cuda::check_cuda(cudaGraphLaunch(entry->graph.get(), stream), "graph launch");
  return number;
}

}  // namespace replayssm
