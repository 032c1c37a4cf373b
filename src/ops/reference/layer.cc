#include "ops/reference/layer.h"

#include "ops/reference/conv.h"
#include "ops/reference/gates.h"

namespace replayssm::reference {
LayerSequence::LayerSequence(const Layer& layer)
    : layer_(layer),
      committed_(layer.channels),
      heads_(layer.heads, Sequence(layer.family, layer.head_dim, layer.state_dim)) {}

std::vector<Values> LayerSequence::convolve(std::span<const LayerToken> window,
                                            std::span<const int32_t> parent) const {
  const auto taps = static_cast<int64_t>(layer_.conv_weight.size()) / layer_.channels;
  std::vector<Values> y(window.size(), Values(layer_.channels));
  for (int64_t c = 0; c < layer_.channels; ++c) {
    Values weight, x;
    for (int64_t j = 0; j < taps; ++j)
      weight.push_back(layer_.conv_weight[j * layer_.channels + c]);
    for (const LayerToken& token : window) x.push_back(layer_.round(token.x[c]));
    const double bias = layer_.conv_bias.empty() ? 0 : layer_.conv_bias[c];
    for (size_t i = 0; i < window.size(); ++i)
      y[i][c] = layer_.round(
          causal_conv(weight, bias, committed_[c], x, parent, static_cast<int64_t>(i)));
  }
  return y;
}

Token LayerSequence::head_token(const LayerToken& token, const Values& convolved,
                                int64_t head) const {
  const Layer& l = layer_;
  const int64_t key_head = head / (l.heads / l.key_heads);
  const auto part = [&](int64_t first, int64_t index, int64_t count) {
    const auto begin = convolved.begin() + first + index * count;
    return Values(begin, begin + count);
  };
  Token t{.v = part(l.v, head, l.head_dim),
          .k = part(l.k, key_head, l.state_dim),
          .q = part(l.q, key_head, l.state_dim),
          .g = {}};
  if (l.family == Family::kKimiDelta) {
    t.b = sigmoid(token.strength[head]);
    for (int64_t c = 0; c < l.state_dim; ++c) {
      const int64_t at = head * l.state_dim + c;
      t.g.push_back(channel_log_decay(token.gate[at], l.channel_scale[head], l.channel_bias[at],
                                      l.lower_bound));
    }
    return t;
  }
  const Gate gate =
      l.family == Family::kMamba2
          ? mamba2_gate(token.strength[head], l.gate_bias[head], l.a[head], l.min, l.max)
          : delta_gate(token.strength[head], token.decay[head], l.gate_bias[head], l.a[head]);
  t.b = gate.b;
  t.g = {gate.g};
  return t;
}

std::vector<Values> LayerSequence::outputs(std::span<const LayerToken> window,
                                           std::span<const int32_t> parent) const {
  const auto convolved = convolve(window, parent);
  std::vector<Values> all(window.size());
  for (int64_t h = 0; h < layer_.heads; ++h) {
    std::vector<Token> tokens;
    tokens.reserve(window.size());
    for (size_t i = 0; i < window.size(); ++i)
      tokens.push_back(head_token(window[i], convolved[i], h));
    const auto o = heads_[h].outputs(tokens, parent);
    const double skip = layer_.skip.empty() ? 0 : layer_.skip[h];
    for (size_t i = 0; i < window.size(); ++i) {
      const auto finished = finish_output(o[i], skip, tokens[i].v, {});
      all[i].insert(all[i].end(), finished.begin(), finished.end());
    }
  }
  for (size_t i = 0; i < window.size(); ++i)
    all[i] = gated_rms_norm(layer_.norm, all[i], window[i].z, layer_.norm_weight);
  return all;
}

void LayerSequence::commit(const LayerToken& token) {
  const std::vector<int32_t> alone = chain(1);
  const auto convolved = convolve({&token, 1}, alone);
  for (int64_t h = 0; h < layer_.heads; ++h) heads_[h].commit(head_token(token, convolved[0], h));
  for (int64_t c = 0; c < layer_.channels; ++c) committed_[c].push_back(layer_.round(token.x[c]));
}

}  // namespace replayssm::reference
