#include "cli/precision_sweep.h"

#include <spdlog/fmt/fmt.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/progress.h"
#include "cli/setup.h"
#include "cli/text_windows.h"
#include "core/check.h"
#include "engine/rows.h"
#include "engine/sampler.h"
#include "ops/cpu/precision.h"

namespace replayssm::cli {
namespace {

using Logits = std::vector<float>;

// A model's decode steps on text: all windows of a group side by side, the first token as prompt.
class Decoder {
 public:
  Decoder(Model& model, const RowsOptions& options) : rows_(model, options) {}

  // Calls use(row, position, logits, next token) for every token of the windows but the first.
  template <class Use>
  void run(std::span<const std::span<const int32_t>> windows, Use&& use) {
    rows_.reset();
    std::vector<RowTokens> prompts;
    prompts.reserve(windows.size());
    std::vector<int32_t> tokens(windows.size());
    std::iota(tokens.begin(), tokens.end(), 0);
    for (size_t row = 0; row < windows.size(); ++row)
      prompts.push_back({static_cast<int64_t>(row), windows[row].first(1)});
    std::span<const float> logits = rows_.prefill(prompts, tokens);
    const size_t vocab = logits.size() / windows.size();
    for (size_t at = 1; at < windows.front().size(); ++at) {
      tokens.clear();
      for (size_t row = 0; row < windows.size() && at < windows[row].size(); ++row) {
        tokens.push_back(windows[row][at]);
        use(row, at, logits.subspan(row * vocab, vocab), tokens.back());
      }
      if (at + 1 < windows.front().size()) logits = rows_.decode(tokens);
    }
  }

 private:
  Rows rows_;
};

// sum_v p(v) log(p(v) / q(v)) of the distributions of two vectors of logits.
double divergence(std::span<const float> p, std::span<const float> q) {
  const double p_total = log_sum_exp(p), q_total = log_sum_exp(q);
  double sum = 0;
  for (size_t v = 0; v < p.size(); ++v) {
    const double log_p = p[v] - p_total;
    sum += std::exp(log_p) * (log_p - (q[v] - q_total));
  }
  return sum;
}

constexpr int kQuarters = 4;

struct Mean {
  double sum = 0;
  int64_t count = 0;

  void add(double value) {
    sum += value;
    ++count;
  }
  double value() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
};

struct Result {
  std::string read, recurrence;
  int32_t buffer_len = 0;
  Mean nll, kl;
  std::array<Mean, kQuarters> quarter_kl;  // by position within the window
};

class Sweep {
 public:
  Sweep(Model& model, const AccuracyOptions& options, const TextWindows& text)
      : model_(model), options_(options), text_(text) {}

  // Every pair of formats at one buffer length. The states of all float32 are what the others are
  // compared with, under the same flushes.
  std::vector<Result> run(int32_t buffer_len, Progress& progress, int64_t& done, int64_t total) {
    std::vector<Result> results;
    for (const std::string& recurrence : options_.recurrence_formats) {
      for (const std::string& read : options_.read_formats)
        results.push_back({read, recurrence, buffer_len, {}, {}, {}});
    }
    const auto count = static_cast<int64_t>(text_.windows.size());
    const int64_t together = std::min(options_.limits.max_num_seqs, count);
    for (int64_t begin = 0; begin < count; begin += together) {
      const auto group = std::span(text_.windows).subspan(begin, std::min(together, count - begin));
      const std::vector<Logits> exact = exact_logits(group, buffer_len);
      for (Result& result : results) {
        compare(group, exact, result);
        progress.update(++done, total);
      }
    }
    return results;
  }

 private:
  RowsOptions rows_options(int32_t buffer_len, int64_t rows) const {
    return {.route = Route::kOutputOnly,
            .buffer_len = buffer_len,
            .rows = rows,
            .context = options_.window};
  }

  // [row * window + position]
  std::vector<Logits> exact_logits(std::span<const std::span<const int32_t>> windows,
                                   int32_t buffer_len) {
    std::vector<Logits> exact(windows.size() * windows.front().size());
    Decoder decoder(model_, rows_options(buffer_len, std::ssize(windows)));
    decoder.run(windows, [&](size_t row, size_t at, std::span<const float> logits, int32_t) {
      exact[row * windows.front().size() + at].assign(logits.begin(), logits.end());
    });
    return exact;
  }

