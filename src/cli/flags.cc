#include "cli/flags.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/check.h"
#include "ops/cpu/target.h"

namespace replayssm::cli {
namespace {

int64_t parse_number(const std::string& flag, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 ||
      value > kMostTokens) {
    fail(flag, ": expected numbers from 0 to ", kMostTokens, ", got '", text, "'");
  }
  return value;
}

}  // namespace

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return DType::kFloat32;
}

Names read_copy_names() { return {"float16", "bfloat16", "float8_e4m3fn", "int8"}; }

void add_choice(CLI::App& app, const std::string& flag, const Names& names,
                const char* shown_default, const std::string& help,
                const std::function<void(const std::string&)>& use) {
  app.add_option_function<std::string>(flag, use, help)
      ->check(CLI::IsMember(names))
      ->type_name("NAME")
      ->default_str(shown_default);
}

void add_seed(CLI::App& app, uint64_t& seed, const std::string& help) {
  const auto parse = [&seed](const std::string& text) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
    if (error != std::errc() || end != text.data() + text.size()) {
      fail("--seed: expected a number from 0 to ", std::numeric_limits<uint64_t>::max(), ", got '",
           text, "'");
    }
  };
  app.add_option_function<std::string>("--seed", parse, help)->type_name("N")->default_str("0");
}

void add_switch(CLI::App& app, const std::string& flag, bool& value, const std::string& help) {
  app.add_flag(flag, value, help)->disable_flag_override();
}

CLI::Option* add_texts(CLI::App& app, const std::string& flag, Names& values,
                       const std::string& help) {
  const auto take = [&values](const CLI::results_t& results) {
    values = results;
    return true;
  };
  return app.add_option(flag, take, help)
      ->type_name("TEXT")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
}

std::vector<int64_t> parse_list(const std::string& flag, std::string_view text, bool ranges) {
  constexpr int64_t kMostItems = 1 << 20;
  std::vector<int64_t> values;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    const size_t dash = ranges ? item.find('-') : std::string_view::npos;
    const int64_t first = parse_number(flag, item.substr(0, dash));
    const int64_t last =
        dash == std::string_view::npos ? first : parse_number(flag, item.substr(dash + 1));
    if (last < first || last - first >= kMostItems) {
      fail(flag, ": expected an ascending range of at most ", kMostItems, ", got '", item, "'");
    }
    for (int64_t value = first; value <= last; ++value) values.push_back(value);
    begin = end + 1;
  }
  return values;
}

std::vector<int64_t> parse_batch_sizes(const std::string& flag, const std::string& text) {
  std::vector<int64_t> sizes = parse_list(flag, text, false);
  for (const int64_t size : sizes) {
    if (size < 1 || size > kMostSequences)
      fail(flag, ": expected batch sizes from 1 to ", kMostSequences, ", got ", size);
  }
  return sizes;
}

std::vector<int32_t> to_ids(const std::vector<int64_t>& values) {
  return {values.begin(), values.end()};
}

void add_cpu(CLI::App& app, int& threads) {
  add_number(app, "--threads", threads, 0, kMostThreads, "0 = one per available core");
  Names targets = cpu::target_names();
  targets.insert(targets.begin(), "auto");
  add_choice(app, "--cpu-target", targets, "auto",
             "Widest instruction set to use; auto = the widest here", [](const std::string& name) {
               if (name != "auto") cpu::limit_target(name);
             });
}

void add_model(CLI::App& app, ModelOptions& options) {
  app.add_option("MODEL", options.model, "A Hugging Face folder, or a bundled model's name")
      ->type_name("")
      ->required();
  add_choice(app, "--device", {"auto", "cpu", "cuda"}, "auto", "Where to run",
             [&](const std::string& name) { options.device = name; });
  add_choice(app, "--dtype", {"auto", "float32", "bfloat16"}, "auto",
             "Activations, KV cache and ring; auto = bfloat16", [&](const std::string& name) {
               if (name != "auto") options.dtype = dtype_named(name);
             });
  add_choice(app, "--load-format", {"auto", "dummy"}, "auto",
             "Weights; dummy = random ones, MODEL may be a published model's shape",
             [&](const std::string& name) { options.dummy_weights = name == "dummy"; });
  add_cpu(app, options.threads);
}

