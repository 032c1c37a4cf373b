#include "engine/speculation.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "engine/head_drafter.h"
#include "engine/lookup_drafters.h"
#include "engine/model_drafter.h"
#include "engine/scheduler.h"

namespace replayssm {
namespace {

constexpr const char* kFlag = "--speculative-config";

std::unique_ptr<Drafter> make_drafter(Model& model, const EngineOptions& options,
                                      const MemoryPlan& plan, std::function<StateView()> state) {
  const SpeculativeConfig& config = *options.speculative;
  switch (config.method) {
    case DraftMethod::kNgram: return std::make_unique<NgramDrafter>(config);
    case DraftMethod::kSuffix: return std::make_unique<SuffixDrafter>(config);
    case DraftMethod::kMtp: return std::make_unique<HeadDrafter>(model, config, std::move(state));
    case DraftMethod::kDraftModel: break;
  }
  return std::make_unique<ModelDrafter>(*options.draft_model, options, plan.draft_kv_blocks);
}

}  // namespace

void check_speculation(const EngineOptions& options, const Model& model) {
  const SpeculativeConfig& config = *options.speculative;
  if (config.method == DraftMethod::kMtp && !model.has_draft_head())
    fail(kFlag,
         ": method: expected a model with multi-token-prediction tensors for mtp, got one without");
  if (config.method == DraftMethod::kDraftModel) {
    REPLAYSSM_CHECK(options.draft_model, "no draft model");
    const int64_t most = options.draft_model->longest_window();
    if (ModelDrafter::longest_window(config) > most) {
      fail(kFlag, ": num_speculative_tokens: expected at most ", most - 1,
           " of this draft model, got ", config.tokens);
    }
    const int64_t vocab = options.draft_model->config().vocab_size;
    if (vocab != model.config().vocab_size) {
      fail(kFlag, ": model: expected a draft model with the same vocabulary of ",
           model.config().vocab_size, " tokens, got ", vocab);
    }
  }
  if (const int64_t most = model.longest_window();
      config.max_window() > most && !config.snapshots) {
    fail(kFlag, ": num_speculative_tokens x tree_width: expected windows of at most ", most,
         " tokens here, got drafts of ", config.max_window() - 1, " and the last token");
  }
  if (options.route == Route::kConventional && !config.snapshots)
    fail("route: expected one through the ring, which drafts are rolled back in, got conventional");
  if (config.snapshots && config.tree_width > 1)
    fail(kFlag, ": tree_width: expected 1 with --no-use-replayssm-spec, got ", config.tree_width);
}

Speculation::Speculation(Model& model, const EngineOptions& options, const MemoryPlan& plan,
                         std::function<StateView()> state)
    : config_(*options.speculative),
      drafter_(make_drafter(model, options, plan, std::move(state))),
      depths_(options.max_num_seqs * config_.max_window(), config_.adaptive) {
  if (config_.simulate_length > 0) simulated_.emplace(config_.simulate_length, config_.tokens);
  stats_.proposed.resize(static_cast<size_t>(config_.tokens));
  stats_.accepted.resize(static_cast<size_t>(config_.tokens));
}

KeepHidden Speculation::keep_hidden() const {
  if (config_.method != DraftMethod::kMtp) return KeepHidden::kNone;
  return config_.before_norm ? KeepHidden::kBeforeNorm : KeepHidden::kAfterNorm;
}

int64_t Speculation::most_depth(const Sequence& sequence) const {
  const int64_t left = sequence.rule.max_tokens - (sequence.size() - sequence.prompt_len);
  return std::clamp<int64_t>(left - 1, 0, config_.tokens);
}

// Those that the drafter is to hear of: it follows sequences that have not been drafted for in a
// while no longer, which costs the head a pass.
std::vector<DraftRequest> Speculation::awake(std::span<const DraftRequest> requests) const {
  constexpr int64_t kLongest = 8;
  std::vector<DraftRequest> awake;
  for (size_t i = 0; i < requests.size(); ++i) {
    const DraftRequest& request = requests[i];
    const bool tries = depths_.trying(std::ssize(requests)) == static_cast<int64_t>(i);
    int64_t& undrafted = request.sequence->undrafted;
    const bool idle = request.depth == 0 && !request.sequence->prefilling;
    undrafted = idle ? undrafted + 1 : 0;
    if (tries || undrafted < kLongest) awake.push_back(request);
  }
  return awake;
}

void Speculation::propose(std::span<DraftRequest> requests) {
  const auto start = std::chrono::steady_clock::now();
  depths_.choose(requests);
  drafter_->propose(awake(requests));
  int64_t drafted = 0, decodes = 0;
  for (const DraftRequest& request : requests) {
    decodes += request.sequence->prefilling ? 0 : 1;
    Draft& draft = *request.draft;
    // Simulated drafts are as long as they may be, whatever they hold.
    if (simulated_ && request.depth > 0) draft.tokens.resize(static_cast<size_t>(request.depth));
    drafted += draft.size();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  stats_.draft_seconds += took.count();
  if (decodes == std::ssize(requests) && decodes > 0)
    depths_.time_draft(decodes, drafted, took.count());
}

void Speculation::forget(int64_t request) { drafter_->forget(request); }

bool Speculation::needs_logits(const Sequence& sequence) const {
  return !sequence.draft.probability.empty();
}

Verdict Speculation::judge(const Sequence& sequence, const ChooseToken& choose,
                           const std::function<std::span<const float>(int64_t)>& logits) const {
  const Draft& draft = sequence.draft;
  if (simulated_) {
    const int64_t accepted =
        simulated_->draw(draft.size(), sequence.sampling.seed + sequence.id, sequence.size());
    Verdict verdict;
    verdict.reserve(1 + accepted);
    for (int32_t row = 0; row <= accepted; ++row) {
      verdict.tokens.push_back(choose(row, verdict.tokens));
      verdict.rows.push_back(row);
    }
    return verdict;
  }
  if (draft.probability.empty()) return follow_draft(draft, choose);
  // Where the draft ends, the model's own token follows.
  std::vector<int32_t> output(sequence.output().begin(), sequence.output().end());
  const auto reject = [&](int64_t row, const std::vector<SampledToken>& chosen) {
    if (row == draft.size()) return choose(row, chosen);
    const auto p = distribution(logits(row), sequence.sampling, sequence.prompt(), output);
    const Rejection result =
        reject_or_accept(p, draft.probability[row], draft.tokens[row], sequence.sampling.seed,
                         sequence.size() + static_cast<int64_t>(chosen.size()));
    output.push_back(result.token);
    return described(result.token, logits(row), sequence.sampling);
  };
  return follow_draft(draft, reject);
}

void Speculation::count(Sequence& sequence, int64_t kept) {
  ++stats_.windows;
  stats_.kept_tokens += kept;
  const Draft& draft = sequence.draft;
  stats_.drafted_tokens += draft.size();
  const int64_t depth = draft.size() > 0 ? std::ranges::max(draft.depths()) : 0;
  depths_.count(sequence.acceptance, std::min(kept - 1, depth), depth);
  for (int64_t i = 0; i < depth; ++i) {
    ++stats_.proposed[i];
    stats_.accepted[i] += i + 1 < kept;
  }
}

void Speculation::time_pass(int64_t sequences, int64_t rows, double seconds) {
  stats_.verify_seconds += seconds;
  depths_.time_pass(sequences, rows, seconds);
}

}  // namespace replayssm
