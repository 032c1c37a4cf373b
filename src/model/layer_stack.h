// A whole model packed for a backend: embedding, layers, logits.
#pragma once

#include <functional>
#include <vector>

#include "model/layers.h"

namespace replayssm {

class LayerStack {
 public:
  struct Layer;

  // `progress` is called with (done, total) layers.
  LayerStack(ModelWeights weights, Context& context,
             const std::function<void(int64_t, int64_t)>& progress);
  ~LayerStack();

  int64_t weight_bytes() const;

  // Runs the pass that the context holds. logits: [arrays.logits, vocab_size] in the backend's
  // memory.
  void run(Context& context, float* logits) const;

 private:
  std::vector<Layer> layers_;
  Array<float> final_norm_;
  ProductPtr lm_head_;
  Buffer embedding_;
};

// Leaves the source's rank in the configuration.
ModelWeights read_weights(const ModelSource& source, ModelConfig& config);

// Throws where batch and states do not fit the model. `drawn`: tokens that the pass before gives.
void check_pass(const Batch& batch, const StateView& state, const ModelConfig& config,
                int64_t drawn = 0);

}  // namespace replayssm
