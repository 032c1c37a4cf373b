// A model on the host's cores.

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/cpu/cpu_backend.h"
#include "model/layer_stack.h"
#include "replay/cursors.h"

namespace replayssm {
namespace {

// Index of the largest of a row's logits, the lowest where several are; -1 for none or a NaN.
int32_t likeliest(const float* logits, int64_t vocab) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return std::isfinite(logits[best]) ? static_cast<int32_t>(best) : -1;
}

class CpuModel final : public Model {
 public:
  CpuModel(ModelConfig config, ModelWeights weights, DType dtype, ThreadPool& pool,
           const ModelSource& source)
      : config_(std::move(config)),
        pool_(pool),
        backend_(dtype, pool),
        context_(config_, backend_, source.communicator),
        layers_(std::move(weights), context_, source.draft_head, source.progress) {
    config_.draft_attention_layers = layers_.has_draft_head() ? 1 : 0;
  }

  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return backend_.dtype(); }
  StageTimes& stage_times() override { return backend_.times(); }
  int64_t weight_bytes() const override { return layers_.weight_bytes(); }
  Memory& memory() override { return host_memory(); }

  bool has_draft_head() const override { return layers_.has_draft_head(); }

  void forward(const Batch& batch, const StateView& state, const PassOutput& output) override {
    check_pass(batch, state, config_);
    if (batch.token_ids.empty()) return;
    const WindowTrees trees(batch);
    begin_steps(batch.sequences(), batch.slot.data(), batch.query_start.data(), state.ring,
                state.cursors);
    begin(batch, trees, state);
    float* logits = logits_of(batch, output);
    layers_.run(context_, batch.keep_hidden, logits);
    choose(batch, logits, output);
    if (!batch.deferred) {
      for_cursors(batch.decodes, batch.slot.data(), state.cursors, [&](Cursor& cursor, int64_t s) {
        commit_step(cursor, batch.query_start[s + 1] - batch.query_start[s], state.route);
      });
    }
    commit_prefills(batch.sequences() - batch.decodes, batch.slot.data() + batch.decodes,
                    batch.query_start.data() + batch.decodes, state.ring, state.cursors);
  }

  void commit(const Batch& batch, const WindowCommit& commit, const StateView& state) override {
    REPLAYSSM_CHECK(std::ssize(commit.accepted) == batch.decodes,
                    "accepted=", commit.accepted.size());
    if (!commit.path.empty()) {
      begin(batch, WindowTrees(Batch{}), state);
      compact_windows(context_, commit.path.data(), commit.accepted.data());
    }
    commit_steps(batch.decodes, batch.slot.data(), commit.accepted.data(), state.route,
                 state.cursors);
  }

  void draft(const HeadBatch& head, const StateView& state, const PassOutput& output) override {
    if (head.batch.token_ids.empty()) return;
    std::vector<int32_t> ids(head.batch.token_ids.begin(), head.batch.token_ids.end());
    for (int32_t& id : ids) {
      if (id <= -2) id = std::max(drafted_.at(static_cast<size_t>(-2 - id)), 0);
    }
    begin(head.batch, WindowTrees(Batch{}), state);
    context_.arrays.token_ids = ids.data();
    context_.arrays.hidden_row = head.hidden_row.data();
    float* logits = logits_of(head.batch, output);
    layers_.run_draft(context_, head.recycled, logits);
    choose(head.batch, logits, output);
    if (output.tokens)
      drafted_.assign(output.tokens, output.tokens + head.batch.logit_tokens.size());
  }

 private:
  // The pass that the layers will run.
  void begin(const Batch& batch, const WindowTrees& trees, const StateView& state) {
    context_.arrays = {.tokens = static_cast<int64_t>(batch.token_ids.size()),
                       .sequences = batch.sequences(),
                       .decodes = batch.decodes,
                       .logits = static_cast<int64_t>(batch.logit_tokens.size()),
                       .token_ids = batch.token_ids.data(),
                       .query_start = batch.query_start.data(),
                       .slot = batch.slot.data(),
                       .position = batch.position.data(),
                       .block_table = batch.block_table.data(),
                       .logit_tokens = batch.logit_tokens.data(),
                       .block_table_stride = batch.block_table_stride,
                       .parent = batch.parent.empty() ? nullptr : batch.parent.data(),
                       .ancestors = trees.ancestors.empty() ? nullptr : trees.ancestors.data(),
                       .depth = trees.depth.empty() ? nullptr : trees.depth.data(),
                       .source = batch.source.data()};
    context_.state = &state;
  }

  // Where a pass's logits go.
  float* logits_of(const Batch& batch, const PassOutput& output) {
    REPLAYSSM_CHECK(output.draws.empty(), "draws=", output.draws.size());
    return output.logits ? output.logits
                         : logits_.get(std::ssize(batch.logit_tokens) * config_.vocab_size);
  }

  void choose(const Batch& batch, const float* logits, const PassOutput& output) {
    if (!output.tokens) return;
    const StageTimer timer(context_, Stage::kSample);
    const int64_t vocab = config_.vocab_size;
    pool_.for_ranges(std::ssize(batch.logit_tokens), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) output.tokens[r] = likeliest(logits + r * vocab, vocab);
    });
  }

  ModelConfig config_;
  ThreadPool& pool_;
  CpuBackend backend_;
  Context context_;
  LayerStack layers_;
  Scratch<float> logits_{host_memory()};
  std::vector<int32_t> drafted_;  // by the head's last pass
};

}  // namespace

std::unique_ptr<Model> load_cpu_model(const ModelSource& source, DType activation_dtype,
                                      ThreadPool& pool) {
  REPLAYSSM_CHECK(activation_dtype != DType::kFloat16, "no float16 matrix products on the CPU");
  ModelConfig config = load_config(source.folder);
  ModelWeights weights = read_weights(source, config);
  return std::make_unique<CpuModel>(std::move(config), std::move(weights), activation_dtype, pool,
                                    source);
}

}  // namespace replayssm
