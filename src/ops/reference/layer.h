// A layer from what its projection gives to what its output projection takes, in double: the
// definition of layer_step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/reference/dense.h"
#include "ops/reference/sequence.h"
#include "replayssm/types.h"

namespace replayssm::reference {

// What does not change from token to token. HV value heads of V rows, H key heads, state dim K.
struct Layer {
  Family family = Family::kMamba2;
  int64_t heads = 0, key_heads = 0, head_dim = 0, state_dim = 0;
  int64_t channels = 0, v = 0, k = 0, q = 0;  // of the convolution; the first of each
  Values conv_weight, conv_bias;              // [taps, channels], [channels] or empty
  Values gate_bias, a;                        // [HV]
  double min = 0, max = 0;
  Values channel_scale, channel_bias;  // [HV], [HV, K]
  double lower_bound = 0;
  Values skip;  // [HV] or empty
  GatedNorm norm;
  Values norm_weight;
  // What goes into the convolution and what comes out of it is rounded to the activation type.
  double (*round)(double) = nullptr;
};

struct LayerToken {
  Values x;                // [channels]
  Values strength, decay;  // [HV]
  Values gate;             // [HV, K], Kimi Delta
  Values z;                // [HV, V]
};

// What a slot means: the committed tokens of a sequence.
class LayerSequence {
 public:
  explicit LayerSequence(const Layer& layer);

  // [tokens] of [HV, V]: each behind the committed tokens and its ancestors.
  std::vector<Values> outputs(std::span<const LayerToken> window,
                              std::span<const int32_t> parent) const;
  void commit(const LayerToken& token);

 private:
  // The convolution's outputs, [tokens] of [channels].
  std::vector<Values> convolve(std::span<const LayerToken> window,
                               std::span<const int32_t> parent) const;
  Token head_token(const LayerToken& token, const Values& convolved, int64_t head) const;

  const Layer& layer_;
  std::vector<Values> committed_;  // [channels] of [tokens]
  std::vector<Sequence> heads_;
};

}  // namespace replayssm::reference
