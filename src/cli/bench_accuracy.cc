#include "cli/bench_accuracy.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "cli/precision_sweep.h"
#include "cli/progress.h"
#include "cli/setup.h"
#include "cli/text_windows.h"
#include "engine/rows.h"
#include "engine/sampler.h"

namespace replayssm::cli {
namespace {

using Tokens = std::span<const int32_t>;

// The sum over scored tokens of -log p(token | the tokens before it in its window).
struct Score {
  double nll = 0;
  int64_t tokens = 0;

  void add(std::span<const float> logits, int32_t next) {
    nll += log_sum_exp(logits) - static_cast<double>(logits[next]);
    ++tokens;
  }
  double mean() const { return nll / static_cast<double>(tokens); }
};

class Scorer {
 public:
  Scorer(Model& model, const AccuracyOptions& options, const TextWindows& text)
      : model_(model),
        options_(options),
        windows_(text.windows),
        scored_tokens_(text.scored_tokens()) {}

  // `route` is none for prefill.
  Score score(std::optional<Route> route, Progress& progress);

 private:
  int64_t vocab() const { return model_.config().vocab_size; }
  RowsOptions rows_options(Route route, int64_t rows) const {
    return {.route = route,
            .buffer_len = options_.state.buffer_len,
            .state_dtype = state_dtype(options_.state, model_.config()),
            .rows = rows,
            .context = options_.window};
  }
  void prefill(Tokens window, int64_t piece, Rows& rows, Score& score) const;
  void decode(std::span<const Tokens> windows, Rows& rows, Score& score, Progress& progress) const;

  Model& model_;
  const AccuracyOptions& options_;
  std::span<const Tokens> windows_;
  int64_t scored_tokens_;
};

void Scorer::prefill(Tokens window, int64_t piece, Rows& rows, Score& score) const {
  rows.reset();
  const auto length = static_cast<int64_t>(window.size());
  std::vector<int32_t> wanted(piece);
  std::iota(wanted.begin(), wanted.end(), 0);
  for (int64_t begin = 0; begin + 1 < length; begin += piece) {
    const int64_t count = std::min(piece, length - 1 - begin);
    const RowTokens tokens{0, window.subspan(begin, count)};
    const auto logits = rows.prefill({&tokens, 1}, std::span(wanted).first(count));
    for (int64_t i = 0; i < count; ++i) {
      score.add(logits.subspan(i * vocab(), vocab()), window[begin + i + 1]);
    }
  }
}

// The first token of every window is a prompt; the others are decoded, all windows side by side.
void Scorer::decode(std::span<const Tokens> windows, Rows& rows, Score& score,
                    Progress& progress) const {
  rows.reset();
  std::vector<RowTokens> prompts;
  prompts.reserve(windows.size());
  std::vector<int32_t> wanted(windows.size());
  std::iota(wanted.begin(), wanted.end(), 0);
  for (size_t row = 0; row < windows.size(); ++row) {
    prompts.push_back({static_cast<int64_t>(row), windows[row].first(1)});
  }
  std::span<const float> logits = rows.prefill(prompts, wanted);
  std::vector<int32_t> next;
  for (size_t at = 1; at < windows.front().size(); ++at) {
    next.clear();
    for (size_t row = 0; row < windows.size() && at < windows[row].size(); ++row) {
      next.push_back(windows[row][at]);
      score.add(logits.subspan(row * vocab(), vocab()), next.back());
    }
    progress.update(score.tokens, scored_tokens_);
    if (at + 1 < windows.front().size()) logits = rows.decode(next);
  }
}

Score Scorer::score(std::optional<Route> route, Progress& progress) {
  Score score;
  if (!route) {
    constexpr int64_t kMostLogits = int64_t{16} << 20;  // 64 MB of them at a time
    const int64_t piece =
        std::clamp<int64_t>(kMostLogits / vocab(), 1, options_.limits.batched_tokens());
    RowsOptions options = rows_options(Route::kConventional, 1);
    options.max_logits = piece;
    Rows rows(model_, options);
    for (const Tokens& window : windows_) {
      prefill(window, piece, rows, score);
      progress.update(score.tokens, scored_tokens_);
    }
    return score;
  }
  const auto count = static_cast<int64_t>(windows_.size());
  const int64_t together = std::min(options_.limits.max_num_seqs, count);
  Rows rows(model_, rows_options(*route, together));
  for (int64_t begin = 0; begin < count; begin += together) {
    const int64_t group = std::min(together, count - begin);
    decode(windows_.subspan(begin, group), rows, score, progress);
  }
  return score;
}

std::vector<std::optional<Route>> selected_routes(const std::string& name) {
  std::vector<std::optional<Route>> routes;
  if (name == "all" || name == "prefill") routes.emplace_back();
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    if (name == "all" || name == route_name(route)) routes.emplace_back(route);
  }
  return routes;
}

}  // namespace

void bench_accuracy(const AccuracyOptions& options) {
  if (options.precision_sweep) return precision_sweep(options);
  const auto folder = find_model(options.model);
  const LoadedModel loaded = load_model(folder, options.model);
  const ModelConfig& config = loaded.model->config();
  const TextWindows text = read_windows(options, folder, config);
  Scorer scorer(*loaded.model, options, text);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  std::string table =
      fmt::format("{:<18}{:>10}{:>14}{:>14}\n", "route", "tokens", "mean NLL", "perplexity");
  for (const auto& route : selected_routes(options.route)) {
    const std::string name = route ? route_name(*route) : "prefill";
    Progress progress(name);
    const Score score = scorer.score(route, progress);
    const double perplexity = std::exp(score.mean());
    results.push_back({{"route", name},
                       {"tokens", score.tokens},
                       {"mean_nll", score.mean()},
                       {"perplexity", perplexity}});
    table += fmt::format("{:<18}{:>10}{:>14.6f}{:>14.4f}\n", name, score.tokens, score.mean(),
                         perplexity);
  }
  const nlohmann::ordered_json report{
      {"model", model_name(folder)},
      {"dtype", dtype_name(loaded.model->activation_dtype())},
      {"mamba_ssm_cache_dtype", dtype_name(state_dtype(options.state, config))},
      {"replayssm_buffer_len", options.state.buffer_len},
      {"window", options.window},
      {"results", results}};
  print(options.json ? report.dump(2) + "\n" : table);
}

}  // namespace replayssm::cli
