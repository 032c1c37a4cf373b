#include "cli/spec_flags.h"

#include <memory>

#include "cli/bench_spec.h"
#include "cli/flags.h"
#include "core/check.h"

namespace replayssm::cli {
namespace {

// The configuration: as JSON, and what the other flags say.
struct Drafts {
  std::optional<SpeculativeConfig> config;
  int64_t tokens = 0;  // 0 = as the configuration says
  double simulate = 0;
};

SpeculativeConfig drafts_of(const Drafts& drafts) {
  SpeculativeConfig config = drafts.config.value_or(SpeculativeConfig{});
  if (drafts.tokens > 0) config.tokens = drafts.tokens;
  if (config.max_window() > kMostDraftTokens + 1) {
    fail("--num-speculative-tokens: expected a draft of at most ", kMostDraftTokens,
         " tokens, got ", config.max_window() - 1);
  }
  const auto longest = static_cast<double>(config.tokens) + 1;
  if (drafts.simulate != 0 && !(drafts.simulate >= 1 && drafts.simulate <= longest)) {
    fail("--simulate-acceptance: expected 1 to ", longest, ", got ", drafts.simulate);
  }
  if (drafts.simulate > 0 && config.tree_width > 1)
    fail("--simulate-acceptance: expected a tree_width of 1, got ", config.tree_width);
  config.simulate_length = drafts.simulate;
  return config;
}

}  // namespace

void add_bench_spec(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand(
      "spec",
      "Decoding with drafts, verified by snapshots and by the ring, against plain decoding");
  const auto options = std::make_shared<SpecOptions>();
  const auto drafts = std::make_shared<Drafts>();
  add_model(app, options->model);
  app.add_option_function<std::string>(
         "--batch-size",
         [options](const std::string& text) {
           options->batch_sizes = parse_batch_sizes("--batch-size", text);
         },
         "Sequences; several sizes one after another")
      ->type_name("N,N,...")
      ->default_str("1");
  app.add_option_function<std::string>(
         "--speculative-config",
         [drafts](const std::string& text) { drafts->config = parse_speculative_config(text); },
         "How drafts are made; see generate")
      ->type_name("JSON")
      ->default_str("n-grams");
  add_number(app, "--num-speculative-tokens", drafts->tokens, 1, kMostDraftTokens,
             "Tokens of a draft")
      ->default_str("the configuration's, else 4");
  app.add_option("--simulate-acceptance", drafts->simulate,
                 "Draw accept counts so that a window brings so many tokens on average")
      ->type_name("LENGTH")
      ->default_str("drafts are verified");
  app.add_option_function<Names>(
         "--modes", [options](const Names& names) { options->modes = names; }, "Only these")
      ->check(CLI::IsMember(Names{"conventional", "standard", "snapshot-spec", "replay-spec"}))
      ->delimiter(',')
      ->type_name("NAME,NAME,...");
  add_number(app, "--num-steps", options->num_steps, 1, kMostTokens, "Measured steps");
  add_number(app, "--warmup-steps", options->warmup_steps, 0, kMostTokens, "Steps before");
  add_number(app, "--repeats", options->repeats, 1, kMostTokens, "Runs from the prompt on");
  add_number(app, "--prompt-len", options->prompt_len, 1, kMostTokens, "Tokens in front");
  app.add_option("--text", options->text, "Prompts are pieces of this file")
      ->type_name("FILE")
      ->default_str("random tokens");
  app.add_option("--temperature", options->sampling.temperature, "0 = greedy")
      ->type_name("X")
      ->capture_default_str();
  add_seed(app, options->sampling.seed, "Of prompts and random numbers");
  add_switch(app, "--json", options->json, "JSON instead of tables");
  app.add_option("--plot", options->plot, "Also draws the batch sizes into this file, as SVG")
      ->type_name("FILE");
  add_state(app, options->state);
  add_read_dtype(app, options->state);
  add_max_num_batched_tokens(app, options->limits);
  add_gpu_memory_utilization(app, options->limits);
  add_number(app, "--max-model-len", options->limits.max_model_len, 1, kMostTokens,
             "Prompt and output of a request, for which memory must suffice");
  app.callback([options, drafts, &command] {
    options->speculative = drafts_of(*drafts);
    validate(options->sampling);
    command = [options] { bench_spec(*options); };
  });
}

}  // namespace replayssm::cli
