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
          .parent = arrays.parent,
          .plan = arrays.plan};
}

// The layer's convolution over the projection's rows: v, k and q side by side from `x` on.
LayerConv conv_of(const float* x, int64_t stride, const Array<float>& weight,
                  const Array<float>& bias) {
  LayerConv conv;
  conv.x = x;
  conv.x_stride = stride;
  conv.weight = weight.data();
  conv.bias = bias.size() ? bias.data() : nullptr;
  return conv;
}

const std::byte* convolve(const LayerStepParams& layer, Context& context) {
  const StageTimer timer(context, Stage::kConv);
  ConvParams p;
  p.batch = layer.batch;
  p.channels = layer.conv.channels;
  p.activation_dtype = context.dtype();
  p.x = layer.conv.x;
  p.x_stride = layer.conv.x_stride;
  p.weight = layer.conv.weight;
  p.bias = layer.conv.bias;
  p.inputs = layer.conv.inputs;
  std::byte* y = context.conv_out.get(context.tokens() * p.channels * context.element_bytes());
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

// The windows of decoding sequences: through the ring, or, the baseline, a snapshot per token.
void step(int64_t index, const RecurrentStepParams& p, Context& context) {
  if (context.state->snapshots.empty()) return context.backend.recurrent_step(p);
  SnapshotStepParams params;
  static_cast<RecurrentStepParams&>(params) = p;
  params.snapshots = context.state->snapshots[index];
  params.source = context.arrays.source;
  context.backend.snapshot_step(params);
}

void form_gates(const LayerStepParams& layer, Context& context) {
  const StageTimer timer(context, Stage::kSsm);
  const ScalarGates& gates = layer.gates;
  const int64_t heads = layer.shape.heads, count = context.tokens() * heads;
  const auto* strength = static_cast<const float*>(gates.strength);
  if (layer.shape.family == Family::kMamba2) {
    return context.backend.mamba2_gates({.dt = strength,
                                         .dt_stride = gates.stride,
                                         .dt_bias = gates.bias,
                                         .a = gates.a,
                                         .dt_min = gates.min,
                                         .dt_max = gates.max,
                                         .tokens = context.tokens(),
                                         .heads = heads,
                                         .b = context.b.get(count),
                                         .g = context.g.get(count)});
  }
  context.backend.delta_gates({.beta = strength,
                               .alpha = static_cast<const float*>(gates.decay),
                               .stride = gates.stride,
                               .dt_bias = gates.bias,
                               .a = gates.a,
                               .tokens = context.tokens(),
                               .heads = heads,
                               .b = context.b.get(count),
                               .g = gates.decay ? context.g.get(count) : nullptr});
}

// Runs the decoding sequences of the batch through the ring and the prefilling ones in chunks.
const float* recur(int64_t index, const LayerStepParams& layer, const std::byte* conv_out,
                   Context& context) {
  const StageTimer timer(context, Stage::kSsm);
  RecurrentPrefillParams p;
  p.shape = layer.shape;
  p.route = layer.route;
  p.state = layer.state;
  p.rounding = layer.rounding;
  const int64_t bytes = context.element_bytes();
  p.v = conv_out + layer.conv.v * bytes;
  p.k = conv_out + layer.conv.k * bytes;
  p.q = conv_out + layer.conv.q * bytes;
  p.v_stride = p.k_stride = p.q_stride = layer.conv.channels;
  p.b = context.b.get(0);
  p.g = context.g.get(0);
  p.gate = layer.gate;
  p.gate_stride = layer.gate_stride;
  p.channel_gate = layer.channel_gate;
  p.skip = layer.skip;
  float* o = context.mixed.get(context.tokens() * p.shape.heads * p.shape.head_dim);
  p.o = o;

  const SequenceBatch& all = layer.batch;
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

void norm_outputs(const LayerStepParams& layer, const float* o, Context& context) {
  const StageTimer timer(context, Stage::kNorm);
  const OutputNorm& norm = layer.norm;
  context.backend.gated_norm({.x = o,
                              .gate = static_cast<const float*>(norm.z),
                              .gate_stride = norm.z_stride,
                              .weight = norm.weight,
                              .rows = context.tokens(),
                              .groups = layer.shape.heads * layer.shape.head_dim / norm.group_dim,
                              .group_dim = norm.group_dim,
                              .weight_per_group = norm.weight_per_group,
                              .gate_first = norm.gate_first,
                              .activation = norm.activation,
                              .eps = norm.eps,
                              .y = layer.y,
                              .dtype = context.dtype()});
}

// Everything between a layer's projections. `layer` comes with what is its own; returns what the
// output projection takes. `index` counts the recurrent layers.
const void* run_layer(int64_t index, LayerStepParams layer, Context& context) {
  layer.shape = recurrent_shape(context.config);
  const int64_t width = layer.shape.heads * layer.shape.head_dim;
  layer.route = context.state->route;
  layer.batch = sequence_batch(context);
  layer.state = context.state->recurrent[index];
  layer.tokens = context.tokens();
  layer.conv.inputs = context.state->conv_inputs[index];
  layer.rounding.stream = static_cast<uint32_t>(index);
  layer.norm.eps = context.config.norm_eps;
  layer.y = context.activated.get(context.tokens() * width * context.element_bytes());
  layer.y_dtype = context.dtype();
  const bool steps = context.arrays.decodes == layer.batch.sequences;
  if (steps && context.state->snapshots.empty() && context.backend.fuses(layer)) {
    const StageTimer timer(context, Stage::kSsm);
    context.backend.layer_step(layer);
    return layer.y;
  }
  const std::byte* conv_out = convolve(layer, context);
  form_gates(layer, context);
  norm_outputs(layer, recur(index, layer, conv_out, context), context);
  return layer.y;
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
  LayerStepParams layer;
  layer.conv = conv_of(z_xbc_dt + inner, rows, conv_weight_, conv_bias_);
  layer.conv.channels = channels;
  layer.conv.k = inner;
  layer.conv.q = inner + c.groups * c.state_dim;
  layer.gates = {.strength = z_xbc_dt + inner + channels,
                 .stride = rows,
                 .bias = dt_bias_.data(),
                 .a = a_.data(),
                 .min = c.dt_min,
                 .max = c.dt_max};
  layer.skip = d_.data();
  layer.norm = {.z = z_xbc_dt,
                .z_stride = rows,
                .weight = norm_.size() ? norm_.data() : nullptr,
                .group_dim = inner / groups,
                .gate_first = c.gate_first};
  project_last(*out_proj_, run_layer(index, layer, context), tokens, delta, context);
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
  LayerStepParams layer;
  layer.conv = conv_of(qkv_z_beta_alpha, rows, conv_weight_, {});
  layer.conv.channels = channels;
  layer.conv.v = 2 * keys;
  layer.conv.k = keys;
  layer.gates = {.strength = z + inner,
                 .decay = z + inner + c.value_heads,
                 .stride = rows,
                 .bias = dt_bias_.data(),
                 .a = a_.data()};
  layer.norm = {.z = z,
                .z_stride = rows,
                .weight = norm_.data(),
                .group_dim = c.value_dim,
                .weight_per_group = true,
                .activation = activation_of(c.output_gate)};
  project_last(*out_proj_, run_layer(index, layer, context), tokens, delta, context);
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
  const float* beta = projected + 3 * inner;
  const float* decay = raise(*decay_up_, beta + c.heads, rows, context);
  std::byte* gates = context.rounded.get(tokens * inner * context.element_bytes());
  context.backend.round_rows(decay, inner, tokens, inner, gates);
  LayerStepParams layer;
  layer.conv = conv_of(projected, rows, conv_weight_, {});
  layer.conv.channels = 3 * inner;
  layer.conv.v = 2 * inner;
  layer.conv.k = inner;
  layer.gates = {.strength = beta, .stride = rows};
  layer.gate = gates;
  layer.gate_stride = inner;
  layer.channel_gate = {
      .scale = a_.data(), .bias = dt_bias_.data(), .lower_bound = c.gate_lower_bound};
  layer.norm = {.z = raise(*gate_up_, beta + c.heads + c.head_dim, rows, context),
                .z_stride = inner,
                .weight = norm_.data(),
                .group_dim = c.head_dim,
                .weight_per_group = true,
                .activation = activation_of(c.output_gate)};
  project_last(*out_proj_, run_layer(index, layer, context), tokens, delta, context);
}

}  // namespace replayssm
