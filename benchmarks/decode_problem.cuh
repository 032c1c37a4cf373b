// The decode steps that the device benchmarks time: layers of one op over one batch, in the middle
// of long sequences.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "device_benchmark.cuh"
#include "ops/cuda/cursors.h"
#include "ops/cuda/layer.h"
#include "ops/cuda/recurrent.h"
#include "replay/bytes.h"
#include "replay/cursor.h"

namespace replayssm {

struct Op {
  const char* name;
  RecurrentShape shape;
  DType checkpoint;
  bool fp8_copy = false;
};

inline constexpr RecurrentShape kMamba64{Family::kMamba2, 128, 8, 64, 128};
inline constexpr RecurrentShape kMamba80{Family::kMamba2, 96, 8, 80, 128};
inline constexpr RecurrentShape kGdn{Family::kGatedDelta, 32, 16, 128, 128};
inline constexpr RecurrentShape kKda{Family::kKimiDelta, 32, 32, 128, 128};

inline const Op kOps[] = {
    {"mamba2 128x64x128 fp32", kMamba64, DType::kFloat32},
    {"mamba2 128x64x128 bf16", kMamba64, DType::kBFloat16},
    {"mamba2 128x64x128 fp32+fp8", kMamba64, DType::kFloat32, true},
    {"mamba2 96x80x128 fp32", kMamba80, DType::kFloat32},
    {"mamba2 96x80x128 bf16", kMamba80, DType::kBFloat16},
    {"gdn 32x128x128 fp32", kGdn, DType::kFloat32},
    {"gdn 32x128x128 bf16", kGdn, DType::kBFloat16},
    {"gdn 32x128x128 fp32+fp8", kGdn, DType::kFloat32, true},
    {"kda 32x128x128 fp32", kKda, DType::kFloat32},
    {"kda 32x128x128 bf16", kKda, DType::kBFloat16},
};

inline constexpr DType kAct = DType::kBFloat16;

// The recurrence alone; a whole layer from projection to gated norm in one launch or two; the same
// in a launch for each of its ops.
enum class Extent { kRecurrence, kFused, kUnfused };

struct Windows {
  int32_t tokens = 1;
  bool tree = false;
};

// Layers of one op over one batch; every step of a flush cycle has its own cursors.
class Problem {
 public:
  Problem(const Op& op, int64_t batch, const Windows& windows)
      : op_(op), batch_(batch), windows_(windows), ring_{.max_window = windows.tokens} {
    const auto& s = op.shape;
    const int64_t elements = s.heads * s.head_dim * s.state_dim;
    const int64_t least = int64_t{256} << 20;  // several times the L2
    const int64_t read = batch * elements * (op.fp8_copy ? 1 : dtype_bytes(op.checkpoint));
    layers_ = std::clamp<int64_t>(least / read, 2, 64);
    const int64_t rows = batch * ring_rows(ring_.buffer_len, ring_.max_window);
    const int64_t tokens = batch * windows.tokens;
    const bool kda = s.family == Family::kKimiDelta;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      RecurrentStepParams p;
      p.shape = s;
      p.state.checkpoint = memory_.random(batch * elements, op.checkpoint);
      p.state.checkpoint_dtype = op.checkpoint;
      p.state.activation_dtype = kAct;
      p.state.ring_v = memory_.random(rows * s.heads * s.head_dim, kAct);
      p.state.ring_k = memory_.random(rows * s.key_heads * s.state_dim, kAct);
      p.state.ring_b = memory_.random<float>(rows * s.heads, DType::kFloat32, 0.4f, 0.5f);
      p.state.ring_g = memory_.random<float>(rows * s.heads, DType::kFloat32, 0.1f, -0.11f);
      if (kda) p.state.ring_gate = memory_.random(rows * s.heads * s.state_dim, kAct);
      if (op.fp8_copy) {
        p.state.read_copy.data = memory_.random(batch * elements, DType::kFloat8E4M3);
        p.state.read_copy.scale =
            memory_.random<float>(batch * s.heads * s.head_dim, DType::kFloat32, 0.001f, 0.002f);
        p.state.read_copy.dtype = DType::kFloat8E4M3;
      }
      p.v_stride = s.heads * s.head_dim;
      p.k_stride = p.q_stride = s.key_heads * s.state_dim;
      p.v = memory_.random(tokens * p.v_stride, kAct);
      p.k = memory_.random(tokens * p.k_stride, kAct);
      p.q = memory_.random(tokens * p.q_stride, kAct);
      p.b = memory_.random<float>(tokens * s.heads, DType::kFloat32, 0.4f, 0.5f);
      p.g = memory_.random<float>(tokens * s.heads, DType::kFloat32, 0.1f, -0.11f);
      if (kda) {
        p.gate_stride = s.heads * s.state_dim;
        p.gate = memory_.random(tokens * p.gate_stride, kAct);
        p.channel_gate.scale = memory_.random<float>(s.heads, DType::kFloat32, 0.1f, -0.2f);
        p.channel_gate.bias = memory_.random<float>(s.heads * s.state_dim, DType::kFloat32);
      }
      p.o = memory_.take<void>(tokens * s.heads * s.head_dim * dtype_bytes(kAct));
      p.o_dtype = kAct;
      params_.push_back(p);
      whole_.push_back(whole_layer(p, tokens, layer > 0 ? &whole_[0] : nullptr));
    }
    std::vector<int32_t> start, slot, parent;
    for (int64_t i = 0; i <= batch; ++i) start.push_back(static_cast<int32_t>(i * windows.tokens));
    for (int64_t i = 0; i < batch; ++i) slot.push_back(static_cast<int32_t>((i * 7 + 3) % batch));
    if (batch % 7 == 0)
      for (int64_t i = 0; i < batch; ++i) slot[i] = static_cast<int32_t>(i);
    // Two branches from the root on.
    for (int64_t i = 0; i < tokens; ++i)
      parent.push_back(std::max<int32_t>(-1, static_cast<int32_t>(i % windows.tokens) - 2));
    query_start_ = memory_.upload(start);
    slot_ = memory_.upload(slot);
    if (windows.tree) parent_ = memory_.upload(parent);
    simulate();
    check(cudaDeviceSynchronize());
  }

