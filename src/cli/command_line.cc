#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench_accuracy.h"
#include "cli/bench_decode.h"
#include "cli/bench_op.h"
#include "cli/generate.h"
#include "cli/logits.h"
#include "cli/sweep_flags.h"
#include "core/check.h"
#include "replayssm/ops.h"

namespace replayssm::cli {
namespace {

using Names = std::vector<std::string>;
using Command = std::function<void()>;

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostSequences = 1 << 16;
constexpr int64_t kMostBuffer = 4096;  // rows

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return DType::kFloat32;
}

// One of `names`, handed to `use`.
template <class Use>
void add_choice(CLI::App& app, const std::string& flag, const Names& names,
                const char* shown_default, const std::string& help, Use use) {
  app.add_option_function<std::string>(flag, use, help)
      ->check(CLI::IsMember(names))
      ->type_name("NAME")
      ->default_str(shown_default);
}

template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, T& value, int64_t least,
                        int64_t most, const std::string& help) {
  return app.add_option(flag, value, help)
      ->check(CLI::Range(least, most))
      ->type_name("N")
      ->capture_default_str();
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

// Every occurrence of the flag adds its argument as it stands.
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

int64_t parse_number(const std::string& flag, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 ||
      value > kMostTokens) {
    fail(flag, ": expected numbers from 0 to ", kMostTokens, ", got '", text, "'");
  }
  return value;
}

// "1,2,3" and, with `ranges`, "0-2,7".
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

std::vector<int32_t> to_ids(const std::vector<int64_t>& values) {
  return {values.begin(), values.end()};
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
  add_number(app, "--threads", options.threads, 0, kMostThreads, "0 = one per available core");
}

void add_state_dtype(CLI::App& app, StateOptions& options) {
  add_choice(app, "--mamba-ssm-cache-dtype", {"float32", "bfloat16", "float16"},
             "as the model's files say", "The recurrent state",
             [&](const std::string& name) { options.state_dtype = dtype_named(name); });
}

void add_state(CLI::App& app, StateOptions& options) {
  add_state_dtype(app, options);
  add_number(app, "--replayssm-buffer-len", options.buffer_len, 1, kMostBuffer,
             "Most tokens that a ring holds before it is folded into the state");
}

