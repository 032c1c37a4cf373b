#include "cli/bench_op.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <string_view>

#include "cli/median.h"
#include "cli/op_report.h"
#include "cli/op_run.h"
#include "cli/progress.h"
#include "cli/setup.h"
#include "core/check.h"

namespace replayssm::cli {
namespace {

enum class Regime : uint8_t { kDecode, kVerify, kSnapshots, kPrefill, kFold, kConv };

struct OpEntry {
  const char* name;
  Regime regime;
  Family family;    // of its own shape
  bool any_family;  // the op is the same for all of them
};
constexpr std::array kOps = {
    OpEntry{"mamba2_decode", Regime::kDecode, Family::kMamba2, false},
    OpEntry{"gdn_decode", Regime::kDecode, Family::kGatedDelta, false},
    OpEntry{"kda_decode", Regime::kDecode, Family::kKimiDelta, false},
    OpEntry{"mamba2_verify", Regime::kVerify, Family::kMamba2, false},
    OpEntry{"gdn_verify", Regime::kVerify, Family::kGatedDelta, false},
    OpEntry{"kda_verify", Regime::kVerify, Family::kKimiDelta, false},
    OpEntry{"mamba2_snapshots", Regime::kSnapshots, Family::kMamba2, false},
    OpEntry{"gdn_snapshots", Regime::kSnapshots, Family::kGatedDelta, false},
    OpEntry{"kda_snapshots", Regime::kSnapshots, Family::kKimiDelta, false},
    OpEntry{"prefill", Regime::kPrefill, Family::kGatedDelta, true},
    OpEntry{"fold", Regime::kFold, Family::kGatedDelta, true},
    OpEntry{"conv", Regime::kConv, Family::kGatedDelta, true}};

struct ModelShape {
  const char* name;
  RecurrentShape shape;
};
constexpr std::array kModelShapes = {
    ModelShape{"nemotron-3-nano-4b", {Family::kMamba2, 96, 8, 80, 128}},
    ModelShape{"qwen3.5-4b", {Family::kGatedDelta, 32, 16, 128, 128}},
    ModelShape{"kimi-linear-48b", {Family::kKimiDelta, 32, 32, 128, 128}}};

const OpEntry& op_named(std::string_view name) {
  const auto* entry =
      std::ranges::find_if(kOps, [&](const OpEntry& op) { return name == op.name; });
  REPLAYSSM_CHECK(entry != kOps.end(), "op=", name);
  return *entry;
}

RecurrentShape op_shape(const OpOptions& options, const OpEntry& op) {
  const auto* entry = std::ranges::find_if(kModelShapes, [&](const ModelShape& model) {
    return options.model_shape.empty() ? model.shape.family == op.family
                                       : options.model_shape == model.name;
  });
  REPLAYSSM_CHECK(entry != kModelShapes.end(), "model_shape=", options.model_shape);
  RecurrentShape shape = entry->shape;
  if (shape.family != op.family && !op.any_family) {
    fail("--model-shape: expected a model of the family ", family_name(op.family), ", got ",
         entry->name);
  }
  if (options.heads > 0) shape.heads = options.heads;
  if (options.key_heads > 0) shape.key_heads = options.key_heads;
  if (options.head_dim > 0) shape.head_dim = options.head_dim;
  if (options.state_dim > 0) shape.state_dim = options.state_dim;
  if (shape.heads % shape.key_heads != 0) {
    fail("--key-heads: expected a divisor of the ", shape.heads, " heads, got ", shape.key_heads);
  }
  return shape;
}

int64_t op_window(const OpOptions& options, const OpEntry& op) {
  constexpr int64_t kVerify = 5, kPrompt = 512;
  const bool single = op.regime == Regime::kDecode || op.regime == Regime::kFold;
  if (single && options.window > 1) {
    fail("--window: expected 1 for ", op.name, ", got ", options.window);
  }
  if (options.window > 0) return options.window;
  if (op.regime == Regime::kPrefill) return kPrompt;
  return op.regime == Regime::kVerify || op.regime == Regime::kSnapshots ? kVerify : 1;
}

// Variants of one op, all from one schedule.
struct VariantList {
  DecodeSchedule schedule;
  std::vector<OpVariant> variants{};