void add_state_dtype(CLI::App& app, StateOptions& options) {
  add_choice(app, "--mamba-ssm-cache-dtype", {"float32", "bfloat16", "float16"},
             "as the model's files say", "The recurrent state",
             [&](const std::string& name) { options.state_dtype = dtype_named(name); });
}

void add_read_dtype(CLI::App& app, StateOptions& options) {
  add_choice(app, "--replayssm-read-dtype", read_copy_names(), "none",
             "Replay steps read such a copy of the state",
             [&](const std::string& name) { options.read_dtype = dtype_named(name); });
}

void add_state(CLI::App& app, StateOptions& options) {
  add_state_dtype(app, options);
  add_number(app, "--replayssm-buffer-len", options.buffer_len, 1, kMostBuffer,
             "Most tokens that a ring holds before it is folded into the state");
}

void add_route(CLI::App& app, RouteOptions& options) {
  app.add_flag("--use-replayssm,!--no-use-replayssm", options.use_replayssm,
               "Decode through ReplaySSM (the default), or update the state at every token")
      ->disable_flag_override()
      ->each([&](const std::string& value) { options.asked = value == "true"; });
  add_choice(app, "--replayssm-route", {"output_only", "state_and_output"}, "output_only",
             "How a step reads state and ring", [&](const std::string& name) {
               options.replay_route =
                   name == "output_only" ? Route::kOutputOnly : Route::kStateAndOutput;
             });
}

void add_speculation(CLI::App& app, SpeculationOptions& options) {
  app.add_option_function<std::string>(
         "--speculative-config",
         [&](const std::string& text) { options.config = parse_speculative_config(text); },
         R"(Draft tokens, e.g. '{"method": "ngram|suffix|mtp|draft_model", "num_speculative_tokens": 4}')")
      ->type_name("JSON");
  app.add_flag_function(
         "--use-replayssm-spec,!--no-use-replayssm-spec",
         [&](int64_t count) { options.use_replayssm_spec = count > 0; },
         "Verify drafts through the ring (the default), or store a state per token")
      ->disable_flag_override();
}

std::optional<SpeculativeConfig> speculation_of(const SpeculationOptions& options,
                                                const RouteOptions& route) {
  if (route.asked && options.use_replayssm_spec.value_or(false)) {
    fail(
        "--use-replayssm and --use-replayssm-spec: expected one of them, got both: the first "
        "decodes without drafts");
  }
  if (!options.config) {
    if (options.use_replayssm_spec)
      fail("--use-replayssm-spec: expected a --speculative-config, got none");
    return {};
  }
  SpeculativeConfig config = *options.config;
  config.snapshots = !options.use_replayssm_spec.value_or(true);
  if (!route.use_replayssm && !config.snapshots) {
    fail(
        "--no-use-replayssm: expected --no-use-replayssm-spec with --speculative-config, which "
        "stores a state per token, got drafts that go through the ring");
  }
  return config;
}

void add_max_num_seqs(CLI::App& app, LimitOptions& options) {
  add_number(app, "--max-num-seqs", options.max_num_seqs, 1, kMostSequences,
             "Sequences that are decoded together");
}

void add_max_num_batched_tokens(CLI::App& app, LimitOptions& options) {
  add_number(app, "--max-num-batched-tokens", options.max_num_batched_tokens, 1, kMostTokens,
             "Tokens of one forward pass; longer prompts are cut")
      ->default_str("512");
}

void add_gpu_memory_utilization(CLI::App& app, LimitOptions& options) {
  app.add_option_function<double>(
         "--gpu-memory-utilization",
         [&](double value) {
           if (!(value > 0 && value <= 1))  // a NaN is neither
             fail("--gpu-memory-utilization: expected more than 0 and at most 1, got ", value);
           options.gpu_memory_utilization = value;
         },
         "Part of a CUDA device's memory for weights, states and KV cache")
      ->type_name("X")
      ->default_str("0.9");
}

void add_decoding(CLI::App& app, DecodingOptions& options) {
  add_route(app, options.route);
  add_state(app, options.state);
  add_read_dtype(app, options.state);
  add_speculation(app, options.speculation);
  add_max_num_seqs(app, options.limits);
  add_max_num_batched_tokens(app, options.limits);
  add_gpu_memory_utilization(app, options.limits);
  add_number(app, "--max-model-len", options.limits.max_model_len, 1, kMostTokens,
             "Longest prompt and output together")
      ->default_str("the model's own limit");
}

}  // namespace replayssm::cli
