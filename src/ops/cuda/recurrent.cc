#include "ops/cuda/recurrent.h"

#include "core/check.h"
#include "ops/cuda/general_step.h"
#include "ops/cuda/step_instances.h"
#include "ops/cuda/step_launch.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

// Whether rows start where the step kernel can read them.
bool is_aligned(const RecurrentStepParams& p) {
  const int64_t act = dtype_bytes(p.state.activation_dtype);
  return rows_aligned(p.v, p.v_stride * act) && rows_aligned(p.k, p.k_stride * act) &&
         rows_aligned(p.q, p.q_stride * act) && rows_aligned(p.gate, p.gate_stride * act) &&
         rows_aligned(p.state.checkpoint) && rows_aligned(p.state.read_copy.data) &&
         rows_aligned(p.state.read_copy.scale) && rows_aligned(p.state.ring_v) &&
         rows_aligned(p.state.ring_k) && rows_aligned(p.state.ring_gate) &&
         rows_aligned(p.channel_gate.bias);
}

bool reads_copy(const RecurrentState& state) {
  if (state.read_copy.data == nullptr) return true;
  return dtype_bytes(state.read_copy.dtype) == 1 && dtype_bytes(state.activation_dtype) == 2;
}

// Most blocks of a grid that all run at once.
constexpr int64_t kEarlyBlocks = 512;

void check_step(const RecurrentStepParams& p) {
  const auto& s = p.shape;
  REPLAYSSM_CHECK(s.heads > 0 && s.key_heads > 0 && s.heads % s.key_heads == 0, "heads=", s.heads,
                  " key_heads=", s.key_heads);
  REPLAYSSM_CHECK(s.head_dim > 0 && s.head_dim % kPassRows == 0, "head_dim=", s.head_dim);
  REPLAYSSM_CHECK(s.state_dim == 128, "state_dim=", s.state_dim);
  REPLAYSSM_CHECK(is_aligned(p), "rows must start at multiples of 16 bytes: v_stride=", p.v_stride,
                  " k_stride=", p.k_stride, " q_stride=", p.q_stride,
                  " gate_stride=", p.gate_stride);
  REPLAYSSM_CHECK(p.batch.ring.max_window >= 1 && p.batch.ring.max_window <= kMaxWindow,
                  "max_window=", p.batch.ring.max_window, ", at most ", kMaxWindow);
  REPLAYSSM_CHECK(p.state.checkpoint && p.state.ring_v && p.state.ring_k && p.state.ring_b,
                  "a state without memory");
  const bool kda = s.family == Family::kKimiDelta;
  REPLAYSSM_CHECK(kda ? p.state.ring_gate && p.channel_gate.scale && p.channel_gate.bias
                      : p.state.ring_g != nullptr,
                  "a state without gates");
  REPLAYSSM_CHECK(rows_aligned(p.batch.plan), "a plan must start at a multiple of 16 bytes");
  REPLAYSSM_CHECK(p.batch.sequences < 65536, "sequences=", p.batch.sequences);
}

// Calls fn<T>() with a type as a constant.
template <class Fn>
void dispatch_float(DType dtype, const char* what, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn.template operator()<DType::kFloat32>();
    case DType::kFloat16: return fn.template operator()<DType::kFloat16>();
    case DType::kBFloat16: return fn.template operator()<DType::kBFloat16>();
    default: fail("recurrent_step: ", what, " in ", dtype_name(dtype));
  }
}

template <Family kFamily>
void launch_family(const RecurrentStepParams& p, const StepLaunch& launch, StepPart part, dim3 grid,
                   cudaStream_t stream) {
  dispatch_float(p.state.activation_dtype, "activations", [&]<DType kActivation>() {
    dispatch_float(p.state.checkpoint_dtype, "a checkpoint", [&]<DType kCheckpoint>() {
      if (p.batch.ring.max_window > 1) {
        launch_step<kFamily, kActivation, kCheckpoint, true>(p, launch, part, grid, stream);
      } else {
        launch_step<kFamily, kActivation, kCheckpoint, false>(p, launch, part, grid, stream);
      }
    });
  });
}

// Whether the launch that `config` asks for can prepare the step.
bool prepares(const RecurrentStepParams& p, const LaunchConfig& config, const StepLaunch& launch) {
  const bool many = p.batch.ring.max_window > 1, mamba = p.shape.family == Family::kMamba2;
  return config.preparing > 0 && can_prepare(p.shape.family, p.state.activation_dtype, many) &&
         p.route == Route::kOutputOnly && !launch.fold_all && !launch.conv.x &&
         p.batch.ring.buffer_len <= kMostPreparedRows &&
         (mamba ? config.heads <= 4 * config.preparing : p.shape.head_dim == p.shape.state_dim);
}

// Whether the step can run ahead.
bool runs_ahead(const RecurrentStepParams& p) {
  return p.route != Route::kConventional && !p.batch.parent &&
         can_run_ahead(p.shape.family, p.state.activation_dtype, p.state.checkpoint_dtype,
                       p.state.read_copy.data, p.batch.ring.max_window > 1);
}

