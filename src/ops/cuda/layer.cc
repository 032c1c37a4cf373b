#include "ops/cuda/layer.h"

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/conv.h"
#include "ops/cuda/gates.h"
#include "ops/cuda/norms.h"
#include "ops/cuda/recurrent.h"
#include "ops/cuda/step_launch.h"
#include "ops/layer_parts.h"

namespace replayssm::cuda {
namespace {

void form_gates(const LayerStepParams& p, const LayerWorkspace& w, cudaStream_t stream) {
  const ScalarGates& g = p.gates;
  if (p.shape.family == Family::kMamba2) {
    return mamba2_gates({.dt = g.strength,
                         .dtype = p.projected_dtype,
                         .dt_stride = g.stride,
                         .dt_bias = g.bias,
                         .a = g.a,
                         .dt_min = g.min,
                         .dt_max = g.max,
                         .tokens = p.tokens,
                         .heads = p.shape.heads,
                         .b = w.b,
                         .g = w.g},
                        stream);
  }
  delta_gates({.beta = g.strength,
               .alpha = p.shape.family == Family::kGatedDelta ? g.decay : nullptr,
               .dtype = p.projected_dtype,
               .stride = g.stride,
               .dt_bias = g.bias,
               .a = g.a,
               .tokens = p.tokens,
               .heads = p.shape.heads,
               .b = w.b,
               .g = w.g},
              stream);
}

void norm_outputs(const LayerStepParams& p, const float* o, cudaStream_t stream) {
  const OutputNorm& n = p.norm;
  gated_rms_norm({.x = o,
                  .gate = n.z,
                  .gate_stride = n.z_stride,
                  .weight = n.weight,
                  .rows = p.tokens,
                  .groups = p.shape.heads * p.shape.head_dim / n.group_dim,
                  .group_dim = n.group_dim,
                  .weight_per_group = n.weight_per_group,
                  .gate_first = n.gate_first,
                  .activation = n.activation,
                  .eps = n.eps,
                  .first_row = p.batch.query_start,
                  .end_row = p.batch.query_start + p.batch.sequences,
                  .y = p.y,
                  .gate_dtype = p.projected_dtype,
                  .y_dtype = p.y_dtype},
                 stream);
}

// A launch for each op.
void run_ops(const LayerStepParams& p, const LayerWorkspace& w, const Device& device,
             cudaStream_t stream) {
  causal_conv(conv_part(p, w), 0, stream);
  form_gates(p, w, stream);
  recurrent_step(recurrent_part(p, w), nullptr, device, stream);
  norm_outputs(p, w.o, stream);
}

}  // namespace

int64_t layer_workspace_bytes(const LayerStepParams& params) {
  return LayerWorkspace(params).bytes;
}

void layer_step(const LayerStepParams& p, void* workspace, const LaunchConfig& config,
                cudaStream_t stream) {
  check_params(p, 16);
  REPLAYSSM_CHECK(p.batch.ring.conv_kernel == kFusedTaps, "convolution of ",
                  p.batch.ring.conv_kernel, " taps in a fused step");
  const LayerWorkspace w(p, workspace);
  if (p.batch.sequences == 0 || p.tokens == 0) return;
  StepLaunch launch;
  launch.projected = p.projected_dtype;
  launch.conv = p.conv;
  launch.gates = p.gates;
  launch.conv_rows = FastDivide(
      static_cast<uint32_t>(conv_rows(p.batch.ring.conv_kernel, p.batch.ring.max_window)));
  run_step(recurrent_part(p, w), nullptr, config, launch, stream);
  norm_outputs(p, w.o, stream);
}

void layer_step(const LayerStepParams& p, void* workspace, const Device& device,
                cudaStream_t stream) {
  check_params(p, 16);
  const auto config = step_kernel_config(recurrent_part(p, LayerWorkspace(p, workspace)), device,
                                         /*has_room=*/false);
  if (!config || p.batch.ring.conv_kernel != kFusedTaps)
    return layer_step_unfused(p, workspace, device, stream);
  layer_step(p, workspace, *config, stream);
}

void layer_step_unfused(const LayerStepParams& p, void* workspace, const Device& device,
                        cudaStream_t stream) {
  check_params(p, 16);
  if (p.batch.sequences == 0 || p.tokens == 0) return;
  run_ops(p, LayerWorkspace(p, workspace), device, stream);
}

}  // namespace replayssm::cuda