  void add(std::string name, OpKind kind) { variants.push_back({std::move(name), kind, schedule}); }
  void step(std::string name, Route route, int64_t tokens) {
    add(std::move(name), OpKind::kStep);
    DecodeSchedule& own = variants.back().schedule;
    own.route = route;
    own.window = tokens;
    own.accepted = std::min(tokens, schedule.accepted);
  }
  // The conventional update, token by token.
  void tokens(int64_t count) {
    add("conventional, by token", OpKind::kTokens);
    variants.back().schedule.route = Route::kConventional;
    variants.back().schedule.window = count;
  }
  void with_copies(const std::string& name, OpKind kind, const std::vector<DType>& dtypes) {
    for (const DType dtype : dtypes) {
      add(name + " + " + dtype_name(dtype), kind);
      variants.back().schedule.read_copy = dtype;
    }
  }
};

// The baseline comes first.
std::vector<OpVariant> op_variants(const OpOptions& options, const OpEntry& op) {
  const int64_t window = op_window(options, op);
  const bool copies =
      op.regime == Regime::kDecode || op.regime == Regime::kVerify || op.regime == Regime::kFold;
  if (!copies && !options.read_dtypes.empty()) {
    fail("--read-dtype: expected none for ", op.name, ", which reads no copy");
  }
  if (options.accepted > window) {
    fail("--accepted: expected at most the window's ", window, " tokens, got ", options.accepted);
  }
  VariantList list{{.route = Route::kOutputOnly,
                    .buffer_len = options.buffer_len,
                    .window = window,
                    .accepted = options.accepted > 0 ? options.accepted : window,
                    .checkpoint_dtype = options.state_dtype,
                    .activation_dtype = options.dtype}};
  switch (op.regime) {
    case Regime::kDecode:
    case Regime::kVerify:
      if (op.regime == Regime::kVerify) list.add("snapshots", OpKind::kSnapshots);
      list.step(window > 1 ? "conventional, 1 token" : "conventional", Route::kConventional, 1);
      list.step("state_and_output", Route::kStateAndOutput, window);
      list.step("output_only", Route::kOutputOnly, window);
      list.with_copies("output_only", OpKind::kStep, options.read_dtypes);
      if (window > 1) list.step("output_only, 1 token", Route::kOutputOnly, 1);
      break;
    case Regime::kSnapshots:
      list.add("snapshots", OpKind::kSnapshots);
      list.step("conventional, 1 token", Route::kConventional, 1);
      break;
    case Regime::kPrefill:
      list.tokens(window);
      list.add("prefill", OpKind::kPrefill);
      break;
    case Regime::kFold:
      list.tokens(options.buffer_len);
      list.add("fold", OpKind::kFold);
      list.with_copies("fold", OpKind::kFold, options.read_dtypes);
      break;
    case Regime::kConv:
      list.add("shifting window", OpKind::kShiftingConv);
      list.add("conv", OpKind::kConv);
      break;
  }
  return list.variants;
}

// What the system could hand out without taking it from anybody.
double available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view kName = "MemAvailable:";
    if (line.starts_with(kName)) return std::stod(line.substr(kName.size())) * 1024;
  }
  return static_cast<double>(machine_memory()) / 2;
}

constexpr double kGib = 1 << 30;
constexpr int64_t kLeastProbeBytes = int64_t{256} << 20;
constexpr int64_t kMostProbeBytes = int64_t{1} << 30;  // far beyond any cache

// Of the checkpoints, or of what stands for them.
int64_t state_bytes_of_slot(const OpSetup& setup) {
  const OpVariant& first = setup.variants.front();
  return first.kind == OpKind::kShiftingConv
             ? slot_bytes(setup)
             : checkpoint_bytes(setup.shape, first.schedule.checkpoint_dtype);
}