void launch_part(const RecurrentStepParams& p, const StepLaunch& launch, StepPart part, dim3 grid,
                 cudaStream_t stream) {
  switch (p.shape.family) {
    case Family::kMamba2: return launch_family<Family::kMamba2>(p, launch, part, grid, stream);
    case Family::kGatedDelta:
      return launch_family<Family::kGatedDelta>(p, launch, part, grid, stream);
    case Family::kKimiDelta:
      return launch_family<Family::kKimiDelta>(p, launch, part, grid, stream);
  }
}

}  // namespace

std::optional<LaunchConfig> step_kernel_config(const RecurrentStepParams& p, const Device& device,
                                               bool has_room) {
  if (p.shape.state_dim != 128 || p.shape.head_dim % kPassRows != 0 || !is_aligned(p)) return {};
  if (p.batch.ring.max_window > kMaxWindow || !reads_copy(p.state)) return {};
  if (p.rounding.seed && p.state.checkpoint_dtype != DType::kFloat32) return {};
  StepDescription step = describe(p);
  step.has_room = has_room;
  const LaunchConfig config = choose_launch(step, device);
  if (step_layout(step.shape, step.ring, step.types, config).total > device.shared_bytes_per_block)
    return {};
  return config;
}

int64_t recurrent_workspace_bytes(const RecurrentStepParams& p, const LaunchConfig& config) {
  if (!prepares(p, config, {})) return 0;
  const StepDescription step = describe(p);
  return p.batch.sequences * (p.shape.heads / config.heads) *
         step_layout(step.shape, step.ring, step.types, config).handed_bytes;
}

int64_t recurrent_workspace_bytes(const RecurrentStepParams& p, const Device& device) {
  const auto config = step_kernel_config(p, device);
  return config ? recurrent_workspace_bytes(p, *config) : 0;
}

void run_step(const RecurrentStepParams& p, void* workspace, const LaunchConfig& config,
              StepLaunch launch, cudaStream_t stream) {
  check_step(p);
  const auto& s = p.shape;
  REPLAYSSM_CHECK(cuts(s, config), to_string(config), " does not cut ", s.heads, " heads of ",
                  s.head_dim, " rows");
  if (p.batch.sequences == 0) return;
  launch.config = config;
  launch.layout = step_layout(s, p.batch.ring, describe(p).types, config);
  launch.heads = static_cast<int>(s.heads);
  launch.key_heads = static_cast<int>(s.key_heads);
  launch.head_dim = static_cast<int>(s.head_dim);
  launch.slice_rows = launch.head_dim / config.slices;
  launch.head_passes = launch.slice_rows / kPassRows;
  launch.passes = FastDivide(launch.head_passes);
  launch.group = FastDivide(static_cast<uint32_t>(s.heads / s.key_heads));
  launch.ring_rows = FastDivide(launch.layout.rows);
  if (launch.conv.x) {
    launch.conv_units = (launch.layout.columns + 2 * static_cast<int>(s.state_dim)) / kConvUnit;
  }
  const dim3 grid(static_cast<unsigned>(s.heads / config.heads * config.fold_blocks),
                  static_cast<unsigned>(p.batch.sequences), static_cast<unsigned>(config.slices));
  launch.ahead = config.ahead && !launch.fold_all && runs_ahead(p);
  launch.early = int64_t{grid.x} * grid.y * grid.z <= kEarlyBlocks;
  if (workspace && prepares(p, config, launch)) {
    launch.handed = static_cast<char*>(workspace);
    launch_part(p, launch, StepPart::kPreparation, grid, stream);
  }
  launch_part(p, launch, StepPart::kStep, grid, stream);
}

void recurrent_step(const RecurrentStepParams& params, void* workspace, const LaunchConfig& config,
                    cudaStream_t stream) {
  run_step(params, workspace, config, {}, stream);
}

void recurrent_step(const RecurrentStepParams& params, void* workspace, const Device& device,
                    cudaStream_t stream) {
  const auto config = step_kernel_config(params, device);
  if (!config) return general_step(params, false, nullptr, stream);
  run_step(params, workspace, *config, {}, stream);
}

void recurrent_fold(const RecurrentFoldParams& params, const Device& device, cudaStream_t stream) {
  RecurrentStepParams step;
  step.shape = params.shape;
  step.batch = params.batch;
  step.batch.plan = nullptr;
  step.state = params.state;
  step.channel_gate = params.channel_gate;
  step.rounding = params.rounding;
  const auto config = step_kernel_config(step, device);
  if (!config) return general_step(step, true, params.target_slot, stream);
  StepLaunch launch;
  launch.fold_all = true;
  launch.target_slot = params.target_slot;
  run_step(step, nullptr, *config, launch, stream);
}

}  // namespace replayssm::cuda
