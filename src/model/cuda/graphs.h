// Captured passes, replayed where nothing but the contents of device arrays differs.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <vector>

#include "model/cuda/step_arrays.h"

namespace replayssm {

// All that a captured pass has fixed.
struct PassKey {
  PassPlaces places;
  Route route = Route::kOutputOnly;
  bool timed = false;                 // with the events of stages
  std::vector<const void*> pointers;  // of states and caches

  bool operator==(const PassKey&) const = default;
};

PassKey pass_key(const PassPlaces& places, const StateView& state, bool timed);

class Graphs {
 public:
  // Runs `enqueue` on the stream: at a key's first call as it is, so that whatever happens once
  // happens then; captured at the second; replayed from then on. `generation`: where it changes,
  // captured pointers may be stale and all graphs are dropped. Returns the key's number, from 0 on.
  size_t run(const PassKey& key, int64_t generation, cudaStream_t stream,
             const std::function<void(size_t number)>& enqueue);

 private:
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
  };
  using Graph = std::unique_ptr<CUgraphExec_st, Destroy>;
  struct Entry {
    PassKey key;
    Graph graph;  // null until captured
  };

  std::vector<Entry> entries_;
  int64_t generation_ = 0;
};

}  // namespace replayssm