int64_t op_calls(const OpOptions& options, const OpSetup& setup) {
  constexpr double kDefaultGib = 4;
  const double available = available_bytes();
  const auto batch = static_cast<double>(setup.batch);
  const double all = static_cast<double>(slot_bytes(setup)) * batch, inputs = call_bytes(setup);
  const double state = static_cast<double>(state_bytes_of_slot(setup)) * batch;
  const double fits = (available / 2 - static_cast<double>(kMostProbeBytes) - inputs) / all;
  const double wanted = options.state_gib.value_or(kDefaultGib) * kGib / state;
  if (all + inputs > available) {
    fail("bench op: expected the states, inputs and outputs of a call to fit into the ",
         static_cast<int64_t>(available / 1e6), " MB of memory available, got ",
         static_cast<int64_t>((all + inputs) / 1e6), " MB");
  }
  if (options.state_gib && std::max(wanted, 1.0) * all + inputs > available) {
    fail("--state-gib: expected states that with rings and copies fit into the ",
         static_cast<int64_t>(available / 1e6), " MB of memory available, got ",
         static_cast<int64_t>(std::max(wanted, 1.0) * all / 1e6), " MB");
  }
  const double calls = options.state_gib ? wanted : std::min(wanted, fits);
  auto count = std::max<int64_t>(1, static_cast<int64_t>(calls));
  // The slots share out evenly over the flush cycles.
  int64_t cycles = 1;
  for (const OpVariant& variant : setup.variants)
    cycles = std::lcm(cycles, cycle_steps(variant.schedule));
  cycles /= std::gcd(cycles, setup.batch);
  if (count >= cycles) count -= count % cycles;
  return count;
}

OpSetup op_setup(const OpOptions& options) {
  const OpEntry& op = op_named(options.op);
  OpSetup setup{.shape = op_shape(options, op),
                .batch = options.batch_size,
                .variants = op_variants(options, op)};
  setup.calls = op_calls(options, setup);
  return setup;
}

OpReport measured(const OpOptions& options, const OpSetup& setup, ThreadPool& threads) {
  const int64_t state_bytes = setup.slots() * state_bytes_of_slot(setup);
  BandwidthProbe probe(std::clamp(state_bytes, kLeastProbeBytes, kMostProbeBytes), threads);
  const OpMemory memory(setup, threads);
  std::vector<std::unique_ptr<OpRun>> runs;
  runs.reserve(setup.variants.size());
  for (const OpVariant& variant : setup.variants)
    runs.push_back(std::make_unique<OpRun>(setup, variant, memory, threads));

  Progress progress("measuring");
  std::vector<Bandwidth> bandwidth;
  std::vector<std::vector<double>> seconds(runs.size());
  for (int64_t repeat = 0; repeat < options.repeats; ++repeat) {
    bandwidth.push_back(probe.sample());
    for (size_t i = 0; i < runs.size(); ++i) {  // another variant begins each time
      const size_t run = (i + static_cast<size_t>(repeat)) % runs.size();
      seconds[run].push_back(runs[run]->measure());
    }
    progress.update(repeat + 1, options.repeats);
  }
  bandwidth.push_back(probe.sample());

  OpReport report{.op = options.op,
                  .setup = setup,
                  .window = op_window(options, op_named(options.op)),
                  .threads = threads.size(),
                  .repeats = options.repeats,
                  .state_bytes = state_bytes,
                  .probe_bytes = probe.bytes(),
                  .bandwidth = median(bandwidth)};
  report.accepted = options.accepted > 0 ? options.accepted : report.window;
  for (size_t i = 0; i < runs.size(); ++i) {
    const OpVariant& variant = setup.variants[i];
    report.results.push_back({.name = variant.name,
                              .tokens = call_tokens(setup, variant),
                              .seconds = median(seconds[i]),
                              .traffic = call_traffic(setup, variant)});
  }
  return report;
}

template <class Entries>
std::vector<std::string> names_of(const Entries& entries) {
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const auto& entry : entries) names.emplace_back(entry.name);
  return names;
}

}  // namespace

std::vector<std::string> op_names() { return names_of(kOps); }
std::vector<std::string> model_shape_names() { return names_of(kModelShapes); }

void bench_op(const OpOptions& options) {
  const OpSetup setup = op_setup(options);
  ThreadPool threads(options.threads);
  const OpReport report = measured(options, setup, threads);
  print(options.json ? json(report) : table(report));
}

}  // namespace replayssm::cli
