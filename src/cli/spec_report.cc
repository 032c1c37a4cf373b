// How the figures of `bench spec` are shown.
#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "cli/bench_spec.h"
#include "cli/decode_report.h"
#include "cli/line_plot.h"

namespace replayssm::cli {
namespace {

constexpr double kMega = 1e6;

std::string positions(const SpecResult& result) {
  std::string text;
  for (const double share : result.accepted) text += fmt::format(" {:.2f}", share);
  return text;
}

}  // namespace

std::string table(const SpecReport& report) {
  std::string text = fmt::format("{}: batch {}, {} with {} tokens", report.model, report.batch_size,
                                 report.method, report.tokens);
  if (report.simulated_length > 0)
    text += fmt::format(", simulated acceptance length {}", report.simulated_length);
  text += fmt::format("\n{:<15}{:>11}{:>9}{:>8}{:>10}{:>11}{:>10}{:>11}{:>12}{:>10}\n", "mode",
                      "tokens/s", "x", "length", "step ms", "verify ms", "draft ms", "commit ms",
                      "request MB", "requests");
  for (const SpecResult& result : report.results) {
    text += fmt::format(
        "{:<15}{:>11.1f}{:>9.3f}{:>8.2f}{:>10.3f}{:>11.3f}{:>10.3f}{:>11.3f}{:>12.2f}{:>10}\n",
        result.mode, result.tokens_per_second,
        result.tokens_per_second / report.results.front().tokens_per_second, result.length,
        result.step_ms, result.verify_ms, result.draft_ms, result.commit_ms,
        static_cast<double>(result.request_bytes) / kMega, result.most_requests);
  }
  text += fmt::format("\n{:<15}", "ms/step");
  for (const auto& [name, _] : stage_list({})) text += fmt::format("{:>11}", name);
  for (const SpecResult& result : report.results) {
    text += fmt::format("\n{:<15}", result.mode);
    for (const auto& [_, seconds] : stage_list(result.stages))
      text += fmt::format("{:>11.3f}", seconds * 1e3);
  }
  text += "\n\n";
  for (const SpecResult& result : report.results) {
    if (!result.accepted.empty())
      text += fmt::format("accepted by position, {}:{}\n", result.mode, positions(result));
  }
  return text + fmt::format("requests: of {} tokens, in {:.0f} MB\n\n", report.max_model_len,
                            static_cast<double>(report.memory) / kMega);
}

std::string json(const std::vector<SpecReport>& reports) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const SpecReport& report : reports) {
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    for (const SpecResult& result : report.results) {
      nlohmann::ordered_json stage_ms;
      for (const auto& [name, seconds] : stage_list(result.stages)) stage_ms[name] = seconds * 1e3;
      results.push_back({{"mode", result.mode},
                         {"tokens_per_second", result.tokens_per_second},
                         {"acceptance_length", result.length},
                         {"accepted_by_position", result.accepted},
                         {"step_ms", result.step_ms},
                         {"verify_ms", result.verify_ms},
                         {"draft_ms", result.draft_ms},
                         {"commit_ms", result.commit_ms},
                         {"stage_ms", stage_ms},
                         {"request_bytes", result.request_bytes},
                         {"most_requests", result.most_requests}});
    }
    list.push_back({{"model", report.model},
                    {"batch_size", report.batch_size},
                    {"method", report.method},
                    {"num_speculative_tokens", report.tokens},
                    {"simulate_acceptance", report.simulated_length},
                    {"memory_bytes", report.memory},
                    {"max_model_len", report.max_model_len},
                    {"results", results}});
  }
  return list.dump(2) + "\n";
}

std::string plot(const std::vector<SpecReport>& reports) {
  const SpecReport& first = reports.front();
  std::vector<PlotLine> lines;
  for (size_t mode = 0; mode < first.results.size(); ++mode) {
    PlotLine& line = lines.emplace_back(first.results[mode].mode);
    for (const SpecReport& report : reports) {
      line.x.push_back(static_cast<double>(report.batch_size));
      line.y.push_back(report.results[mode].tokens_per_second);
    }
  }
  return speed_plots(first.model, lines);
}

}  // namespace replayssm::cli
