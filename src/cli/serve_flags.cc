#include "cli/serve_flags.h"

#include <memory>

#include "cli/bench_serve.h"
#include "cli/flags.h"
#include "cli/serve.h"

namespace replayssm::cli {
namespace {

constexpr double kMostSeconds = 1e6, kMostGib = 65536;

CLI::Option* add_real(CLI::App& app, const char* flag, double& value, double most,
                      const char* help) {
  return app.add_option(flag, value, help)
      ->check(CLI::Range(0.0, most))
      ->type_name("X")
      ->capture_default_str();
}

void add_http(CLI::App& app, ServeOptions& options) {
  app.add_option("--host", options.host, "Address to listen on; 0.0.0.0 = all")
      ->type_name("IP")
      ->capture_default_str();
  add_number(app, "--port", options.port, 0, 65535, "0 = any free one");
  app.add_option("--served-model-name", options.served_name, "What clients call the model")
      ->type_name("NAME")
      ->default_str("the folder's name");
  add_texts(app, "--api-key", options.api_keys, "Clients must send one of these; may be repeated")
      ->envname("REPLAYSSM_API_KEY");
  add_texts(app, "--allowed-origin", options.allowed_origins,
            "Pages of this origin may ask, * = of all; may be repeated");
  add_number(app, "--max-waiting", options.max_waiting, 1, kMostSequences,
             "Sequences that run or wait; further requests are refused");
  add_number(app, "--max-body-mib", options.max_body_mib, 1, 1024, "Largest body of a request");
  add_number(app, "--max-connections", options.max_connections, 1, 1 << 20,
             "Further ones wait to be accepted");
  add_real(app, "--request-timeout", options.request_timeout, kMostSeconds,
           "Seconds after which a request is given up");
  add_real(app, "--drain-timeout", options.drain_timeout, kMostSeconds,
           "Seconds for what runs when SIGTERM comes");
}

void add_cache(CLI::App& app, ServeOptions& options) {
  app.add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", options.prefix_caching,
               "Keep the states of prompts' prefixes (the default), or not")
      ->disable_flag_override();
  add_real(app, "--prefix-cache-gib", options.prefix_cache_gib, kMostGib,
           "Memory for recurrent states of prefixes");
  add_number(app, "--prefix-interval", options.prefix_interval, 64, kMostTokens,
             "Tokens between two states of a prompt, a multiple of 64");
  add_real(app, "--swap-gib", options.swap_gib, kMostGib,
           "Host memory for states of preempted sequences; 0 = they are computed again");
  add_number(app, "--num-kv-blocks", options.kv_blocks, 1, kMostTokens, "KV blocks of 32 tokens")
      ->default_str("as memory allows");
}

}  // namespace

void add_serve(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("serve", "Answer OpenAI's HTTP API");
  const auto options = std::make_shared<ServeOptions>();
  add_model(app, options->model);
  add_http(app, *options);
  add_decoding(app, *options);
  add_cache(app, *options);
  app.callback([options, &command] { command = [options] { serve(*options); }; });
}

void add_bench_serve(CLI::App& parent, Command& command) {
  CLI::App& app = *parent.add_subcommand("serve", "Load on a running server");
  const auto options = std::make_shared<BenchServeOptions>();
  app.add_option("--host", options->host, "Its IPv4 address")
      ->type_name("IP")
      ->capture_default_str();
  add_number(app, "--port", options->port, 1, 65535, "Its port");
  app.add_option("--api-key", options->api_key, "One of its keys")
      ->type_name("TEXT")
      ->envname("REPLAYSSM_API_KEY");
  add_number(app, "--num-prompts", options->requests, 1, kMostTokens, "Requests");
  add_number(app, "--max-concurrency", options->concurrency, 1, kMostSequences,
             "Requests under way at once");
  add_real(app, "--request-rate", options->rate, 1e6,
           "Requests a second, arriving at random; 0 = as fast as they are answered");
  app.add_option("--dataset", options->dataset,
                 "JSON lines with prompt and perhaps max_tokens; - = standard input")
      ->type_name("FILE")
      ->default_str("random prompts");
  add_number(app, "--prompt-len", options->prompt_len, 1, kMostTokens, "Tokens of random prompts");
  add_number(app, "--shared-len", options->shared_len, 0, kMostTokens,
             "Of them the same in all prompts, in front");
  add_number(app, "--output-len", options->output_len, 1, kMostTokens, "Tokens of an answer");
  app.add_flag("--stream,!--no-stream", options->stream, "Streamed answers (the default), or whole")
      ->disable_flag_override();
  add_seed(app, options->seed, "Of prompts and arrivals");
  add_real(app, "--goodput-ttft-ms", options->goodput_ttft_ms, kMostSeconds,
           "A good request's first token comes in time; 0 = at any");
  add_real(app, "--goodput-tpot-ms", options->goodput_tpot_ms, kMostSeconds,
           "And so do its further ones");
  add_switch(app, "--json", options->json, "JSON instead of a table");
  app.callback([options, &command] { command = [options] { bench_serve(*options); }; });
}

}  // namespace replayssm::cli
