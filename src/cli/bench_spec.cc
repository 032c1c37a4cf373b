#include "cli/bench_spec.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "cli/line_plot.h"
#include "cli/median.h"
#include "cli/progress.h"
#include "cli/setup.h"
#include "core/check.h"
#include "core/philox.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "model/tokenizer.h"
#include "replay/bytes.h"

namespace replayssm::cli {
namespace {

using Clock = std::chrono::steady_clock;

// conventional: the state is updated at every token. standard: decoding through the ring. The
// others verify drafts.
const std::vector<std::string>& all_modes() {
  static const std::vector<std::string> modes = {"conventional", "standard", "snapshot-spec",
                                                 "replay-spec"};
  return modes;
}

class Bench {
 public:
  Bench(const SpecOptions& options, const LoadedModel& loaded, int64_t batch_size)
      : options_(options), loaded_(loaded), model_(*loaded.model), batch_size_(batch_size) {}

  void run(const std::vector<std::vector<int32_t>>& prompts, const std::vector<std::string>& modes);
  SpecReport report(const std::vector<std::string>& modes);

 private:
  EngineOptions engine_options(const std::string& mode) const;
  SpecResult measure(const std::string& mode, const std::vector<std::vector<int32_t>>& prompts);
  StageTimes time_stages(Engine& engine);
  int64_t request_bytes(const std::string& mode) const;
  int64_t memory_for_requests() const;

