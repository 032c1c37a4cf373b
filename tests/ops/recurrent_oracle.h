// The reference in double beside the CPU's recurrence: all value heads of a layer.
#pragma once

#include <span>
#include <vector>

#include "ops/recurrent_inputs.h"
#include "ops/reference/gates.h"
#include "ops/reference/recurrent.h"
#include "ops/reference/sequence.h"

namespace replayssm::testing {

// One token of one head as the reference takes it.
inline reference::Token token_of(const Case& c, const Inputs& in, int64_t t, int64_t head) {
  const auto& s = c.shape;
  const int64_t key_head = head / (s.heads / s.key_heads);
  const auto slice = [](const std::vector<float>& x, int64_t index, int64_t count) {
    return std::vector<double>(x.begin() + index * count, x.begin() + (index + 1) * count);
  };
  reference::Token token{.v = slice(in.v, t * s.heads + head, s.head_dim),
                         .k = slice(in.k, t * s.key_heads + key_head, s.state_dim),
                         .q = slice(in.q, t * s.key_heads + key_head, s.state_dim),
                         .g = {in.g[t * s.heads + head]},
                         .b = in.b[t * s.heads + head]};
  if (c.kimi()) {
    token.g = slice(in.gate, t * s.heads + head, s.state_dim);
    for (int64_t k = 0; k < s.state_dim; ++k)
      token.g[k] = reference::channel_log_decay(token.g[k], channel_scale(head),
                                                channel_bias(head, k), c.lower_bound);
  }
  return token;
}

// skip and z on one head's output.
inline std::vector<double> finished(const Case& c, const Inputs& in, int64_t t, int64_t head,
                                    std::vector<double> o) {
  if (!c.finish) return o;
  const auto& s = c.shape;
  const auto slice = [&](const std::vector<float>& x) {
    const auto* row = x.data() + (t * s.heads + head) * s.head_dim;
    return std::vector<double>(row, row + s.head_dim);
  };
  return reference::finish_output(o, skip_of(head), slice(in.v), slice(in.z));
}

// A sequence of all value heads.
class Oracle {
 public:
  explicit Oracle(const Case& c)
      : case_(c),
        heads_(c.shape.heads,
               reference::Sequence(c.shape.family, c.shape.head_dim, c.shape.state_dim)) {}

  // Of the window [begin, end) of the inputs: [tokens, HV, V]. No parents: a chain.
  std::vector<double> outputs(const Inputs& in, int64_t begin, int64_t end,
                              std::span<const int32_t> parent = {}) const {
    const auto& s = case_.shape;
    const auto line = reference::chain(end - begin);
    std::vector<double> all((end - begin) * s.heads * s.head_dim);
    for (int64_t h = 0; h < s.heads; ++h) {
      std::vector<reference::Token> window;
      for (int64_t t = begin; t < end; ++t) window.push_back(token_of(case_, in, t, h));
      const auto outputs = heads_[h].outputs(window, parent.empty() ? line : parent);
      for (int64_t t = begin; t < end; ++t) {
        const auto o = finished(case_, in, t, h, outputs[t - begin]);
        std::ranges::copy(o, all.begin() + ((t - begin) * s.heads + h) * s.head_dim);
      }
    }
    return all;
  }
  void commit(const Inputs& in, int64_t t) {
    for (size_t h = 0; h < heads_.size(); ++h) heads_[h].commit(token_of(case_, in, t, h));
  }
  // [HV, V, K]
  std::vector<double> state() {
    std::vector<double> all;
    for (auto& head : heads_) all.insert(all.end(), head.state().begin(), head.state().end());
    return all;
  }

 private:
  Case case_;
  std::vector<reference::Sequence> heads_;
};

// Outputs [tokens, HV, V] and final state [HV, V, K] of a whole sequence.
struct Expected {
  std::vector<double> o, state;
};
inline Expected expected(const Case& c, const Inputs& in, int64_t tokens) {
  Oracle oracle(c);
  Expected e;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto o = oracle.outputs(in, t, t + 1);
    e.o.insert(e.o.end(), o.begin(), o.end());
    oracle.commit(in, t);
  }
  e.state = oracle.state();
  return e;
}

}  // namespace replayssm::testing
