// Times the ops around the recurrence on a CUDA device, and speculative decoding by snapshots
// (columns and arguments: op_benchmark.cuh).

#include "op_benchmark.cuh"
#include "ops/cuda/conv.h"
#include "ops/cuda/gates.h"
#include "ops/cuda/norms.h"
#include "ops/cuda/slots.h"
#include "ops/cuda/snapshot_step.h"
#include "replay/bytes.h"

namespace replayssm {
namespace {

constexpr DType kAct = DType::kBFloat16;
constexpr int64_t kActBytes = 2;

constexpr RecurrentShape kMamba64{Family::kMamba2, 128, 8, 64, 128};
constexpr RecurrentShape kGdn{Family::kGatedDelta, 32, 16, 128, 128};
constexpr RecurrentShape kKda{Family::kKimiDelta, 32, 32, 128, 128};

// Sequences in slots of their own, `window` tokens each, in the middle of their rings.
SequenceBatch sequences(Context& c, const RingConfig& ring, int64_t window) {
  std::vector<int32_t> start, slot;
  std::vector<Cursor> cursors;
  for (int64_t i = 0; i <= c.batch; ++i) start.push_back(static_cast<int32_t>(i * window));
  for (int64_t i = 0; i < c.batch; ++i) {
    slot.push_back(static_cast<int32_t>(c.batch % 7 ? (i * 7 + 3) % c.batch : i));
    cursors.push_back({.ring_start = 3 + i % 16, .ring_count = 2, .ring_limit = 16});
  }
  return {c.batch, c.memory.upload(start), c.memory.upload(slot), c.memory.upload(cursors), ring};
}

// `branches`: windows are trees in which each token has that many children.
Op conv(const char* name, int64_t channels, int64_t window, DType x_dtype, int branches = 0) {
  return {name, [=](Context& c) {
            const RingConfig ring{.buffer_len = 16, .max_window = static_cast<int32_t>(window)};
            SequenceBatch batch = sequences(c, ring, window);
            if (branches > 0) {
              std::vector<int32_t> parent;
              for (int64_t i = 0; i < c.batch * window; ++i)
                parent.push_back(static_cast<int32_t>((i % window + branches - 1) / branches - 1));
              batch.parent = c.memory.upload(parent);
            }
            const int64_t tokens = c.batch * window, rows = c.batch * conv_rows(4, window);
            Problem problem;
            problem.bytes = double(tokens * channels * (dtype_bytes(x_dtype) + 2 * kActBytes)) +
                            double(c.batch * 3 * channels * kActBytes) + double(channels * 5 * 4);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              ConvParams p;
              p.batch = batch;
              p.channels = p.x_stride = channels;
              p.activation_dtype = kAct;
              p.x_dtype = x_dtype;
              p.x = c.memory.random(tokens * channels, x_dtype);
              p.weight = c.memory.random<float>(4 * channels, DType::kFloat32);
              p.bias = c.memory.random<float>(channels, DType::kFloat32);
              p.inputs = c.memory.random(rows * channels, kAct);
              p.y = c.memory.take<void>(tokens * channels * kActBytes);
              problem.layers.push_back(
                  [=](cudaStream_t stream) { cuda::causal_conv(p, window, stream); });
            }
            return problem;
          }};
}

Op mamba2_gates(const char* name, int64_t heads) {
  return {name, [=](Context& c) {
            Problem problem;
            problem.bytes = double(c.batch * heads * (kActBytes + 8) + heads * 8);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              const cuda::Mamba2GateParams p{
                  .dt = c.memory.random(c.batch * heads, kAct),
                  .dtype = kAct,
                  .dt_stride = heads,
                  .dt_bias = c.memory.random<float>(heads, DType::kFloat32),
                  .a = c.memory.random<float>(heads, DType::kFloat32, 0.5f, -1.0f),
                  .dt_min = 0.001f,
                  .dt_max = 0.1f,
                  .tokens = c.batch,
                  .heads = heads,
                  .b = c.memory.take<float>(c.batch * heads * 4),
                  .g = c.memory.take<float>(c.batch * heads * 4)};
              problem.layers.push_back([=](cudaStream_t stream) { cuda::mamba2_gates(p, stream); });
            }
            return problem;
          }};
}

