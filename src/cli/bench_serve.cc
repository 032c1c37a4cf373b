#include "cli/bench_serve.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "cli/load_client.h"
#include "cli/setup.h"
#include "core/check.h"
#include "core/philox.h"

namespace replayssm::cli {
namespace {

using Json = nlohmann::ordered_json;

// Random token ids in the part of a vocabulary that every model has.
std::vector<int32_t> random_ids(uint64_t seed, int64_t count) {
  constexpr int kFirst = 300, kIds = 1000;
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    ids.push_back(kFirst + static_cast<int32_t>(uniform(seed, i) * kIds));
  return ids;
}

std::vector<LoadRequest> synthetic(const BenchServeOptions& options) {
  if (options.shared_len > options.prompt_len) {
    fail("--shared-len: expected at most --prompt-len = ", options.prompt_len, ", got ",
         options.shared_len);
  }
  const std::vector<int32_t> shared = random_ids(options.seed * 2 + 1, options.shared_len);
  std::vector<LoadRequest> requests;
  for (int64_t i = 0; i < options.requests; ++i) {
    std::vector<int32_t> prompt = shared;
    const auto own = random_ids((options.seed + 1) * 1000003 + static_cast<uint64_t>(i) * 2,
                                options.prompt_len - options.shared_len);
    prompt.insert(prompt.end(), own.begin(), own.end());
    requests.push_back({.body = Json{{"prompt", prompt},
                                     {"max_tokens", options.output_len},
                                     {"ignore_eos", true},
                                     {"temperature", 0}}
                                    .dump()});
  }
  return requests;
}

std::vector<LoadRequest> from_file(const BenchServeOptions& options) {
  std::istringstream lines(read_text(options.dataset, "--dataset"));
  std::vector<LoadRequest> requests;
  std::string line;
  for (int64_t number = 1; std::getline(lines, line); ++number) {
    if (line.empty() || std::ssize(requests) >= options.requests) continue;
    Json body = Json::parse(line, nullptr, false);
    if (!body.is_object() || !body.contains("prompt")) {
      fail("--dataset ", options.dataset, ": line ", number, ": expected an object with a prompt");
    }
    if (!body.contains("max_tokens")) body["max_tokens"] = options.output_len;
    requests.push_back({.body = body.dump()});
  }
  if (requests.empty()) fail("--dataset ", options.dataset, ": expected at least one line");
  return requests;
}

// Random arrivals, as of many independent clients.
void set_arrivals(const BenchServeOptions& options, std::vector<LoadRequest>& requests) {
  if (options.rate == 0) return;
  double due = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].due = due;
    due -= std::log1p(-uniform(options.seed + 77, static_cast<int64_t>(i))) / options.rate;
  }
}

void set_streams(bool stream, std::vector<LoadRequest>& requests) {
  if (!stream) return;
  for (LoadRequest& request : requests) {
    Json body = Json::parse(request.body);
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
    request.body = body.dump();
  }
}

Json percentiles(std::vector<double> values) {
  constexpr double kMs = 1e3;
  if (values.empty()) return nullptr;
  std::ranges::sort(values);
  const auto at = [&](double part) {
    return values[std::lround(part * static_cast<double>(values.size() - 1))] * kMs;
  };
  double sum = 0;
  for (const double value : values) sum += value;
  return {{"mean", sum / static_cast<double>(values.size()) * kMs},
          {"p50", at(0.5)},
          {"p90", at(0.9)},
          {"p99", at(0.99)},
          {"max", at(1)}};
}

struct Summary {
  std::vector<double> ttft, tpot, itl, whole;
  int64_t failed = 0, good = 0, output_tokens = 0, cached_tokens = 0;
  std::string first_error;
};

Summary summarise(const BenchServeOptions& options, const std::vector<LoadRequest>& requests) {
  constexpr double kMs = 1e3;
  Summary s;
  for (const LoadRequest& request : requests) {
    if (!request.error.empty()) {
      if (s.failed++ == 0) s.first_error = request.error;
      continue;
    }
    const double ttft = request.first - request.sent;
    double tpot = 0;
    s.output_tokens += request.output_tokens;
    s.cached_tokens += request.cached_tokens;
    s.ttft.push_back(ttft);
    s.whole.push_back(request.last - request.sent);
    if (options.stream && request.output_tokens > 1) {
      tpot = (request.token_times.back() - request.first) /
             static_cast<double>(request.output_tokens - 1);
      s.tpot.push_back(tpot);
    }
    for (size_t i = 1; i < request.token_times.size(); ++i)
      s.itl.push_back(request.token_times[i] - request.token_times[i - 1]);
    s.good += (options.goodput_ttft_ms == 0 || ttft * kMs <= options.goodput_ttft_ms) &&
              (options.goodput_tpot_ms == 0 || tpot * kMs <= options.goodput_tpot_ms);
  }
  return s;
}

Json report_of(const BenchServeOptions& options, const Summary& s, double seconds,
               size_t requests) {
  return {{"requests", requests},
          {"failed", s.failed},
          {"seconds", seconds},
          {"concurrency", options.concurrency},
          {"request_rate", options.rate},
          {"stream", options.stream},
          {"output_tokens", s.output_tokens},
          {"cached_tokens", s.cached_tokens},
          {"requests_per_second", static_cast<double>(s.whole.size()) / seconds},
          {"output_tokens_per_second", static_cast<double>(s.output_tokens) / seconds},
          {"goodput_requests_per_second", static_cast<double>(s.good) / seconds},
          {"ttft_ms", percentiles(s.ttft)},
          {"tpot_ms", percentiles(s.tpot)},
          {"itl_ms", percentiles(s.itl)},
          {"request_ms", percentiles(s.whole)}};
}

std::string table_of(const Json& report) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1);
  text << report["requests"] << " requests, " << report["failed"] << " failed, in "
       << report["seconds"].get<double>() << " s: " << report["requests_per_second"].get<double>()
       << " requests/s (good: " << report["goodput_requests_per_second"].get<double>() << "), "
       << report["output_tokens_per_second"].get<double>() << " output tokens/s, "
       << report["cached_tokens"] << " prompt tokens from the cache\n";
  text << "ms                  mean       p50       p90       p99       max\n";
  for (const auto& [name, title] : {std::pair{"ttft_ms", "time to first token"},
                                    {"tpot_ms", "time per token "},
                                    {"itl_ms", "between tokens "},
                                    {"request_ms", "request        "}}) {
    if (report[name].is_null()) continue;
    text << std::left << std::setw(16) << std::string(title).substr(0, 16) << std::right;
    for (const char* part : {"mean", "p50", "p90", "p99", "max"})
      text << std::setw(10) << report[name][part].get<double>();
    text << "\n";
  }
  return text.str();
}

}  // namespace

void bench_serve(const BenchServeOptions& options) {
  const LoadTarget target{options.host, options.port, options.api_key};
  fetch(target, "/health");
  auto requests = options.dataset.empty() ? synthetic(options) : from_file(options);
  set_streams(options.stream, requests);
  set_arrivals(options, requests);
  const double seconds = run_load(target, requests, options.concurrency);
  const Summary summary = summarise(options, requests);
  const Json report = report_of(options, summary, seconds, requests.size());
  print(options.json ? report.dump(2) + "\n" : table_of(report));
  if (summary.failed > 0)
    fail(summary.failed, " requests failed, the first: ", summary.first_error);
}

}  // namespace replayssm::cli