  int64_t steps_per_graph() const { return kSteps * layers_; }
  // Of one step of one layer, the mean over the graph.
  double own_bytes(Route route) const {
    return route == Route::kConventional ? conventional_bytes_ : replay_bytes_;
  }

  // Of a layer beyond the recurrence, of one step: what the convolution keeps, z and constants.
  double layer_bytes() const {
    const LayerConv& c = whole_[0].conv;
    const double act = dtype_bytes(kAct), taps = ring_.conv_kernel;
    return double(batch_) * act *
               (double(c.channels) * (taps - 1 + windows_.tokens) +
                windows_.tokens * double(op_.shape.heads * op_.shape.head_dim)) +
           double(c.channels) * (taps + 1) * 4;
  }

  cudaGraphExec_t graph(Route route, const cuda::LaunchConfig* config, cudaStream_t stream,
                        Extent extent = Extent::kRecurrence) {
    const RecurrentStepParams first = call(route, 0, 0);
    const cuda::LaunchConfig launch =
        config ? *config : cuda::choose_launch(cuda::describe(first), cuda::current_device());
    const int64_t bytes = cuda::recurrent_workspace_bytes(first, launch);
    void* workspace = bytes > 0 ? memory_.take<void>(bytes) : nullptr;
    cudaGraph_t captured;
    cudaGraphExec_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int step = 0; step < kSteps; ++step) {
      for (size_t i = 0; i < params_.size(); ++i) {
        if (extent != Extent::kRecurrence) {
          enqueue(whole_[i], route, step, extent, stream);
          continue;
        }
        cuda::recurrent_step(call(route, step, i), workspace, launch, stream);
      }
    }
    check(cudaStreamEndCapture(stream, &captured));
    check(cudaGraphInstantiate(&graph, captured, 0));
    check(cudaGraphDestroy(captured));
    return graph;
  }
  cuda::StepDescription description() const {
    return cuda::describe(call(Route::kOutputOnly, 0, 0));
  }
  std::string chosen() const {
    return cuda::to_string(cuda::choose_launch(description(), cuda::current_device()));
  }

 private:
  static constexpr int kSteps = 16;

  RecurrentStepParams call(Route route, int step, size_t layer) const {
    RecurrentStepParams p = params_[layer];
    p.route = route;
    p.batch = batch(route, step);
    if (route == Route::kConventional) p.state.read_copy = {};
    return p;
  }
  // Layers hand their activations on in the same memory, that of the first.
  LayerStepParams whole_layer(const RecurrentStepParams& p, int64_t tokens,
                              const LayerStepParams* first) {
    const auto& s = p.shape;
    const bool mamba = s.family == Family::kMamba2;
    const int64_t values = s.heads * s.head_dim, keys = s.key_heads * s.state_dim;
    LayerStepParams l;
    l.shape = s;
    l.state = p.state;
    l.tokens = tokens;
    l.projected_dtype = kAct;
    l.conv.channels = l.conv.x_stride = values + 2 * keys;
    l.conv.v = mamba ? 0 : 2 * keys;
    l.conv.k = mamba ? values : keys;
    l.conv.q = mamba ? values + keys : 0;
    l.conv.x = first ? first->conv.x : memory_.random(tokens * l.conv.channels, kAct);
    l.conv.weight = memory_.random<float>(ring_.conv_kernel * l.conv.channels, DType::kFloat32);
    l.conv.bias = memory_.random<float>(l.conv.channels, DType::kFloat32);
    l.conv.inputs = memory_.random(
        batch_ * conv_rows(ring_.conv_kernel, ring_.max_window) * l.conv.channels, kAct);
    l.gates.strength = first ? first->gates.strength : memory_.random(tokens * s.heads, kAct);
    l.gates.decay = first ? first->gates.decay : memory_.random(tokens * s.heads, kAct);
    l.gates.stride = s.heads;
    l.gates.bias = memory_.random<float>(s.heads, DType::kFloat32);
    l.gates.a = memory_.random<float>(s.heads, DType::kFloat32, 0.1f, -0.2f);
    l.gates.max = 1;
    l.gate = p.gate;
    l.gate_stride = p.gate_stride;
    l.channel_gate = p.channel_gate;
    if (mamba) l.skip = memory_.random<float>(s.heads, DType::kFloat32);
    l.norm.z = first ? first->norm.z : memory_.random(tokens * values, kAct);
    l.norm.z_stride = values;
    l.norm.weight = memory_.random<float>(values, DType::kFloat32);
    l.norm.group_dim = mamba ? values / s.key_heads : s.head_dim;
    l.norm.weight_per_group = !mamba;
    l.norm.gate_first = mamba;
    l.norm.eps = 1e-5f;
    l.y = first ? first->y : memory_.take<void>(tokens * values * dtype_bytes(kAct));
    l.y_dtype = kAct;
    if (!workspace_) workspace_ = memory_.take<void>(cuda::layer_workspace_bytes(l));
    return l;
  }
  void enqueue(LayerStepParams p, Route route, int step, Extent extent, cudaStream_t stream) const {
    p.route = route;
    p.batch = batch(route, step);
    if (route == Route::kConventional) p.state.read_copy = {};
    if (extent == Extent::kFused) {
      cuda::layer_step(p, workspace_, cuda::current_device(), stream);
    } else {
      cuda::layer_step_unfused(p, workspace_, cuda::current_device(), stream);
    }
  }

  SequenceBatch batch(Route route, int step) const {
    const bool conventional = route == Route::kConventional;
    return {batch_,
            query_start_,
            slot_,
            conventional ? no_history_ : cursors_[step],
            ring_,
            conventional ? nullptr : parent_,
            conventional ? no_history_plan_ : plans_[step]};
  }

  // Cursors as they are in the middle of long sequences that began at different times.
  void simulate() {
    std::mt19937 random(1);
    std::vector<Cursor> cursors(batch_), conventional(batch_);
    for (int64_t i = 0; i < batch_; ++i) {
      cursors[i] =
          conventional[i] = {.ring_start = 3 + 16 * (i % 5), .ring_limit = ring_.buffer_len};
      cursors[i].ring_count = static_cast<int32_t>(1 + i % ring_.buffer_len);
    }
    no_history_ = memory_.upload(conventional);
    no_history_plan_ = begin(no_history_);
    const int warm_up = windows_.tokens == 1 ? 0 : 64;
    for (int step = -warm_up; step < kSteps; ++step) {
      if (step >= 0) {
        cursors_.push_back(memory_.upload(cursors));
        plans_.push_back(begin(cursors_.back()));
      }
      for (Cursor& c : cursors) {
        begin_step(c, windows_.tokens, ring_);
        if (step >= 0) replay_bytes_ += step_bytes(c) / kSteps;
      }
      for (Cursor& c : cursors) commit_step(c, 1 + random() % windows_.tokens, Route::kOutputOnly);
    }
    conventional_bytes_ =
        static_cast<double>(batch_) * (2 * checkpoint_bytes(op_.shape, op_.checkpoint) + in_out());
  }
  // Begins a step; returns its plan.
  SequencePlan* begin(Cursor* cursors) {
    auto* plan = memory_.take<SequencePlan>(batch_ * int64_t{sizeof(SequencePlan)});
    cuda::begin_steps({batch_, query_start_, slot_, cursors, ring_, nullptr, plan}, cursors,
                      nullptr);
    return plan;
  }
  double in_out() const {
    return windows_.tokens *
           double(token_input_bytes(op_.shape, kAct) + token_output_bytes(op_.shape, kAct));
  }
  double step_bytes(const Cursor& c) const {
    const double copy = op_.fp8_copy ? read_copy_bytes(op_.shape, DType::kFloat8E4M3) : 0;
    const double checkpoint = checkpoint_bytes(op_.shape, op_.checkpoint);
    const double state = c.fold_count > 0 ? 2 * checkpoint + copy
                         : op_.fp8_copy   ? copy
                                          : checkpoint;
    const double rows = c.fold_count + c.ring_count + windows_.tokens;
    return state + rows * ring_row_bytes(op_.shape, kAct) + in_out();
  }

  Op op_;
  int64_t batch_, layers_ = 0;
  Windows windows_;
  RingConfig ring_;
  double replay_bytes_ = 0, conventional_bytes_ = 0;
  BenchmarkMemory memory_;
  std::vector<RecurrentStepParams> params_;
  std::vector<LayerStepParams> whole_;  // the same layers
  void* workspace_ = nullptr;
  int32_t *query_start_ = nullptr, *slot_ = nullptr, *parent_ = nullptr;
  std::vector<Cursor*> cursors_;
  Cursor* no_history_ = nullptr;
  std::vector<SequencePlan*> plans_;
  SequencePlan* no_history_plan_ = nullptr;
};

}  // namespace replayssm
