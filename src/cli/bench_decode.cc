#include "cli/bench_decode.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cli/decode_report.h"
#include "cli/line_plot.h"
#include "cli/median.h"
#include "cli/progress.h"
#include "cli/setup.h"
#include "core/check.h"
#include "core/philox.h"
#include "engine/rows.h"
#include "engine/sampler.h"

namespace replayssm::cli {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

// What a route's steps read in place of the state.
std::optional<DType> read_dtype(const DecodeOptions& options, Route route) {
  return route == Route::kConventional ? std::nullopt : options.state.read_dtype;
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The steps as they are run: everything in whole flush cycles.
struct Plan {
  int64_t block, warmup, steps;
  int64_t timed;  // more of them, where stages are timed apart

  explicit Plan(const DecodeOptions& options) {
    constexpr int64_t kShortestBlock = 16;  // steps; shorter ones would measure the change of route
    const int64_t cycle = options.state.buffer_len;
    block = round_up(kShortestBlock, cycle);
    warmup = round_up(std::max<int64_t>(options.warmup_steps, 1), cycle);
    steps = round_up(options.num_steps, block);
    timed = cycle + 2;
  }
};

// One block of steps, per step.
struct Block {
  double ms = 0;
  StageTimes stages;
};

// The rows of one route: every row its own greedy text.
class RouteRun {
 public:
  RouteRun(Model& model, Route route, const DecodeOptions& options, int64_t context)
      : model_(model), route_(route), options_(options), context_(context) {}

  // Takes and gives back the memory of the rows.
  void open();
  void close() { rows_.reset(); }
  void prefill(const std::vector<int32_t>& prompts);
  Block run(int64_t steps);
  // Runs steps whose stages alone count.
  void time_stages(int64_t steps);
  void record(const Block& block) { blocks_.push_back(block); }
  RouteResult result(const StateTraffic& traffic);

 private:
  void choose(std::span<const float> logits, size_t first);
  void stagger();

  Model& model_;
  Route route_;
  const DecodeOptions& options_;
  int64_t context_;
  std::optional<Rows> rows_;
  std::vector<int32_t> next_;  // of each row
  std::vector<Block> blocks_;
  std::optional<StageTimes> stages_;  // where they were timed apart
};

void RouteRun::open() {
  rows_.emplace(model_, RowsOptions{.route = route_,
                                    .buffer_len = options_.state.buffer_len,
                                    .state_dtype = state_dtype(options_.state, model_.config()),
                                    .rows = options_.batch_size,
                                    .context = context_,
                                    .max_tokens = options_.limits.batched_tokens(),
                                    .read_dtype = read_dtype(options_, route_)});
}

// The next token of row first + i is the likeliest of logits row i.
void RouteRun::choose(std::span<const float> logits, size_t first) {
  const auto vocab = static_cast<size_t>(model_.config().vocab_size);
  for (size_t i = 0; i * vocab < logits.size(); ++i) {
    next_[first + i] = sample(logits.subspan(i * vocab, vocab), {}, {}, {}, 0).id;
  }
}

// Spreads the rows' flushes evenly over a cycle.
void RouteRun::stagger() {
  const int64_t cycle = options_.state.buffer_len;
  const int64_t spread = std::min(cycle, options_.batch_size);
  for (int64_t row = 0; row < options_.batch_size; ++row) {
    rows_->set_ring_limit(row, static_cast<int32_t>(1 + row * cycle / spread % cycle));
  }
}

// `prompts`: [batch, prompt_len]. As many rows together as fit a pass, or one row in pieces.
void RouteRun::prefill(const std::vector<int32_t>& prompts) {
  rows_->reset();
  next_.resize(options_.batch_size);
  const int64_t length = options_.prompt_len;
  const int64_t together = std::max<int64_t>(1, options_.limits.batched_tokens() / length);
  const int64_t piece = std::min(length, options_.limits.batched_tokens());
  for (int64_t first = 0; first < options_.batch_size; first += together) {
    const int64_t count = std::min(together, options_.batch_size - first);
    for (int64_t begin = 0; begin < length; begin += piece) {
      const int64_t tokens = std::min(piece, length - begin);
      std::vector<RowTokens> windows;
      std::vector<int32_t> wanted;
      for (int64_t row = first; row < first + count; ++row) {
        windows.push_back({row, std::span(prompts).subspan(row * length + begin, tokens)});
        wanted.push_back(static_cast<int32_t>((row - first + 1) * tokens - 1));
      }
      if (begin + tokens < length) wanted.clear();
      choose(rows_->prefill(windows, wanted), static_cast<size_t>(first));
    }
  }
  stagger();
}

Block RouteRun::run(int64_t steps) {
  model_.stage_times() = {};
  const auto start = Clock::now();
  const auto tokens = rows_->decode_greedy(next_, steps);
  if (std::ranges::count(tokens, -1) > 0) fail("logits that are no numbers");
  next_.assign(tokens.begin(), tokens.end());
  const auto count = static_cast<double>(steps);
  Block block{.ms = milliseconds(Clock::now() - start) / count, .stages = {}};
  for (const Stage stage : kStages) {
    block.stages[stage] = model_.stage_times()[stage] * 1e3 / count;
  }
  return block;
}

void RouteRun::time_stages(int64_t steps) {
  model_.time_stages(true);
  run(2);  // what happens once happens here
  stages_ = run(steps).stages;
  model_.time_stages(false);
}

RouteResult RouteRun::result(const StateTraffic& traffic) {
  const auto median_of = [&](auto value) {
    std::vector<double> values;
    values.reserve(blocks_.size());
    for (const Block& block : blocks_) values.push_back(value(block));
    return median(std::move(values));
  };
  RouteResult result{.route = route_,
                     .ms_per_step = median_of([](const Block& block) { return block.ms; }),
                     .stages = {},
                     .traffic = traffic};
  for (const Stage stage : kStages) {
    result.stages[stage] =
        stages_ ? (*stages_)[stage] : median_of([&](Block block) { return block.stages[stage]; });
  }
  return result;
}

std::vector<int32_t> random_prompts(const DecodeOptions& options, int64_t vocab) {
  std::vector<int32_t> ids(options.batch_size * options.prompt_len);
  for (size_t i = 0; i < ids.size(); ++i) {
    const double random = uniform(options.seed, static_cast<int64_t>(i));
    ids[i] = static_cast<int32_t>(random * static_cast<double>(vocab));
  }
  return ids;
}

// Of all rows and layers.
StateTraffic step_traffic(const DecodeOptions& options, const Model& model, Route route) {
  const ModelConfig& config = model.config();
  const auto times = static_cast<double>(config.recurrent_layers() * options.batch_size);
  const StateTraffic one = state_traffic(recurrent_shape(config),
                                         {.route = route,
                                          .buffer_len = options.state.buffer_len,
                                          .checkpoint_dtype = state_dtype(options.state, config),
                                          .activation_dtype = model.activation_dtype(),
                                          .read_copy = read_dtype(options, route)});
  return one * times;
}

class Bench {
 public:
  Bench(const DecodeOptions& options, const LoadedModel& loaded);
  void run();
  DecodeReport report();

 private:
  void run_interleaved(const std::vector<int32_t>& prompts);
  void run_apart(const std::vector<int32_t>& prompts);
  void measure_bandwidth();

  const DecodeOptions& options_;
  Plan plan_;
  Model& model_;
  bool on_device_;
  int64_t checkpoint_bytes_;
  int64_t probe_bytes_;
  std::optional<BandwidthProbe> probe_;  // of the host
  std::vector<std::unique_ptr<RouteRun>> routes_;
  std::vector<Bandwidth> bandwidth_;
};

constexpr std::array kRoutes = {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly};
constexpr int64_t kLeastProbeBytes = int64_t{256} << 20;  // beyond any cache
constexpr int64_t kDeviceProbeBytes = int64_t{2} << 30;

int64_t all_checkpoint_bytes(const DecodeOptions& options, const Model& model) {
  return static_cast<int64_t>(step_traffic(options, model, Route::kConventional).read_modify_write /
                              2);
}

// Of one route.
int64_t all_read_copy_bytes(const DecodeOptions& options, const Model& model) {
  if (!options.state.read_dtype) return 0;
  const ModelConfig& config = model.config();
  return config.recurrent_layers() * options.batch_size *
         read_copy_bytes(recurrent_shape(config), *options.state.read_dtype);
}

// The system hands out more memory than it has, and ends the program once that is used.
int64_t checked_checkpoint_bytes(const DecodeOptions& options, bool on_device, const Model& model) {
  const int64_t bytes = all_checkpoint_bytes(options, model);
  if (on_device) return bytes;
  const int64_t copies = all_read_copy_bytes(options, model);
  const double needed = static_cast<double>(bytes) * (kRoutes.size() + 1) +  // and the probe
                        static_cast<double>(copies) * (kRoutes.size() - 1);
  const auto memory = static_cast<double>(machine_memory());
  const auto weights = static_cast<double>(model.weight_bytes());
  if (needed > memory - weights) {
    fail("--batch-size: expected recurrent states within this machine's ",
         static_cast<int64_t>(memory / 1e6), " MB of memory less ",
         static_cast<int64_t>(weights / 1e6), " MB of weights, got ", options.batch_size,
         " sequences, which take ", static_cast<int64_t>(needed / 1e6), " MB");
  }
  return bytes;
}

Bench::Bench(const DecodeOptions& options, const LoadedModel& loaded)
    : options_(options),
      plan_(options),
      model_(*loaded.model),
      on_device_(model_.memory().capacity().total > 0),
      checkpoint_bytes_(checked_checkpoint_bytes(options, on_device_, model_)),
      probe_bytes_(on_device_ ? kDeviceProbeBytes : std::max(checkpoint_bytes_, kLeastProbeBytes)) {
  if (!on_device_) probe_.emplace(probe_bytes_, *loaded.threads);
  if (options.state.read_dtype)
    check_read_copy(*options.state.read_dtype, state_dtype(options.state, model_.config()),
                    Route::kOutputOnly);
  const int64_t context = options.prompt_len + plan_.warmup + plan_.steps + plan_.timed;
  const int64_t limit = model_.config().max_positions;
  if (limit > 0 && context > limit) {
    fail("--prompt-len, --warmup-steps and --num-steps: expected at most ", limit,
         " tokens in all, the model's limit, got ", context);
  }
  for (const Route route : kRoutes) {
    routes_.push_back(std::make_unique<RouteRun>(model_, route, options, context));
  }
}

void Bench::measure_bandwidth() {
  if (!probe_) return bandwidth_.push_back(cuda_bandwidth(probe_bytes_));
  constexpr int kPasses = 5;
  for (int pass = 0; pass < kPasses; ++pass) {
    bandwidth_.push_back(probe_->sample());
  }
}

void Bench::run() {
  const std::vector<int32_t> prompts = random_prompts(options_, model_.config().vocab_size);
  on_device_ ? run_apart(prompts) : run_interleaved(prompts);
}

// The routes' blocks take turns: what else happens on the host meets all of them.
void Bench::run_interleaved(const std::vector<int32_t>& prompts) {
  const int64_t blocks = plan_.steps / plan_.block;
  for (auto& route : routes_) route->open();
  Progress progress("decoding");
  for (int64_t repeat = 0; repeat < options_.repeats; ++repeat) {
    measure_bandwidth();
    for (auto& route : routes_) {
      route->prefill(prompts);
      route->run(plan_.warmup);
    }
    for (int64_t block = 0; block < blocks; ++block) {
      for (size_t i = 0; i < routes_.size(); ++i) {  // another route begins each time
        RouteRun& route = *routes_[(i + block) % routes_.size()];
        route.record(route.run(plan_.block));
      }
      progress.update(repeat * blocks + block + 1, options_.repeats * blocks);
    }
  }
  measure_bandwidth();
}

// One route at a time has the device's memory.
void Bench::run_apart(const std::vector<int32_t>& prompts) {
  const int64_t blocks = plan_.steps / plan_.block;
  const int64_t total = options_.repeats * std::ssize(routes_);
  measure_bandwidth();
  Progress progress("decoding");
  int64_t done = 0;
  for (auto& route : routes_) {
    route->open();
    for (int64_t repeat = 0; repeat < options_.repeats; ++repeat) {
      route->prefill(prompts);
      route->run(plan_.warmup);
      for (int64_t block = 0; block < blocks; ++block) route->record(route->run(plan_.block));
      progress.update(++done, total);
    }
    route->time_stages(options_.state.buffer_len);
    route->close();
  }
  measure_bandwidth();
}

DecodeReport Bench::report() {
  DecodeReport report{.dtype = model_.activation_dtype(),
                      .state_dtype = state_dtype(options_.state, model_.config()),
                      .read_dtype = options_.state.read_dtype,
                      .buffer_len = options_.state.buffer_len,
                      .batch_size = options_.batch_size,
                      .prompt_len = options_.prompt_len,
                      .warmup_steps = plan_.warmup,
                      .num_steps = plan_.steps,
                      .repeats = options_.repeats,
                      .block_steps = plan_.block,
                      .checkpoint_bytes = checkpoint_bytes_,
                      .read_copy_bytes = all_read_copy_bytes(options_, model_),
                      .probe_bytes = probe_bytes_,
                      .bandwidth = median(bandwidth_)};
  for (size_t i = 0; i < routes_.size(); ++i) {
    report.results.push_back(routes_[i]->result(step_traffic(options_, model_, kRoutes[i])));
  }
  return report;
}

DecodeReport measure(const DecodeOptions& options, const LoadedModel& loaded) {
  Bench bench(options, loaded);
  bench.run();
  DecodeReport report = bench.report();
  report.threads = loaded.threads->size();
  return report;
}

}  // namespace

void bench_decode(const DecodeOptions& options) {
  if (!options.plot.empty() && options.sweep.empty())
    fail("--plot: expected with --sweep, the batch sizes of the figure");
  PlotFile plot(options.plot);
  const auto folder = find_model(options.model);
  const LoadedModel loaded = load_model(folder, options.model);
  const std::vector<int64_t> sizes =
      options.sweep.empty() ? std::vector{options.batch_size} : options.sweep;
  std::vector<DecodeReport> reports;
  for (const int64_t size : sizes) {
    DecodeOptions one = options;
    one.batch_size = size;
    reports.push_back(measure(one, loaded));
    reports.back().model = model_name(folder);
  }
  if (options.sweep.empty()) return print(options.json ? json(reports[0]) : table(reports[0]));
  print(options.json ? sweep_json(reports) : sweep_table(reports));
  if (!options.plot.empty()) plot.write(sweep_plot(reports));
}

}  // namespace replayssm::cli
