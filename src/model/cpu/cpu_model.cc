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
        layers_(std::move(weights), context_, source.progress) {}

  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return backend_.dtype(); }
  StageTimes& stage_times() override { return backend_.times(); }
  int64_t weight_bytes() const override { return layers_.weight_bytes(); }
  Memory& memory() override { return host_memory(); }

  void forward(const Batch& batch, const StateView& state, const PassOutput& output) override {
    check_pass(batch, state, config_);
    REPLAYSSM_CHECK(output.draws.empty(), "draws=", output.draws.size());
    if (batch.token_ids.empty()) return;
    context_.arrays = arrays_of(batch);
    context_.state = &state;
    const int64_t decodes = batch.decodes, prefills = batch.sequences() - decodes;
    const int32_t* slot = batch.slot.data();
    const int32_t* query_start = batch.query_start.data();
    begin_steps(batch.sequences(), slot, query_start, state.ring, state.cursors);
    const int64_t vocab = config_.vocab_size;
    const auto rows = static_cast<int64_t>(batch.logit_tokens.size());
    float* logits = output.logits ? output.logits : logits_.get(rows * vocab);
    layers_.run(context_, logits);
    if (output.tokens) {
      const StageTimer timer(context_, Stage::kSample);
      pool_.for_ranges(rows, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r)
          output.tokens[r] = likeliest(logits + r * vocab, vocab);
      });
    }
    for_cursors(decodes, slot, state.cursors, [&](Cursor& cursor, int64_t s) {
      commit_step(cursor, query_start[s + 1] - query_start[s], state.route);
    });
    commit_prefills(prefills, slot + decodes, query_start + decodes, state.ring, state.cursors);
  }

 private:
  static PassArrays arrays_of(const Batch& batch) {
    return {.tokens = static_cast<int64_t>(batch.token_ids.size()),
            .sequences = batch.sequences(),
            .decodes = batch.decodes,
            .logits = static_cast<int64_t>(batch.logit_tokens.size()),
            .token_ids = batch.token_ids.data(),
            .query_start = batch.query_start.data(),
            .slot = batch.slot.data(),
            .position = batch.position.data(),
            .block_table = batch.block_table.data(),
            .logit_tokens = batch.logit_tokens.data(),
            .block_table_stride = batch.block_table_stride};
  }

  ModelConfig config_;
  ThreadPool& pool_;
  CpuBackend backend_;
  Context context_;
  LayerStack layers_;
  Scratch<float> logits_{host_memory()};
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
