// A loaded model on one device: what the engine sees of it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>

#include "core/thread_pool.h"
#include "model/config.h"
#include "replayssm/ops.h"

namespace replayssm {

namespace cpu {
struct StateEmulation;  // ops/cpu/precision.h
}

// One forward pass: windows of new tokens of several sequences, packed. The first `decodes`
// sequences decode (window <= ring.max_window, through the ring); the others prefill (any length,
// empty ring).
struct Batch {
  std::span<const int32_t> token_ids;    // [tokens]
  std::span<const int32_t> query_start;  // [sequences + 1]
  std::span<const int32_t> slot;         // [sequences]
  std::span<const int64_t> position;     // [sequences] tokens committed before the window
  std::span<const int32_t> block_table;  // [sequences, block_table_stride]
  int64_t block_table_stride = 0;
  int64_t decodes = 0;
  std::span<const int32_t> logit_tokens;  // packed indices of the tokens whose logits are wanted

  int64_t sequences() const { return static_cast<int64_t>(slot.size()); }
};

// Time spent in the parts of forward passes, in seconds, summed since it was zeroed.
struct StageTimes {
  double embed = 0, norm = 0, matmul = 0, conv = 0, ssm = 0, attention = 0, other = 0;
};

// Where the sequences' states live (engine/slot_pool.h owns the memory).
struct StateView {
  Route route = Route::kOutputOnly;
  RingConfig ring;
  const Cursor* cursors = nullptr;            // [slots]
  std::span<const RecurrentState> recurrent;  // one per recurrent layer
  std::span<void* const> conv_inputs;  // one per recurrent layer: [slots, conv_rows, channels]
  std::span<void* const> kv_keys;      // one per attention layer (KvShape):
  std::span<void* const> kv_values;    // [blocks, heads, block_size, head_dim]
  int64_t kv_block_size = 0;
  const cpu::StateEmulation* emulation = nullptr;  // of storage formats, to study them
};

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual DType activation_dtype() const = 0;
  virtual int64_t weight_bytes() const = 0;  // as held in memory

  // Runs the layers and writes logits: [batch.logit_tokens.size(), vocab_size] fp32. Cursors must
  // have been begun for this step and are not moved.
  virtual void forward(const Batch& batch, const StateView& state, float* logits) = 0;

  virtual StageTimes& stage_times() = 0;
};

// The recurrence of a model's state-space layers.
RecurrentShape recurrent_shape(const ModelConfig& config);
// Channels of the convolution in front of it.
int64_t conv_channels(const ModelConfig& config);

// What the attention layers keep of a token.
struct KvShape {
  int64_t layers = 0, heads = 0, head_dim = 0;
  bool values = true;  // besides the keys; else the keys serve as values
};
KvShape kv_shape(const ModelConfig& config);

// `progress` is called with (done, total) layers.
std::unique_ptr<Model> load_cpu_model(const std::filesystem::path& folder, DType activation_dtype,
                                      ThreadPool& pool,
                                      const std::function<void(int64_t, int64_t)>& progress = {});

}  // namespace replayssm
