#include "cli/decode_report.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "cli/line_plot.h"

namespace replayssm::cli {

std::array<std::pair<const char*, double>, 8> stage_list(const StageTimes& times) {
  return {{{"embed", times.embed},
           {"norm", times.norm},
           {"matmul", times.matmul},
           {"conv", times.conv},
           {"ssm", times.ssm},
           {"attention", times.attention},
           {"other", times.other},
           {"sample", times.sample}}};
}

namespace {

constexpr double kMega = 1e6;
constexpr double kGiga = 1e9;

double ssm_bandwidth(const RouteResult& result) {
  return result.stages.ssm > 0 ? result.traffic.total() / (result.stages.ssm / 1e3) : 0;
}

// Against conventional: as measured for the step and its SSM stage, and as bytes predict for the
// stage from the measured bandwidths.
struct SpeedUp {
  double step, ssm, predicted_ssm;
};

SpeedUp speed_up(const DecodeReport& report, const RouteResult& result) {
  const RouteResult& base = report.results.front();
  const auto seconds = [&](const RouteResult& r) { return r.traffic.seconds(report.bandwidth); };
  const auto ratio = [](double a, double b) { return b > 0 ? a / b : 0; };
  return {.step = ratio(base.ms_per_step, result.ms_per_step),
          .ssm = ratio(base.stages.ssm, result.stages.ssm),
          .predicted_ssm = ratio(seconds(base), seconds(result))};
}

double tokens_per_second(const DecodeReport& report, const RouteResult& result) {
  return static_cast<double>(report.batch_size) * 1e3 / result.ms_per_step;
}

std::string read_copy_text(const DecodeReport& report) {
  if (!report.read_dtype) return "";
  return fmt::format(", {} read copy of {:.1f} MB", dtype_name(*report.read_dtype),
                     static_cast<double>(report.read_copy_bytes) / kMega);
}

}  // namespace

std::string table(const DecodeReport& report) {
  std::string text = fmt::format(
      "{}: batch {}, {} activations, {} state of {:.1f} MB{}, buffer {}, prompt {}, {} threads\n"
      "{} x {} steps per route in interleaved blocks of {}, medians\n"
      "memory over {:.0f} MB: read {:.1f} GB/s, read-modify-write {:.1f} GB/s\n\n",
      report.model, report.batch_size, dtype_name(report.dtype), dtype_name(report.state_dtype),
      static_cast<double>(report.checkpoint_bytes) / kMega, read_copy_text(report),
      report.buffer_len, report.prompt_len, report.threads, report.repeats, report.num_steps,
      report.block_steps, static_cast<double>(report.probe_bytes) / kMega,
      report.bandwidth.read / kGiga, report.bandwidth.read_modify_write / kGiga);
  text += fmt::format("{:<18}{:>9}{:>11}{:>10}{:>10}{:>10}{:>10}{:>10}{:>11}\n", "route", "ms/step",
                      "tokens/s", "speed-up", "ssm ms", "state MB", "ssm GB/s", "speed-up",
                      "predicted");
  for (const RouteResult& result : report.results) {
    const SpeedUp gain = speed_up(report, result);
    text += fmt::format(
        "{:<18}{:>9.3f}{:>11.1f}{:>10.3f}{:>10.3f}{:>10.2f}{:>10.1f}{:>10.3f}{:>11.3f}\n",
        route_name(result.route), result.ms_per_step, tokens_per_second(report, result), gain.step,
        result.stages.ssm, result.traffic.total() / kMega, ssm_bandwidth(result) / kGiga, gain.ssm,
        gain.predicted_ssm);
  }
  text += fmt::format("\n{:<18}", "ms/step");
  for (const auto& [name, ms] : stage_list({})) text += fmt::format("{:>10}", name);
  for (const RouteResult& result : report.results) {
    text += fmt::format("\n{:<18}", route_name(result.route));
    for (const auto& [name, ms] : stage_list(result.stages)) text += fmt::format("{:>10.3f}", ms);
  }
  return text + "\n";
}

namespace {

nlohmann::ordered_json document_of(const DecodeReport& report) {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const RouteResult& result : report.results) {
    const SpeedUp gain = speed_up(report, result);
    nlohmann::ordered_json stages;
    for (const auto& [name, ms] : stage_list(result.stages)) stages[name] = ms;
    results.push_back({{"route", route_name(result.route)},
                       {"ms_per_step", result.ms_per_step},
                       {"tokens_per_second", tokens_per_second(report, result)},
                       {"speedup", gain.step},
                       {"stages", stages},
                       {"state_bytes_per_step", result.traffic.total()},
                       {"ssm_gb_per_second", ssm_bandwidth(result) / kGiga},
                       {"ssm_speedup", gain.ssm},
                       {"predicted_ssm_speedup", gain.predicted_ssm}});
  }
  return {{"model", report.model},
          {"dtype", dtype_name(report.dtype)},
          {"mamba_ssm_cache_dtype", dtype_name(report.state_dtype)},
          {"replayssm_read_dtype", report.read_dtype
                                       ? nlohmann::ordered_json(dtype_name(*report.read_dtype))
                                       : nlohmann::ordered_json(nullptr)},
          {"replayssm_buffer_len", report.buffer_len},
          {"threads", report.threads},
          {"batch_size", report.batch_size},
          {"prompt_len", report.prompt_len},
          {"warmup_steps", report.warmup_steps},
          {"num_steps", report.num_steps},
          {"repeats", report.repeats},
          {"block_steps", report.block_steps},
          {"checkpoint_bytes", report.checkpoint_bytes},
          {"read_copy_bytes", report.read_copy_bytes},
          {"bandwidth",
           {{"bytes", report.probe_bytes},
            {"read_gb_per_second", report.bandwidth.read / kGiga},
            {"read_modify_write_gb_per_second", report.bandwidth.read_modify_write / kGiga}}},
          {"results", results}};
}

}  // namespace

