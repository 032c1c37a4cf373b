// A whole model packed for a backend: embedding, layers, logits.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "model/decoder_layer.h"
#include "model/draft_head.h"

namespace replayssm {

class LayerStack {
 public:
  // `progress` is called with (done, total) layers. `draft_head`: it is packed where the weights
  // have one.
  LayerStack(ModelWeights weights, Context& context, bool draft_head,
             const std::function<void(int64_t, int64_t)>& progress);

  int64_t weight_bytes() const;
  bool has_draft_head() const { return draft_head_.has_value(); }

  // Runs the pass that the context holds. logits: [arrays.logits, vocab_size] in the backend's
  // memory.
  void run(Context& context, KeepHidden keep_hidden, float* logits) const;
  // The same for a pass of the draft head.
  void run_draft(Context& context, bool recycled, float* logits) const;

 private:
  void embed(Context& context, float* out) const;

  std::vector<DecoderLayer> layers_;
  Array<float> final_norm_;
  ProductPtr lm_head_;
  Buffer embedding_;
  std::optional<DraftHead> draft_head_;
};

// Brings the accepted paths of a pass's tree windows together, in every layer; `arrays` and `path`
// and `accepted` (WindowCommit) are in the backend's memory.
void compact_windows(Context& context, const int32_t* path, const int32_t* accepted);

// The trees of a batch: per token its ancestors and their number (PassArrays).
struct WindowTrees {
  std::vector<uint64_t> ancestors;
  std::vector<int32_t> depth;

  explicit WindowTrees(const Batch& batch);
};

// Leaves the source's rank in the configuration.
ModelWeights read_weights(const ModelSource& source, ModelConfig& config);

// Throws where batch and states do not fit the model. `drawn`: tokens that the pass before gives.
void check_pass(const Batch& batch, const StateView& state, const ModelConfig& config,
                int64_t drawn = 0);

}  // namespace replayssm