  const SpecOptions& options_;
  const LoadedModel& loaded_;
  Model& model_;
  int64_t batch_size_;
  std::map<std::string, std::vector<SpecResult>> results_;
  int64_t memory_ = 0;
};

EngineOptions Bench::engine_options(const std::string& mode) const {
  EngineOptions engine{.route = mode == "conventional" ? Route::kConventional : Route::kOutputOnly,
                       .ring = {.buffer_len = options_.state.buffer_len},
                       .state_dtype = state_dtype(options_.state, model_.config()),
                       .read_dtype = mode == "standard" || mode == "replay-spec"
                                         ? options_.state.read_dtype
                                         : std::nullopt};
  engine.max_num_seqs = batch_size_;
  engine.max_num_batched_tokens = std::max(options_.limits.batched_tokens(), batch_size_);
  engine.max_model_len = options_.limits.max_model_len;
  engine.memory_utilization = options_.limits.gpu_memory_utilization;
  if (mode.ends_with("spec")) {
    engine.speculative = options_.speculative;
    engine.speculative->snapshots = mode == "snapshot-spec";
    engine.draft_model = loaded_.draft_model.get();
  }
  return engine;
}

SpeculationStats difference(const SpeculationStats& to, const SpeculationStats& from) {
  SpeculationStats d = to;
  d.windows -= from.windows;
  d.kept_tokens -= from.kept_tokens;
  d.verify_seconds -= from.verify_seconds;
  d.commit_seconds -= from.commit_seconds;
  d.draft_seconds -= from.draft_seconds;
  for (size_t i = 0; i < from.proposed.size(); ++i) {
    d.proposed[i] -= from.proposed[i];
    d.accepted[i] -= from.accepted[i];
  }
  return d;
}

SpecResult Bench::measure(const std::string& mode,
                          const std::vector<std::vector<int32_t>>& prompts) {
  Engine engine(model_, nullptr, engine_options(mode));
  memory_ = memory_for_requests();
  if (engine.memory_plan().total > 0)
    memory_ = engine.memory_plan().limit - engine.memory_plan().used;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request;
    request.prompt = prompts[i];
    request.max_tokens = options_.limits.max_model_len;
    request.ignore_eos = true;
    request.sampling = options_.sampling;
    request.sampling.seed += i;
    engine.add(std::move(request));
  }
  const auto step = [&] { return static_cast<int64_t>(engine.step().size()); };
  const auto prompts_left = [&] {
    const auto running = engine.running_requests();
    return std::ssize(running) < batch_size_ ||
           std::ranges::any_of(running, &RunningRequest::prefilling);
  };
  while (prompts_left()) step();
  for (int64_t i = 0; i < options_.warmup_steps; ++i) step();
  const SpeculationStats before = engine.stats().speculation;
  const auto start = Clock::now();
  int64_t tokens = 0;
  for (int64_t i = 0; i < options_.num_steps; ++i) tokens += step();
  const std::chrono::duration<double> took = Clock::now() - start;
  if (engine.running() < batch_size_)
    fail("--max-model-len: expected room for all steps, got ", options_.limits.max_model_len);
  const SpeculationStats stats = difference(engine.stats().speculation, before);
  const auto steps = static_cast<double>(options_.num_steps);
  const auto of_step = [&](double seconds) { return seconds * 1e3 / steps; };
  SpecResult result{
      .mode = mode,
      .tokens_per_second = static_cast<double>(tokens) / took.count(),
      .length = static_cast<double>(tokens) / steps / static_cast<double>(batch_size_),
      .verify_ms = of_step(took.count()),
      .step_ms = of_step(took.count())};
  if (mode.ends_with("spec")) {
    result.verify_ms = of_step(stats.verify_seconds);
    result.draft_ms = of_step(stats.draft_seconds);
    result.commit_ms = of_step(stats.commit_seconds);
    result.accepted = stats.accepted_shares();
  }
  result.stages = time_stages(engine);
  if (engine.running() < batch_size_)
    fail("--max-model-len: expected room for all steps, got ", options_.limits.max_model_len);
  return result;
}

// Steps whose stages alone count.
StageTimes Bench::time_stages(Engine& engine) {
  constexpr int kSteps = 8;
  model_.time_stages(true);
  for (int i = 0; i < 2; ++i) engine.step();  // what happens once happens here
  model_.stage_times() = {};
  for (int i = 0; i < kSteps; ++i) engine.step();
  StageTimes times = model_.stage_times();
  model_.time_stages(false);
  for (const Stage stage : kStages) times[stage] /= kSteps;
  return times;
}

// Snapshots as engines without a ring keep them: a state per token of a window and no checkpoint
// besides.
int64_t Bench::request_bytes(const std::string& mode) const {
  const ModelConfig& config = model_.config();
  EngineOptions engine = engine_options(mode);
  engine.ring.conv_kernel = static_cast<int32_t>(config.conv_kernel);
  if (engine.speculative)
    engine.ring.max_window = static_cast<int32_t>(engine.speculative->max_window());
  const DType dtype = model_.activation_dtype();
  int64_t states =
      SlotPool::bytes_per_slot(config, engine.ring, engine.state_dtype, dtype, engine.read_dtype);
  if (mode == "conventional" || mode == "snapshot-spec") {
    const int64_t copies = mode == "conventional" ? 1 : engine.ring.max_window;
    const int64_t conv_row = conv_channels(config) * dtype_bytes(dtype);
    const int64_t state = checkpoint_bytes(recurrent_shape(config), engine.state_dtype);
    states = config.recurrent_layers() *
             (copies * state + conv_rows(config.conv_kernel, engine.ring.max_window) * conv_row);
  }
  return states + KvPool::blocks_for(options_.limits.max_model_len) *
                      (config.attention_layers() > 0 ? KvPool::bytes_per_block(config, dtype) : 0);
}

int64_t Bench::memory_for_requests() const { return machine_memory() - model_.weight_bytes(); }

void Bench::run(const std::vector<std::vector<int32_t>>& prompts,
                const std::vector<std::string>& modes) {
  Progress progress("decoding");
  const int64_t total = options_.repeats * std::ssize(modes);
  int64_t done = 0;
  for (int64_t repeat = 0; repeat < options_.repeats; ++repeat) {
    for (const std::string& mode : modes) {
      results_[mode].push_back(measure(mode, prompts));
      progress.update(++done, total);
    }
  }
}

SpecReport Bench::report(const std::vector<std::string>& modes) {
  SpecReport report{.method = method_name(options_.speculative.method),
                    .batch_size = batch_size_,
                    .tokens = options_.speculative.tokens,
                    .simulated_length = options_.speculative.simulate_length,
                    .memory = memory_,
                    .max_model_len = options_.limits.max_model_len};
  for (const std::string& mode : modes) {
    std::vector<SpecResult>& runs = results_.at(mode);
    const auto median_of = [&](auto member) {
      std::vector<double> values(runs.size());
      std::ranges::transform(runs, values.begin(), member);
      return median(std::move(values));
    };
    SpecResult result = runs.back();
    for (const auto member :
         {&SpecResult::tokens_per_second, &SpecResult::length, &SpecResult::verify_ms,
          &SpecResult::draft_ms, &SpecResult::commit_ms, &SpecResult::step_ms})
      result.*member = median_of(member);
    result.request_bytes = request_bytes(mode);
    result.most_requests = memory_ / result.request_bytes;
    report.results.push_back(std::move(result));
  }
  return report;
}

// Random tokens, or pieces of the text.
std::vector<std::vector<int32_t>> make_prompts(const SpecOptions& options,
                                               const std::filesystem::path& folder, int64_t vocab,
                                               int64_t count) {
  std::vector<int32_t> ids;
  const int64_t wanted = count * options.prompt_len;
  if (options.text.empty()) {
    for (int64_t i = 0; i < wanted; ++i) {
      const double random = uniform(options.sampling.seed, i);
      ids.push_back(static_cast<int32_t>(random * static_cast<double>(vocab)));
    }
  } else {
    ids = Tokenizer(folder).encode(read_text(options.text, "--text"));
    if (std::ssize(ids) < wanted) {
      fail("--text ", options.text, ": expected at least ", wanted, " tokens, got ", ids.size());
    }
  }
  std::vector<std::vector<int32_t>> prompts;
  prompts.reserve(static_cast<size_t>(count));
  const int64_t apart = std::ssize(ids) / count;
  for (int64_t i = 0; i < count; ++i)
    prompts.emplace_back(ids.begin() + i * apart, ids.begin() + i * apart + options.prompt_len);
  return prompts;
}

}  // namespace

void bench_spec(const SpecOptions& options) {
  PlotFile figure(options.plot);
  const auto folder = find_model(options.model);
  const LoadedModel loaded = load_model(folder, options.model, options.speculative);
  const std::vector<std::string>& modes = options.modes.empty() ? all_modes() : options.modes;
  const int64_t vocab = loaded.model->config().vocab_size;
  std::vector<SpecReport> reports;
  for (const int64_t batch_size : options.batch_sizes) {
    Bench bench(options, loaded, batch_size);
    bench.run(make_prompts(options, folder, vocab, batch_size), modes);
    reports.push_back(bench.report(modes));
    reports.back().model = model_name(folder);
    if (!options.json) print(table(reports.back()));
  }
  if (options.json) print(json(reports));
  if (!options.plot.empty()) figure.write(plot(reports));
}

}  // namespace replayssm::cli