std::string json(const DecodeReport& report) { return document_of(report).dump(2) + "\n"; }

std::string sweep_json(const std::vector<DecodeReport>& reports) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const DecodeReport& report : reports) list.push_back(document_of(report));
  return list.dump(2) + "\n";
}

std::string sweep_table(const std::vector<DecodeReport>& reports) {
  const DecodeReport& first = reports.front();
  std::string text =
      fmt::format("{}: {} activations, {} state, buffer {}, prompt {}\n\n{:>6}", first.model,
                  dtype_name(first.dtype), dtype_name(first.state_dtype), first.buffer_len,
                  first.prompt_len, "batch");
  for (const RouteResult& result : first.results)
    text += fmt::format("{:>18}{:>12}{:>10}", route_name(result.route), "tokens/s", "speed-up");
  for (const DecodeReport& report : reports) {
    text += fmt::format("\n{:>6}", report.batch_size);
    for (const RouteResult& result : report.results) {
      text += fmt::format("{:>15.3f} ms{:>12.1f}{:>10.3f}", result.ms_per_step,
                          tokens_per_second(report, result), speed_up(report, result).step);
    }
  }
  return text + "\n";
}

std::string sweep_plot(const std::vector<DecodeReport>& reports) {
  const DecodeReport& first = reports.front();
  std::vector<PlotLine> lines;
  for (size_t route = 0; route < first.results.size(); ++route) {
    PlotLine& line = lines.emplace_back(route_name(first.results[route].route));
    for (const DecodeReport& report : reports) {
      line.x.push_back(static_cast<double>(report.batch_size));
      line.y.push_back(tokens_per_second(report, report.results[route]));
    }
  }
  return speed_plots(fmt::format("{}, {} state", first.model, dtype_name(first.state_dtype)),
                     lines);
}

}  // namespace replayssm::cli
