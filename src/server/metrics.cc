#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <vector>

namespace replayssm::server {
namespace {

namespace prom = prometheus;
constexpr size_t kRoutes = 3;

prom::Histogram::BucketBoundaries decades(double first, int count) {
  prom::Histogram::BucketBoundaries bounds;
  for (int i = 0; i < count; ++i) {
    bounds.push_back(first);
    bounds.push_back(first * 2);
    bounds.push_back(first * 5);
    first *= 10;
  }
  return bounds;
}

// The latest values, for a median.
struct Recent {
  static constexpr size_t kMost = 128;
  std::vector<double> values;
  size_t next = 0;

  void add(double value) {
    if (values.size() < kMost) {
      values.push_back(value);
    } else {
      values[next++ % kMost] = value;
    }
  }
  double median() const {
    if (values.empty()) return 0;
    std::vector<double> sorted = values;
    std::ranges::nth_element(sorted, sorted.begin() + std::ssize(sorted) / 2);
    return sorted[sorted.size() / 2];
  }
};

}  // namespace

struct Metrics::Impl {
  prom::Counter& counter(const char* name, const char* help) {
    return prom::BuildCounter().Name(name).Help(help).Register(registry).Add({});
  }
  prom::Gauge& gauge(const char* name, const char* help, const prom::Labels& labels = {}) {
    return prom::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
  }
  prom::Histogram& histogram(const char* name, const char* help, double first, int count,
                             const prom::Labels& labels = {}) {
    return prom::BuildHistogram().Name(name).Help(help).Register(registry).Add(
        labels, decades(first, count));
  }
  prom::Histogram& step(Route route) {
    return histogram("replayssm_decode_step_seconds", "Time of steps that only decode", 1e-4, 5,
                     {{"route", route_name(route)}});
  }

  prom::Registry registry;
  prom::Family<prom::Counter>& requests = prom::BuildCounter()
                                              .Name("replayssm_requests_total")
                                              .Help("Answers, by path and status")
                                              .Register(registry);
  prom::Gauge& running = gauge("replayssm_requests_running", "Sequences that are computed");
  prom::Gauge& waiting = gauge("replayssm_requests_waiting", "Sequences that wait for memory");
  prom::Gauge& open = gauge("replayssm_connections", "Open connections");
  prom::Counter& prompt_tokens = counter("replayssm_prompt_tokens_total", "Tokens of prompts");
  prom::Counter& prefill_tokens =
      counter("replayssm_prefill_tokens_total", "Tokens of prompts that were computed");
  prom::Counter& output_tokens = counter("replayssm_generation_tokens_total", "Tokens made");
  prom::Counter& cached_tokens =
      counter("replayssm_cached_tokens_total", "Tokens of prompts whose states were there already");
  prom::Counter& preemptions = counter("replayssm_preemptions_total", "Sequences put back to wait");
  prom::Counter& swaps = counter("replayssm_swaps_total", "Of them kept their states on the host");
  prom::Counter& folds = counter("replayssm_folds_total", "Rings folded into checkpoints");
  prom::Counter& drafted =
      counter("replayssm_drafted_tokens_total", "Tokens that were guessed and verified");
  prom::Counter& accepted =
      counter("replayssm_accepted_tokens_total", "Of them the model's own choice");
  prom::Counter& evictions =
      counter("replayssm_prefix_evictions_total", "Snapshots of prefixes that made room");
  prom::Gauge& snapshots = gauge("replayssm_prefix_snapshots", "States of prefixes that are kept");
  prom::Gauge& prefix_blocks = gauge("replayssm_prefix_blocks", "Blocks of prefixes that are kept");
  prom::Gauge& free_blocks = gauge("replayssm_kv_blocks", "KV blocks", {{"state", "free"}});
  prom::Gauge& all_blocks = gauge("replayssm_kv_blocks", "KV blocks", {{"state", "all"}});
  prom::Gauge& state_bytes = gauge("replayssm_state_bytes", "Memory of recurrent states");
  prom::Histogram& ttft =
      histogram("replayssm_time_to_first_token_seconds", "From the request on", 1e-3, 5);
  prom::Histogram& inter_token =
      histogram("replayssm_inter_token_seconds", "Between tokens of a request", 1e-4, 5);
  prom::Histogram& whole = histogram("replayssm_request_seconds", "From request to end", 1e-3, 6);
  std::array<prom::Histogram*, kRoutes> steps{};
  std::array<Recent, kRoutes> recent_steps{};
  EngineStats last{};
};

Metrics::Metrics(const Engine& engine) : impl_(std::make_unique<Impl>()) {
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly})
    impl_->steps[static_cast<size_t>(route)] = &impl_->step(route);
  impl_->all_blocks.Set(static_cast<double>(engine.kv().blocks()));
  impl_->state_bytes.Set(static_cast<double>(engine.slots().bytes()));
}
Metrics::~Metrics() = default;

void Metrics::answered(const std::string& path, int status) {
  impl_->requests.Add({{"path", path}, {"status", std::to_string(status)}}).Increment();
}
void Metrics::prompt(int64_t tokens) {
  impl_->prompt_tokens.Increment(static_cast<double>(tokens));
}
void Metrics::first_token(double seconds) { impl_->ttft.Observe(seconds); }
void Metrics::next_token(double seconds) { impl_->inter_token.Observe(seconds); }
void Metrics::finished(double seconds) { impl_->whole.Observe(seconds); }
void Metrics::connections(int64_t count) { impl_->open.Set(static_cast<double>(count)); }

void Metrics::stepped(const StepReport& report) {
  const auto add = [](prom::Counter& counter, int64_t now, int64_t before) {
    if (now > before) counter.Increment(static_cast<double>(now - before));
  };
  Impl& m = *impl_;
  const EngineStats& now = report.stats;
  add(m.prefill_tokens, now.prefill_tokens, m.last.prefill_tokens);
  add(m.cached_tokens, now.cached_tokens, m.last.cached_tokens);
  add(m.preemptions, now.preemptions, m.last.preemptions);
  add(m.swaps, now.swaps, m.last.swaps);
  add(m.folds, now.folds, m.last.folds);
  const auto accepted_drafts = [](const SpeculationStats& s) { return s.kept_tokens - s.windows; };
  add(m.drafted, now.speculation.drafted_tokens, m.last.speculation.drafted_tokens);
  add(m.accepted, accepted_drafts(now.speculation), accepted_drafts(m.last.speculation));
  add(m.evictions, now.prefixes.evicted_snapshots, m.last.prefixes.evicted_snapshots);
  add(m.output_tokens, report.tokens, 0);
  m.last = now;
  m.running.Set(static_cast<double>(report.running));
  m.waiting.Set(static_cast<double>(report.waiting));
  m.snapshots.Set(static_cast<double>(now.prefixes.snapshots));
  m.prefix_blocks.Set(static_cast<double>(now.prefixes.nodes));
  m.free_blocks.Set(static_cast<double>(report.free_blocks));
  if (report.decode_tokens == 0 || report.prefill_tokens > 0) return;
  const auto route = static_cast<size_t>(report.route);
  m.steps[route]->Observe(report.seconds);
  m.recent_steps[route].add(report.seconds);
}

std::string Metrics::text() const {
  return prom::TextSerializer().Serialize(impl_->registry.Collect());
}

double Metrics::step_seconds(Route route) const {
  return impl_->recent_steps[static_cast<size_t>(route)].median();
}

}  // namespace replayssm::server
