// A model's own drafter: a block that predicts the token behind the next one (multi-token
// prediction).
//
//   u = fc [norm(embedding of the next token) | norm(hidden state)],  u' = layers(u),
//   m = norm(u'),  logits = lm_head(m)
//
// Drafts behind the first one take m in place of the hidden state.
#pragma once

#include <vector>

#include "model/decoder_layer.h"

namespace replayssm {

class DraftHead {
 public:
  DraftHead(const MtpWeights& weights, Context& context);

  int64_t weight_bytes() const;

  // The pass that the context holds. embedded: [tokens, hidden], overwritten. Returns m of the rows
  // whose logits are wanted, in the activation dtype; `output` takes it in fp32.
  const void* run(Context& context, float* embedded, const float* hidden, float* output) const;

 private:
  Array<float> embedding_norm_, hidden_norm_, norm_;
  ProductPtr from_embedding_, from_hidden_;  // the two halves of fc
  std::vector<DecoderLayer> layers_;
};

}  // namespace replayssm
