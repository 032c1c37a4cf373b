// Mixtures of experts.

#include "model/layers.h"

namespace replayssm {

MoeLayer::MoeLayer(const MoeWeights& weights, Context& context)
    : correction_bias_(pack_floats(weights.correction_bias, context)) {
  const int64_t hidden = context.config.hidden_size, latent = context.config.moe.latent;
  // Expert choice is a decision, not a sum: the router stays in fp32.
  router_ = context.backend.make_product(
      {.blocks = {&weights.router}, .in_features = hidden, .dtype = DType::kFloat32});
  const int64_t width = latent > 0 ? latent : hidden;
  experts_ = context.backend.make_experts(weights.experts, width, mlp_gate_of(context.config));
  if (weights.shared.up) shared_ = MlpLayer(weights.shared, hidden, context);
  if (weights.shared_gate) shared_gate_ = pack_product({&weights.shared_gate}, hidden, context);
  if (latent > 0) {
    latent_in_ = pack_product({&weights.latent_in}, hidden, context);
    latent_out_ = pack_product({&weights.latent_out}, latent, context);
  }
}

int64_t MoeLayer::weight_bytes() const {
  return weight_bytes_of(router_, shared_gate_, latent_in_, latent_out_, experts_) +
         shared_.weight_bytes();
}

void MoeLayer::choose(const float* normed_wide, Context& context) const {
  const MoeConfig& c = context.config.moe;
  const int64_t tokens = context.tokens();
  float* logits = context.router_logits.get(tokens * c.experts);
  project(*router_, normed_wide, tokens, logits, context);
  const StageTimer timer(context, Stage::kOther);
  context.backend.route_experts(
      {.logits = logits,
       .correction_bias = correction_bias_.size() ? correction_bias_.data() : nullptr,
       .rows = tokens,
       .experts = c.experts,
       .top_k = c.top_k,
       .groups = c.groups,
       .top_groups = c.top_groups,
       .sigmoid = c.sigmoid_scores,
       .renormalize = c.renormalize,
       .scale = c.scale,
       .expert = context.expert.get(tokens * c.top_k),
       .weight = context.expert_weight.get(tokens * c.top_k)});
}

void MoeLayer::run_experts(const void* x, int64_t width, float* y, Context& context) const {
  context.backend.mix_experts({.experts = experts_.get(),
                               .x = x,
                               .tokens = context.tokens(),
                               .width = width,
                               .top_k = context.config.moe.top_k,
                               .expert = context.expert.get(0),
                               .weight = context.expert_weight.get(0),
                               .y = y});
}

void MoeLayer::forward(const void* normed, const float* normed_wide, float* delta,
                       Context& context) const {
  const MoeConfig& c = context.config.moe;
  const int64_t tokens = context.tokens(), hidden = context.config.hidden_size;
  choose(normed_wide, context);
  if (c.latent > 0) {
    float* latent = context.latent.get(tokens * c.latent);
    std::byte* rounded = context.latent_in.get(tokens * c.latent * context.element_bytes());
    project(*latent_in_, normed, tokens, latent, context);
    context.backend.round_rows(latent, c.latent, tokens, c.latent, rounded);
    run_experts(rounded, c.latent, latent, context);
    context.backend.round_rows(latent, c.latent, tokens, c.latent, rounded);
    project(*latent_out_, rounded, tokens, delta, context);
  } else {
    run_experts(normed, hidden, delta, context);
  }
  if (!shared_.present()) return;
  float* shared = context.shared.get(tokens * hidden);
  shared_.forward(normed, tokens, shared, false, context);
  float* gate = nullptr;
  if (shared_gate_) {
    gate = context.router_logits.get(tokens);
    project(*shared_gate_, normed, tokens, gate, context);
  }
  const StageTimer timer(context, Stage::kOther);
  context.backend.add_gated(shared, gate, tokens, hidden, delta);
}

}  // namespace replayssm