Op delta_gates(const char* name, int64_t heads) {
  return {name, [=](Context& c) {
            Problem problem;
            problem.bytes = double(c.batch * heads * (2 * kActBytes + 8) + heads * 8);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              const cuda::DeltaGateParams p{
                  .beta = c.memory.random(c.batch * heads, kAct),
                  .alpha = c.memory.random(c.batch * heads, kAct),
                  .dtype = kAct,
                  .stride = heads,
                  .dt_bias = c.memory.random<float>(heads, DType::kFloat32),
                  .a = c.memory.random<float>(heads, DType::kFloat32, 0.5f, -1.0f),
                  .tokens = c.batch,
                  .heads = heads,
                  .b = c.memory.take<float>(c.batch * heads * 4),
                  .g = c.memory.take<float>(c.batch * heads * 4)};
              problem.layers.push_back([=](cudaStream_t stream) { cuda::delta_gates(p, stream); });
            }
            return problem;
          }};
}

Op norm(const char* name, int64_t groups, int64_t group_dim, bool per_head, DType x_dtype) {
  return {
      name, [=](Context& c) {
        const int64_t width = groups * group_dim;
        Problem problem;
        problem.bytes = double(c.batch * width * (dtype_bytes(x_dtype) + 2 * kActBytes)) +
                        double((per_head ? group_dim : width) * 4);
        for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
          const cuda::GatedNormParams p{.x = c.memory.random(c.batch * width, x_dtype),
                                        .gate = c.memory.random(c.batch * width, kAct),
                                        .gate_stride = width,
                                        .weight = c.memory.random<float>(width, DType::kFloat32),
                                        .rows = c.batch,
                                        .groups = groups,
                                        .group_dim = group_dim,
                                        .weight_per_group = per_head,
                                        .gate_first = !per_head,
                                        .eps = 1e-5f,
                                        .y = c.memory.take<void>(c.batch * width * kActBytes),
                                        .x_dtype = x_dtype,
                                        .gate_dtype = kAct,
                                        .y_dtype = kAct};
          problem.layers.push_back([=](cudaStream_t stream) { cuda::gated_rms_norm(p, stream); });
        }
        return problem;
      }};
}

SnapshotStepParams snapshot_params(Context& c, const RecurrentShape& s, DType checkpoint,
                                   const SequenceBatch& batch, int64_t window) {
  const int64_t tokens = c.batch * window, states = c.batch * state_elements(s);
  SnapshotStepParams p;
  p.shape = s;
  p.batch = batch;
  p.state.checkpoint = c.memory.random(states, checkpoint);
  p.state.checkpoint_dtype = checkpoint;
  p.state.activation_dtype = kAct;
  p.snapshots = c.memory.random(states * window, checkpoint);
  p.v_stride = s.heads * s.head_dim;
  p.k_stride = p.q_stride = s.key_heads * s.state_dim;
  p.v = c.memory.random(tokens * p.v_stride, kAct);
  p.k = c.memory.random(tokens * p.k_stride, kAct);
  p.q = c.memory.random(tokens * p.q_stride, kAct);
  p.b = c.memory.random<float>(tokens * s.heads, DType::kFloat32, 0.4f, 0.5f);
  p.g = c.memory.random<float>(tokens * s.heads, DType::kFloat32, 0.1f, -0.11f);
  if (s.family == Family::kKimiDelta) {
    p.gate_stride = s.heads * s.state_dim;
    p.gate = c.memory.random(tokens * p.gate_stride, kAct);
    p.channel_gate.scale = c.memory.random<float>(s.heads, DType::kFloat32, 0.1f, -0.2f);
    p.channel_gate.bias = c.memory.random<float>(s.heads * s.state_dim, DType::kFloat32);
  }
  p.o = c.memory.take<void>(tokens * p.v_stride * kActBytes);
  p.o_dtype = kAct;
  return p;
}