void add_route(CLI::App& app, RouteOptions& options) {
  app.add_flag("--use-replayssm,!--no-use-replayssm", options.use_replayssm,
               "Decode through ReplaySSM (the default), or update the state at every token")
      ->disable_flag_override();
  add_choice(app, "--replayssm-route", {"output_only", "state_and_output"}, "output_only",
             "How a step reads state and ring", [&](const std::string& name) {
               options.replay_route =
                   name == "output_only" ? Route::kOutputOnly : Route::kStateAndOutput;
             });
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

void add_sampling(CLI::App& app, SamplingParams& sampling) {
  const auto add = [&](const char* flag, double& value, const char* help) {
    app.add_option(flag, value, help)->type_name("X")->capture_default_str();
  };
  add("--temperature", sampling.temperature, "0 = greedy");
  add_number(app, "--top-k", sampling.top_k, 0, kMostTokens, "0 = all");
  add("--top-p", sampling.top_p, "Smallest set of tokens that is this likely");
  add("--min-p", sampling.min_p, "Least probability, relative to the likeliest token's");
  add("--repetition-penalty", sampling.repetition_penalty, "On tokens of prompt and output");
  add("--presence-penalty", sampling.presence_penalty, "On tokens of the output");
  add("--frequency-penalty", sampling.frequency_penalty, "On tokens of the output, per occurrence");
  add_seed(app, sampling.seed, "Of the random numbers");
  add_number(app, "--logprobs", sampling.logprobs, 0, kMostTokens,
             "Print one JSON line per token, with its log-probability and the N likeliest")
      ->default_str("");
}

void add_generate(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("generate", "Write on from a prompt");
  const auto options = std::make_shared<GenerateOptions>();
  add_model(app, options->model);
  auto* prompt = add_texts(app, "--prompt", options->prompts,
                           "The prompt; several are generated together and printed in order");
  app.add_option("--prompt-file", options->prompt_file,
                 "Read the prompt from a file; - = standard input")
      ->type_name("FILE")
      ->excludes(prompt)
      ->capture_default_str();
  auto* chat = app.add_flag("--chat", options->chat, "The prompt is a user's message")
                   ->disable_flag_override();
  app.add_option("--system", options->system, "System message of the chat")
      ->type_name("TEXT")
      ->needs(chat);
  add_number(app, "--max-tokens", options->max_tokens, 1, kMostTokens, "Longest output");
  add_texts(app, "--stop", options->stop, "End the output before this text; may be repeated");
  app.add_option_function<std::string>(
         "--stop-token-ids",
         [options](const std::string& text) {
           options->stop_ids = to_ids(parse_list("--stop-token-ids", text, false));
         },
         "End the output at these tokens")
      ->type_name("N,N,...");
  add_switch(app, "--ignore-eos", options->ignore_eos, "Go on past the end-of-text tokens");
  add_sampling(app, options->sampling);
  add_route(app, options->route);
  add_state(app, options->state);
  add_max_num_seqs(app, options->limits);
  add_max_num_batched_tokens(app, options->limits);
  add_number(app, "--max-model-len", options->limits.max_model_len, 1, kMostTokens,
             "Longest prompt and output together")
      ->default_str("the model's own limit");
  app.callback([options, &command] { command = [options] { generate(*options); }; });
}

void add_logits(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("logits", "Raw logits of given token ids");
  const auto options = std::make_shared<LogitsOptions>();
  add_model(app, options->model);
  app.add_option_function<std::string>(
         "--ids",
         [options](const std::string& text) {
           options->ids = to_ids(parse_list("--ids", text, false));
         },
         "Token ids of the sequence")
      ->type_name("N,N,...")
      ->required();
  app.add_option_function<std::string>(
         "--positions",
         [options](const std::string& text) {
           options->positions = parse_list("--positions", text, true);
         },
         "Where to show the logits, e.g. 0-2,7")
      ->type_name("N-N,N,...")
      ->default_str("the last");
  add_switch(app, "--json", options->json, "All logits, as JSON; else the five largest");
  add_state_dtype(app, options->state);
  add_max_num_batched_tokens(app, options->limits);
  app.callback([options, &command] { command = [options] { logits(*options); }; });
}

void add_bench_decode(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand(
      "decode", "Time of a decode step: conventional and both replay routes");
  const auto options = std::make_shared<DecodeOptions>();
  add_model(app, options->model);
  add_number(app, "--batch-size", options->batch_size, 1, kMostSequences, "Sequences");
  add_number(app, "--num-steps", options->num_steps, 1, kMostTokens,
             "Measured steps per route and repeat, rounded up to whole flush cycles");
  add_number(app, "--warmup-steps", options->warmup_steps, 0, kMostTokens,
             "Steps before, rounded up to whole flush cycles, at least one");
  add_number(app, "--repeats", options->repeats, 1, kMostTokens, "Runs from the prompt on");
  add_number(app, "--prompt-len", options->prompt_len, 1, kMostTokens, "Random tokens in front");
  add_seed(app, options->seed, "Of the random prompts");
  add_switch(app, "--json", options->json, "JSON instead of a table");
  add_state(app, options->state);
  add_max_num_batched_tokens(app, options->limits);
  app.callback([options, &command] { command = [options] { bench_decode(*options); }; });
}

void add_bench_accuracy(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("accuracy", "Perplexity of a text, per route");
  const auto options = std::make_shared<AccuracyOptions>();
  add_model(app, options->model);
  app.add_option("--text", options->text, "The text; - = standard input")
      ->type_name("FILE")
      ->required();
  add_choice(app, "--route", {"all", "prefill", "conventional", "state_and_output", "output_only"},
             "all", "Which way through the model",
             [&route = options->route](const std::string& name) { route = name; });
  add_number(app, "--window", options->window, 2, kMostTokens,
             "Tokens that are scored on their own");
  add_number(app, "--max-tokens", options->max_tokens, 0, kMostTokens,
             "Use only the start of the text; 0 = all of it");
  add_switch(app, "--json", options->json, "JSON instead of a table");
  add_state(app, options->state);
  add_max_num_seqs(app, options->limits);
  add_max_num_batched_tokens(app, options->limits);
  add_sweep_flags(app, *options, kMostBuffer);
  app.callback([options, &command] { command = [options] { bench_accuracy(*options); }; });
}

void add_op_shape(CLI::App& app, OpOptions& options) {
  add_choice(app, "--model-shape", model_shape_names(), "one of the op's family",
             "The model whose layers the state is that of",
             [&](const std::string& name) { options.model_shape = name; });
  const auto dimension = [&](const char* flag, int64_t& value, int64_t most, const char* help) {
    add_number(app, flag, value, 1, most, help)->default_str("the model's");
  };
  constexpr int64_t kMostHeads = 1024;
  dimension("--heads", options.heads, kMostHeads, "Value heads");
  dimension("--key-heads", options.key_heads, kMostHeads, "Heads of keys and queries");
  dimension("--head-dim", options.head_dim, kMaxStateDim, "Rows of a head's state");
  dimension("--state-dim", options.state_dim, kMaxStateDim, "Columns of a head's state");
}

void add_bench_op(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("op", "Time of one op against its baseline");
  const auto options = std::make_shared<OpOptions>();
  app.add_option("NAME", options->op, "The op")
      ->check(CLI::IsMember(op_names()))
      ->type_name("")
      ->required();
  add_op_shape(app, *options);
  add_number(app, "--batch-size", options->batch_size, 1, kMostSequences, "Sequences of a call");
  add_number(app, "--buffer-len", options->buffer_len, 1, kMostBuffer, "Most rows of a ring");
  add_number(app, "--window", options->window, 1, kMostTokens, "Tokens of a sequence and call")
      ->default_str("5 to verify, 512 to prefill, else 1");
  add_number(app, "--accepted", options->accepted, 1, kMostTokens, "Of which these are kept")
      ->default_str("all");
  add_choice(
      app, "--state-dtype", {"float32", "bfloat16", "float16"}, "float32", "The state",
      [&state = options->state_dtype](const std::string& name) { state = dtype_named(name); });
  add_choice(app, "--dtype", {"float32", "bfloat16", "float16"}, "bfloat16", "Activations and ring",
             [&dtype = options->dtype](const std::string& name) { dtype = dtype_named(name); });
  const auto read_dtypes = [options](const Names& names) {
    for (const std::string& name : names) options->read_dtypes.push_back(dtype_named(name));
  };
  app.add_option_function<Names>("--read-dtype", read_dtypes, "Also with such a read copy")
      ->check(CLI::IsMember(Names{"float16", "bfloat16", "float8_e4m3fn", "int8"}))
      ->delimiter(',')
      ->type_name("NAME,NAME,...");
  app.add_option("--state-gib", options->state_gib, "Size of all states together; 0 = one call's")
      ->check(CLI::Range(0.0, 65536.0))
      ->type_name("X")
      ->default_str("4, or what memory allows");
  add_number(app, "--threads", options->threads, 0, kMostThreads, "0 = one per available core");
  add_number(app, "--repeats", options->repeats, 1, kMostTokens, "Measurements of each variant");
  add_switch(app, "--json", options->json, "JSON instead of a table");
  app.callback([options, &command] { command = [options] { bench_op(*options); }; });
}

// Whether the arguments name no command that could run.
bool needs_command(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() || (parsed.front()->get_require_subcommand_min() > 0 &&
                            parsed.front()->get_subcommands().empty());
}

// What is wrong where a command is missing or unknown.
[[noreturn]] void fail_without_command(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining(true);
  const auto parsed = app.get_subcommands();
  const CLI::App& parent = parsed.empty() ? app : *parsed.front();
  std::string names;
  for (const CLI::App* command : parent.get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  fail(parsed.empty() ? "" : parent.get_name() + ": ", "expected a command (", names, "), got ",
       rest.empty() ? "none" : "'" + rest.front() + "'");
}

}  // namespace

std::function<void()> parse_command_line(int argc, const char* const* argv) {
  Command command;
  CLI::App app("Fast decoding of hybrid state-space language models", "replayssm");
  app.set_version_flag("--version", "replayssm " REPLAYSSM_VERSION);
  app.require_subcommand(1);
  add_generate(app, command);
  add_logits(app, command);
  CLI::App& bench = *app.add_subcommand("bench", "Measure speed and accuracy");
  bench.require_subcommand(1);
  add_bench_decode(bench, command);
  add_bench_op(bench, command);
  add_bench_accuracy(bench, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // help and version
    app.exit(success);
    return {};
  } catch (const CLI::ParseError& error) {
    if (!command && error.get_name() == "RequiredError" && needs_command(app)) {
      fail_without_command(app);
    }
    fail(error.what());
  }
  return command;
}

}  // namespace replayssm::cli
