// The state-space layers: projection, convolution, gates, recurrence, gated norm, projection.

#include <algorithm>
#include <array>
#include <cmath>

#include "model/layers.h"

namespace replayssm {
namespace {

// Filters [channels, kernel], one below another, as [kernel, channels].
Array<float> pack_conv(std::initializer_list<const Tensor*> filters, Context& context) {
  const int64_t kernel = (*filters.begin())->shape[1];
  int64_t channels = 0, first = 0;
  for (const Tensor* filter : filters) channels += filter->shape[0];
  Array<float> packed(channels * kernel);
  for (const Tensor* filter : filters) {
    const auto values = filter->to_floats();
    for (int64_t c = 0; c < filter->shape[0]; ++c) {
      for (int64_t j = 0; j < kernel; ++j)
        packed[j * channels + first + c] = values[c * kernel + j];
    }
    first += filter->shape[0];
  }
  return placed(std::move(packed), context);
}

// The multipliers of Mamba-2's projected z | x | B | C | dt, column by column; empty where all
// are 1.
Array<float> pack_projection_scale(Context& context) {
  const Mamba2Config& c = context.config.mamba2;
  if (std::ranges::all_of(c.projection_scale, [](float scale) { return scale == 1; })) return {};
  const int64_t shared = c.groups * c.state_dim;
  const std::array<int64_t, 5> widths = {c.inner(), c.inner(), shared, shared, c.heads};
  Array<float> packed(c.inner() + c.conv_channels() + c.heads);
  float* next = packed.data();
  for (size_t i = 0; i < widths.size(); ++i) {
    next = std::fill_n(next, widths[i], c.projection_scale[i]);
  }
  return placed(std::move(packed), context);
}

// -exp(A_log)
Array<float> pack_decay(const Tensor& a_log, Context& context) {
  const auto values = a_log.to_floats();
  Array<float> a(static_cast<int64_t>(values.size()));
  std::ranges::transform(values, a.data(), [](float value) { return -std::exp(value); });
  return placed(std::move(a), context);
}

GateActivation activation_of(GateKind kind) {
  return kind == GateKind::kSilu ? GateActivation::kSilu : GateActivation::kSigmoid;
}

SequenceBatch sequence_batch(const Context& context) {
  const PassArrays& arrays = context.arrays;
  return {.sequences = arrays.sequences,
          .query_start = arrays.query_start,
          .slot = arrays.slot,
          .cursors = context.state->cursors,
          .ring = context.state->ring,
          .parent = arrays.parent};
}

// x: the convolution's inputs within the projection's rows.
const std::byte* convolve(int64_t index, const float* x, int64_t x_stride, int64_t channels,
                          const Array<float>& weight, const Array<float>& bias, Context& context) {
  const StageTimer timer(context, Stage::kConv);
  ConvParams p;
  p.batch = sequence_batch(context);
  p.channels = channels;
  p.activation_dtype = context.dtype();
  p.x = x;
  p.x_stride = x_stride;
  p.weight = weight.data();
  p.bias = bias.size() ? bias.data() : nullptr;
  p.inputs = context.state->conv_inputs[index];
  std::byte* y = context.conv_out.get(context.tokens() * channels * context.element_bytes());
  p.y = y;
  const int64_t sequences = p.batch.sequences, decodes = context.arrays.decodes;
  if (!p.batch.parent || decodes == sequences) {
    context.backend.conv(p);
    return y;
  }
  // Prompts are no trees.
  p.batch.sequences = decodes;
  context.backend.conv(p);
  p.batch.sequences = sequences - decodes;
  p.batch.query_start += decodes;
  p.batch.slot += decodes;
  p.batch.parent = nullptr;
  context.backend.conv(p);
  return y;
}

// Where v, k and q begin in the rows of the convolution's output, in elements, and how long those
// are.
struct ConvLayout {
  int64_t stride, v, k, q;
};

// The windows of decoding sequences: through the ring, or, the baseline, a snapshot per token.
void step(int64_t index, const RecurrentStepParams& p, Context& context) {
  if (context.state->snapshots.empty()) return context.backend.recurrent_step(p);
  SnapshotStepParams params;
  static_cast<RecurrentStepParams&>(params) = p;
  params.snapshots = context.state->snapshots[index];
  params.source = context.arrays.source;
  context.backend.snapshot_step(params);
}

// Runs the decoding sequences of the batch through the ring and the prefilling ones in chunks. `p`
// comes with what is the layer's own.
float* recur(int64_t index, const std::byte* conv_out, const ConvLayout& layout, Context& context,
             RecurrentPrefillParams p = {}) {
  const StageTimer timer(context, Stage::kSsm);
  p.shape = recurrent_shape(context.config);
  p.route = context.state->route;
  p.state = context.state->recurrent[index];
  p.rounding.stream = static_cast<uint32_t>(index);
  const int64_t bytes = context.element_bytes();
  p.v = conv_out + layout.v * bytes;
  p.k = conv_out + layout.k * bytes;
  p.q = conv_out + layout.q * bytes;
  p.v_stride = p.k_stride = p.q_stride = layout.stride;
  p.b = context.b.get(0);
  p.g = context.g.get(0);
  float* o = context.mixed.get(context.tokens() * p.shape.heads * p.shape.head_dim);
  p.o = o;

  const SequenceBatch all = sequence_batch(context);
  const int64_t decodes = context.arrays.decodes;
  if (decodes > 0) {
    p.batch = all;
    p.batch.sequences = decodes;
    step(index, p, context);
  }
  if (decodes < all.sequences) {
    p.batch = all;
    p.batch.parent = nullptr;
    p.batch.sequences = all.sequences - decodes;
    p.batch.query_start += decodes;
    p.batch.slot += decodes;
    context.backend.recurrent_prefill(p);
  }
  return o;
}

// The gated norm of a delta rule's outputs, head by head with one weight.
const std::byte* norm_heads(GatedNormParams p, Context& context) {
  const StageTimer timer(context, Stage::kNorm);
  std::byte* y =
      context.activated.get(context.tokens() * p.groups * p.group_dim * context.element_bytes());
  p.rows = context.tokens();
  p.weight_per_group = true;
  p.eps = context.config.norm_eps;
  p.y = y;
  p.dtype = context.dtype();
  context.backend.gated_norm(p);
  return y;
}

}  // namespace

Mamba2Layer::Mamba2Layer(const Mamba2Weights& weights, Context& context)
    : in_proj_(pack_product({&weights.in_proj}, context.config.hidden_size, context,
                            floats_of(weights.in_proj_bias))),
      out_proj_(pack_product({&weights.out_proj}, context.config.mamba2.inner(), context,
                             floats_of(weights.out_proj_bias))),
      conv_weight_(pack_conv({&weights.conv_weight}, context)),
      conv_bias_(pack_floats(weights.conv_bias, context)),
      dt_bias_(pack_floats(weights.dt_bias, context)),
      a_(pack_decay(weights.a_log, context)),
      d_(pack_floats(weights.d, context)),
      norm_(pack_floats(weights.norm, context)),
      projection_scale_(pack_projection_scale(context)) {}

void Mamba2Layer::forward(int64_t index, const void* normed, float* delta, Context& context) const {
  const Mamba2Config& c = context.config.mamba2;
  const int64_t inner = c.inner(), channels = c.conv_channels(), rows = in_proj_->out_features();
  const int64_t tokens = context.tokens(), groups = std::max<int64_t>(c.norm_groups, 1);
  float* z_xbc_dt = context.projected.get(tokens * rows);
  project(*in_proj_, normed, context.tokens(), z_xbc_dt, context);
  if (projection_scale_.size()) {
    const StageTimer timer(context, Stage::kSsm);
    context.backend.scale_columns(z_xbc_dt, projection_scale_.data(), tokens, rows);
  }
  const std::byte* xbc =
      convolve(index, z_xbc_dt + inner, rows, channels, conv_weight_, conv_bias_, context);
  {
    const StageTimer timer(context, Stage::kSsm);
    context.backend.mamba2_gates({.dt = z_xbc_dt + inner + channels,
                                  .dt_stride = rows,
                                  .dt_bias = dt_bias_.data(),
                                  .a = a_.data(),
                                  .dt_min = c.dt_min,
                                  .dt_max = c.dt_max,
                                  .tokens = tokens,
                                  .heads = c.heads,
                                  .b = context.b.get(tokens * c.heads),
                                  .g = context.g.get(tokens * c.heads)});
  }
  const int64_t c_at = inner + c.groups * c.state_dim;
  RecurrentPrefillParams own;
  own.skip = d_.data();
  const ConvLayout layout{.stride = channels, .v = 0, .k = inner, .q = c_at};
  const float* y = recur(index, xbc, layout, context, own);
  std::byte* gated = context.activated.get(tokens * inner * context.element_bytes());
  {
    const StageTimer timer(context, Stage::kNorm);
    context.backend.gated_norm({.x = y,
                                .gate = z_xbc_dt,
                                .gate_stride = rows,
                                .weight = norm_.size() ? norm_.data() : nullptr,
                                .rows = tokens,
                                .groups = groups,
                                .group_dim = inner / groups,
                                .gate_first = c.gate_first,
                                .eps = context.config.norm_eps,
                                .y = gated,
                                .dtype = context.dtype()});
  }
  project(*out_proj_, gated, context.tokens(), delta, context);
}

GatedDeltaLayer::GatedDeltaLayer(const GatedDeltaWeights& weights, Context& context)
    : in_proj_(pack_product({&weights.qkv, &weights.z, &weights.beta, &weights.alpha},
                            context.config.hidden_size, context)),
      out_proj_(pack_product({&weights.out_proj}, context.config.gated_delta.inner(), context)),
      conv_weight_(pack_conv({&weights.conv_weight}, context)),
      dt_bias_(pack_floats(weights.dt_bias, context)),
      a_(pack_decay(weights.a_log, context)),
      norm_(pack_floats(weights.norm, context)) {}

void GatedDeltaLayer::forward(int64_t index, const void* normed, float* delta,
                              Context& context) const {
  const GatedDeltaConfig& c = context.config.gated_delta;
  const int64_t inner = c.inner(), channels = c.conv_channels(), rows = in_proj_->out_features();
  const int64_t keys = c.key_heads * c.key_dim, tokens = context.tokens();
  float* qkv_z_beta_alpha = context.projected.get(tokens * rows);
  project(*in_proj_, normed, context.tokens(), qkv_z_beta_alpha, context);
  const float* z = qkv_z_beta_alpha + channels;
  const std::byte* qkv =
      convolve(index, qkv_z_beta_alpha, rows, channels, conv_weight_, {}, context);
  {
    const StageTimer timer(context, Stage::kSsm);
    context.backend.delta_gates({.beta = z + inner,
                                 .alpha = z + inner + c.value_heads,
                                 .stride = rows,
                                 .dt_bias = dt_bias_.data(),
                                 .a = a_.data(),
                                 .tokens = tokens,
                                 .heads = c.value_heads,
                                 .b = context.b.get(tokens * c.value_heads),
                                 .g = context.g.get(tokens * c.value_heads)});
  }
  const float* o =
      recur(index, qkv, {.stride = channels, .v = 2 * keys, .k = keys, .q = 0}, context);
  const std::byte* gated = norm_heads({.x = o,
                                       .gate = z,
                                       .gate_stride = rows,
                                       .weight = norm_.data(),
                                       .groups = c.value_heads,
                                       .group_dim = c.value_dim,
                                       .activation = activation_of(c.output_gate)},
                                      context);
  project(*out_proj_, gated, context.tokens(), delta, context);
}

KimiDeltaLayer::KimiDeltaLayer(const KimiDeltaWeights& weights, Context& context)
    : in_proj_(pack_product({&weights.q, &weights.k, &weights.v, &weights.beta, &weights.decay_down,
                             &weights.gate_down},
                            context.config.hidden_size, context)),
      conv_weight_(pack_conv({&weights.q_conv, &weights.k_conv, &weights.v_conv}, context)),
      dt_bias_(pack_floats(weights.dt_bias, context)),
      a_(pack_decay(weights.a_log, context)),
      norm_(pack_floats(weights.norm, context)) {
  const KimiDeltaConfig& c = context.config.kimi_delta;
  decay_up_ = pack_product({&weights.decay_up}, c.head_dim, context);
  gate_up_ = pack_product({&weights.gate_up}, c.head_dim, context);
  out_proj_ = pack_product({&weights.out_proj}, c.inner(), context);
}

int64_t KimiDeltaLayer::weight_bytes() const {
  return weight_bytes_of(in_proj_, decay_up_, gate_up_, out_proj_);
}

const float* KimiDeltaLayer::raise(const Product& up, const float* down, int64_t stride,
                                   Context& context) const {
  const int64_t tokens = context.tokens(), rank = up.in_features();
  std::byte* rounded = context.activated.get(tokens * rank * context.element_bytes());
  context.backend.round_rows(down, stride, tokens, rank, rounded);
  float* raised = context.raised.get(tokens * up.out_features());
  project(up, rounded, tokens, raised, context);
  return raised;
}

void KimiDeltaLayer::forward(int64_t index, const void* normed, float* delta,
                             Context& context) const {
  const KimiDeltaConfig& c = context.config.kimi_delta;
  const int64_t inner = c.inner(), rows = in_proj_->out_features(), tokens = context.tokens();
  float* projected = context.projected.get(tokens * rows);
  project(*in_proj_, normed, context.tokens(), projected, context);
  const std::byte* qkv = convolve(index, projected, rows, 3 * inner, conv_weight_, {}, context);
  const float* beta = projected + 3 * inner;
  {
    const StageTimer timer(context, Stage::kSsm);
    context.backend.delta_gates({.beta = beta,
                                 .stride = rows,
                                 .tokens = tokens,
                                 .heads = c.heads,
                                 .b = context.b.get(tokens * c.heads)});
  }
  const float* decay = raise(*decay_up_, beta + c.heads, rows, context);
  std::byte* gates = context.rounded.get(tokens * inner * context.element_bytes());
  context.backend.round_rows(decay, inner, tokens, inner, gates);
  RecurrentPrefillParams own;
  own.gate = gates;
  own.gate_stride = inner;
  own.channel_gate = {
      .scale = a_.data(), .bias = dt_bias_.data(), .lower_bound = c.gate_lower_bound};
  const ConvLayout layout{.stride = 3 * inner, .v = 2 * inner, .k = inner, .q = 0};
  const float* o = recur(index, qkv, layout, context, own);
  const float* z = raise(*gate_up_, beta + c.heads + c.head_dim, rows, context);
  const std::byte* gated = norm_heads({.x = o,
                                       .gate = z,
                                       .gate_stride = inner,
                                       .weight = norm_.data(),
                                       .groups = c.heads,
                                       .group_dim = c.head_dim,
                                       .activation = activation_of(c.output_gate)},
                                      context);
  project(*out_proj_, gated, context.tokens(), delta, context);
}

}  // namespace replayssm