  void compare(std::span<const std::span<const int32_t>> windows, const std::vector<Logits>& exact,
               Result& result) {
    const cpu::StateEmulation emulation{
        .recurrence = cpu::parse_precision(result.recurrence).value(),
        .read = cpu::parse_precision(result.read).value(),
        .seed = 0};
    RowsOptions options = rows_options(result.buffer_len, std::ssize(windows));
    if (result.read != result.recurrence) options.read_dtype = DType::kFloat32;
    options.emulation = &emulation;
    Decoder decoder(model_, options);
    const size_t window = windows.front().size();
    decoder.run(windows, [&](size_t row, size_t at, std::span<const float> logits, int32_t next) {
      result.nll.add(log_sum_exp(logits) - static_cast<double>(logits[next]));
      const double kl = divergence(exact[row * window + at], logits);
      result.kl.add(kl);
      result.quarter_kl[(at - 1) * kQuarters / (window - 1)].add(kl);
    });
  }

  Model& model_;
  const AccuracyOptions& options_;
  const TextWindows& text_;
};

void check_formats(const std::string& flag, const std::vector<std::string>& formats) {
  for (const std::string& format : formats) {
    if (cpu::parse_precision(format)) continue;
    fail(flag,
         ": expected float32, float16, bfloat16, e4m3, e2m1 or int4 .. int16, with /COLUMNS "
         "of a scale and -sr for stochastic rounding where it has them, got '",
         format, "'");
  }
}

std::string table_of(const std::vector<Result>& results) {
  std::string table = fmt::format("{:>6}  {:<14}{:<14}{:>10}{:>11}   {}\n", "buffer", "recurrence",
                                  "read", "mean NLL", "mean KL", "KL by quarter of the window");
  for (const Result& r : results) {
    table += fmt::format("{:>6}  {:<14}{:<14}{:>10.5f}{:>11.2e}  ", r.buffer_len, r.recurrence,
                         r.read, r.nll.value(), r.kl.value());
    for (const Mean& quarter : r.quarter_kl) table += fmt::format("{:>10.2e}", quarter.value());
    table += "\n";
  }
  return table;
}

nlohmann::ordered_json json_of(const std::vector<Result>& results) {
  auto list = nlohmann::ordered_json::array();
  for (const Result& r : results) {
    auto quarters = nlohmann::ordered_json::array();
    for (const Mean& quarter : r.quarter_kl) quarters.push_back(quarter.value());
    list.push_back({{"buffer_len", r.buffer_len},
                    {"recurrence", r.recurrence},
                    {"read", r.read},
                    {"mean_nll", r.nll.value()},
                    {"mean_kl", r.kl.value()},
                    {"quarter_kl", quarters}});
  }
  return list;
}

}  // namespace

void precision_sweep(const AccuracyOptions& options) {
  check_formats("--read-formats", options.read_formats);
  check_formats("--recurrence-formats", options.recurrence_formats);
  ModelOptions model = options.model;
  if (model.device == "cuda")
    fail("--device: expected auto or cpu for a precision sweep, got cuda");
  model.device = "cpu";  // formats are emulated there
  const auto folder = find_model(model);
  const LoadedModel loaded = load_model(folder, model);
  const TextWindows text = read_windows(options, folder, loaded.model->config());
  Sweep sweep(*loaded.model, options, text);
  const int64_t groups =
      (std::ssize(text.windows) + options.limits.max_num_seqs - 1) / options.limits.max_num_seqs;
  const int64_t total = std::ssize(options.buffer_lens) * groups *
                        std::ssize(options.read_formats) * std::ssize(options.recurrence_formats);
  int64_t done = 0;
  std::vector<Result> results;
  {
    Progress progress("sweep");
    for (const int32_t buffer_len : options.buffer_lens) {
      const auto part = sweep.run(buffer_len, progress, done, total);
      results.insert(results.end(), part.begin(), part.end());
    }
  }
  if (!options.json) return print(table_of(results));
  const nlohmann::ordered_json report{{"model", model_name(folder)},
                                      {"dtype", dtype_name(loaded.model->activation_dtype())},
                                      {"tokens", text.scored_tokens()},
                                      {"window", options.window},
                                      {"results", json_of(results)}};
  print(report.dump(2) + "\n");
}

}  // namespace replayssm::cli
