#include "cli/op_report.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

namespace replayssm::cli {
namespace {

constexpr double kMega = 1e6;
constexpr double kGiga = 1e9;

// Of what a call moves; and against the baseline, as measured and as bytes predict from the
// measured bandwidths.
struct Figures {
  double bandwidth, share_of_read, speedup, predicted;
};

Figures figures(const OpReport& report, const OpResult& result) {
  const OpResult& base = report.results.front();
  const double bandwidth = result.traffic.total() / result.seconds;
  return {.bandwidth = bandwidth,
          .share_of_read = bandwidth / report.bandwidth.read,
          .speedup = base.seconds / result.seconds,
          .predicted =
              base.traffic.seconds(report.bandwidth) / result.traffic.seconds(report.bandwidth)};
}

}  // namespace

std::string table(const OpReport& report) {
  const RecurrentShape& s = report.setup.shape;
  const DecodeSchedule& schedule = report.setup.variants.front().schedule;
  std::string text = fmt::format(
      "{}: {} heads ({} key heads) x {} x {}, batch {}, window {}, {} accepted, buffer {}\n"
      "{} activations, {} state of {:.0f} MB in {} calls, {} threads, medians of {}\n"
      "memory over {:.0f} MB: read {:.1f} GB/s, read-modify-write {:.1f} GB/s, write {:.1f} "
      "GB/s\n\n",
      report.op, s.heads, s.key_heads, s.head_dim, s.state_dim, report.setup.batch, report.window,
      report.accepted, schedule.buffer_len, dtype_name(schedule.activation_dtype),
      dtype_name(schedule.checkpoint_dtype), static_cast<double>(report.state_bytes) / kMega,
      report.setup.calls, report.threads, report.repeats,
      static_cast<double>(report.probe_bytes) / kMega, report.bandwidth.read / kGiga,
      report.bandwidth.read_modify_write / kGiga, report.bandwidth.write / kGiga);
  text += fmt::format("{:<28}{:>11}{:>11}{:>10}{:>9}{:>10}{:>10}{:>11}\n", "variant", "us",
                      "state MB", "ring MB", "GB/s", "of read", "speed-up", "predicted");
  for (const OpResult& result : report.results) {
    const Figures f = figures(report, result);
    text += fmt::format("{:<28}{:>11.2f}{:>11.3f}{:>10.3f}{:>9.2f}{:>9.1f}%{:>10.3f}{:>11.3f}\n",
                        result.name, result.seconds * 1e6, result.traffic.state() / kMega,
                        result.traffic.ring / kMega, f.bandwidth / kGiga, f.share_of_read * 100,
                        f.speedup, f.predicted);
  }
  return text;
}

std::string json(const OpReport& report) {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const OpResult& result : report.results) {
    const Figures f = figures(report, result);
    results.push_back({{"variant", result.name},
                       {"tokens", result.tokens},
                       {"us", result.seconds * 1e6},
                       {"bytes",
                        {{"read_only", result.traffic.read_only},
                         {"read_modify_write", result.traffic.read_modify_write},
                         {"write_only", result.traffic.write_only},
                         {"ring", result.traffic.ring},
                         {"inputs", result.traffic.inputs},
                         {"outputs", result.traffic.outputs}}},
                       {"gb_per_second", f.bandwidth / kGiga},
                       {"share_of_read_bandwidth", f.share_of_read},
                       {"speedup", f.speedup},
                       {"predicted_speedup", f.predicted}});
  }
  const RecurrentShape& s = report.setup.shape;
  const DecodeSchedule& schedule = report.setup.variants.front().schedule;
  const nlohmann::ordered_json document{
      {"op", report.op},
      {"family", family_name(s.family)},
      {"heads", s.heads},
      {"key_heads", s.key_heads},
      {"head_dim", s.head_dim},
      {"state_dim", s.state_dim},
      {"dtype", dtype_name(schedule.activation_dtype)},
      {"state_dtype", dtype_name(schedule.checkpoint_dtype)},
      {"batch_size", report.setup.batch},
      {"window", report.window},
      {"accepted", report.accepted},
      {"buffer_len", schedule.buffer_len},
      {"threads", report.threads},
      {"repeats", report.repeats},
      {"calls", report.setup.calls},
      {"state_bytes", report.state_bytes},
      {"bandwidth",
       {{"bytes", report.probe_bytes},
        {"read_gb_per_second", report.bandwidth.read / kGiga},
        {"read_modify_write_gb_per_second", report.bandwidth.read_modify_write / kGiga},
        {"write_gb_per_second", report.bandwidth.write / kGiga}}},
      {"results", results}};
  return document.dump(2) + "\n";
}

}  // namespace replayssm::cli