Op snapshot(const char* name, const RecurrentShape& s, int64_t window, DType checkpoint) {
  return {
      name, [=](Context& c) {
        const RingConfig ring{.buffer_len = 1, .max_window = static_cast<int32_t>(window)};
        const SequenceBatch batch = sequences(c, ring, window);
        std::vector<int32_t> source;
        for (int64_t i = 0; i < c.batch; ++i) source.push_back(static_cast<int32_t>(i % window));
        const int32_t* sources = c.memory.upload(source);
        const StateTraffic traffic = snapshot_traffic(s, {.window = window,
                                                          .checkpoint_dtype = checkpoint,
                                                          .activation_dtype = kAct,
                                                          .o_dtype = kAct});
        Problem problem;
        problem.bytes = double(c.batch) * (traffic.state() + traffic.inputs + traffic.outputs);
        for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
          SnapshotStepParams p = snapshot_params(c, s, checkpoint, batch, window);
          p.source = sources;
          problem.layers.push_back([=](cudaStream_t stream) { cuda::snapshot_step(p, stream); });
        }
        return problem;
      }};
}

// A slot's checkpoint into another, or zeros.
Op slots(const char* name, const RecurrentShape& s, bool copy) {
  return {name, [=](Context& c) {
            Problem problem;
            const int64_t states = c.batch * state_elements(s);
            problem.bytes = double(states * (copy ? 8 : 4));
            SequenceBatch batch = sequences(c, {}, 1);
            std::vector<int32_t> target;
            for (int64_t i = 0; i < c.batch; ++i)
              target.push_back(static_cast<int32_t>(c.batch + i));
            const int32_t* targets = c.memory.upload(target);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              SlotCopyParams p;
              p.shape = s;
              p.batch = batch;
              p.state.checkpoint = c.memory.random(2 * states, DType::kFloat32);
              p.target_slot = targets;
              SlotClearParams clear;
              clear.shape = s;
              clear.batch = batch;
              clear.state = p.state;
              problem.layers.push_back([=](cudaStream_t stream) {
                copy ? cuda::slot_copy(p, stream) : cuda::slot_clear(clear, stream);
              });
            }
            return problem;
          }};
}

std::vector<Op> ops() {
  constexpr int64_t kMambaChannels = 128 * 64 + 2 * 8 * 128, kGdnChannels = 32 * 128 + 2 * 16 * 128;
  constexpr auto kSingle = DType::kFloat32;
  return {conv("conv 10240 T=1", kMambaChannels, 1, kAct),
          conv("conv 10240 T=1 fp32 x", kMambaChannels, 1, kSingle),
          conv("conv 8192 T=1", kGdnChannels, 1, kAct),
          conv("conv 8192 T=1 fp32 x", kGdnChannels, 1, kSingle),
          conv("conv 10240 T=5", kMambaChannels, 5, kAct),
          conv("conv 10240 chain of 8", kMambaChannels, 8, kAct),
          conv("conv 10240 tree of 8", kMambaChannels, 8, kAct, 2),
          mamba2_gates("gates mamba2 128", 128),
          delta_gates("gates gdn 32", 32),
          norm("norm 8 x 1024", 8, 1024, false, kAct),
          norm("norm 1 x 8192", 1, 8192, false, kAct),
          norm("norm 32 heads of 128", 32, 128, true, kAct),
          norm("norm 32 heads of 128 fp32 x", 32, 128, true, kSingle),
          snapshot("snapshot mamba2 fp32 T=1", kMamba64, 1, kSingle),
          snapshot("snapshot mamba2 fp32 T=5", kMamba64, 5, kSingle),
          snapshot("snapshot mamba2 bf16 T=5", kMamba64, 5, kAct),
          snapshot("snapshot gdn fp32 T=5", kGdn, 5, kSingle),
          snapshot("snapshot gdn bf16 T=5", kGdn, 5, kAct),
          snapshot("snapshot kda fp32 T=5", kKda, 5, kSingle),
          slots("slot_copy mamba2 fp32", kMamba64, true),
          slots("slot_clear mamba2 fp32", kMamba64, false)};
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  return replayssm::run_main(replayssm::ops(), {1, 32, 256}, argc, argv);
}
