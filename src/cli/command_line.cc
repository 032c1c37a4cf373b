#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench_accuracy.h"
#include "cli/bench_decode.h"
#include "cli/bench_op.h"
#include "cli/flags.h"
#include "cli/generate.h"
#include "cli/logits.h"
#include "cli/serve_flags.h"
#include "cli/spec_flags.h"
#include "cli/sweep_flags.h"
#include "core/check.h"
#include "replayssm/ops.h"

namespace replayssm::cli {
namespace {

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
  add_decoding(app, *options);
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
  app.add_option_function<std::string>(
         "--sweep",
         [options](const std::string& text) {
           options->sweep = parse_batch_sizes("--sweep", text);
         },
         "These batch sizes one after another, a row of the table each")
      ->type_name("N,N,...");
  app.add_option("--plot", options->plot, "Also draws the sweep into this file, as SVG")
      ->type_name("FILE");
  add_number(app, "--num-steps", options->num_steps, 1, kMostTokens,
             "Measured steps per route and repeat, rounded up to whole flush cycles");
  add_number(app, "--warmup-steps", options->warmup_steps, 0, kMostTokens,
             "Steps before, rounded up to whole flush cycles, at least one");
  add_number(app, "--repeats", options->repeats, 1, kMostTokens, "Runs from the prompt on");
  add_number(app, "--prompt-len", options->prompt_len, 1, kMostTokens, "Random tokens in front");
  add_seed(app, options->seed, "Of the random prompts");
  add_switch(app, "--json", options->json, "JSON instead of a table");
  add_state(app, options->state);
  add_read_dtype(app, options->state);
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
  add_number(app, "--window", options->window, 1, kMostWindow, "Tokens of a sequence and call")
      ->default_str("5 to verify, 512 to prefill, else 1");
  add_number(app, "--accepted", options->accepted, 1, kMostWindow, "Of which these are kept")
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
      ->check(CLI::IsMember(read_copy_names()))
      ->delimiter(',')
      ->type_name("NAME,NAME,...");
  app.add_option("--state-gib", options->state_gib, "Size of all states together; 0 = one call's")
      ->check(CLI::Range(0.0, 65536.0))
      ->check([](const std::string& text) {  // a NaN is in any range
        return std::isnan(std::stod(text)) ? "expected a number, got " + text : std::string();
      })
      ->type_name("X")
      ->default_str("4, or what memory allows");
  add_cpu(app, options->threads);
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
  add_serve(app, command);
  add_logits(app, command);
  CLI::App& bench = *app.add_subcommand("bench", "Measure speed and accuracy");
  bench.require_subcommand(1);
  add_bench_decode(bench, command);
  add_bench_spec(bench, command);
  add_bench_op(bench, command);
  add_bench_serve(bench, command);
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
