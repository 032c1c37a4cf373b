// A model whose logits are a function of a sequence's own tokens, and which remembers those tokens
// in nothing but the state it is given: the hash of the folded ones in the checkpoint, the others
// in the ring, the last ones in the convolution's inputs, all of them in the KV blocks. Whatever
// the engine mixes up therefore shows, either as a broken contract (Error) or as other tokens.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "model/model.h"

namespace replayssm::testing {

// Extends a sequence's hash by one token.
uint64_t extend_hash(uint64_t hash, int32_t token);

// The logits after a sequence with this hash.
std::vector<float> logits_of(uint64_t hash, int64_t vocab);

class FakeModel : public Model {
 public:
  explicit FakeModel(int64_t vocab = 64, int64_t max_positions = 256, bool attention = true);

  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return DType::kFloat32; }
  int64_t weight_bytes() const override { return 0; }
  Memory& memory() override { return *memory_; }
  void reserve(const PassLimits& limits) override { reserved = limits; }
  void forward(const Batch& batch, const StateView& state, const PassOutput& output) override;
  void commit(const Batch& batch, const WindowCommit& commit, const StateView& state) override;
  StageTimes& stage_times() override { return stage_times_; }
  bool draws_tokens() const override { return draws; }
  bool runs_behind() const override { return behind; }
  void start(const Batch& batch, const StateView& state, const PassOutput& output) override;
  void finish() override;

  ModelConfig& mutable_config() { return config_; }
  void use_memory(Memory& memory) { memory_ = &memory; }  // of the host

  int64_t longest_window() const override { return longest; }

  // Passes' tokens are told when they are finished, and not before.
  bool behind = false;
  bool draws = false;           // tokens are drawn
  int64_t fail_at_finish = -1;  // the finish of this number throws
  int64_t overlapped = 0;       // passes that were started while another one was under way
  int64_t unfinished() const { return std::ssize(started_); }

  int64_t longest = kMaxTreeWindow;
  PassLimits reserved;           // asked for last
  int64_t fail_at_forward = -1;  // the forward pass of this number throws
  uint64_t salt = 0;             // of the logits: another one, another model
  int32_t nan_after = -1;        // logits are NaN where the last token is this one
  int64_t forwards = 0;
  int64_t mixed_forwards = 0;  // with decodes and prompts
  int64_t folds = 0;
  int64_t deferred_tokens = 0, moved_rows = 0;  // of windows; by commits of trees

 private:
  struct Started {
    std::vector<int32_t> tokens;
    int32_t* to = nullptr;
  };

  void run(const Batch& batch, const StateView& state, const PassOutput& output);

  std::deque<Started> started_;
  std::vector<int32_t> given_;  // by the pass before
  int64_t finishes_ = 0;
  ModelConfig config_;
  StageTimes stage_times_;
  Memory* memory_ = &host_memory();
};

}  // namespace replayssm::testing
