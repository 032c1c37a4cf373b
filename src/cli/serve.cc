#include "cli/serve.h"

#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "cli/setup.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "model/chat_template.h"
#include "server/app.h"

namespace replayssm::cli {
namespace {

constexpr double kGib = 1 << 30;

EngineOptions engine_options(const ServeOptions& options, const ModelConfig& config) {
  const auto bytes = [](double gib) { return static_cast<int64_t>(gib * kGib); };
  return {.route = options.route.route(),
          .ring = {.buffer_len = options.state.buffer_len},
          .state_dtype = state_dtype(options.state, config),
          .read_dtype = options.state.read_dtype,
          .max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.batched_tokens(),
          .max_model_len = options.limits.max_model_len,
          .kv_blocks = options.kv_blocks,
          .memory_utilization = options.limits.gpu_memory_utilization,
          .prefix_cache_bytes = options.prefix_caching ? bytes(options.prefix_cache_gib) : 0,
          .prefix_interval = options.prefix_interval,
          .swap_bytes = bytes(options.swap_gib),
          .speculative = speculation_of(options.speculation, options.route)};
}

server::ServedModel served_model(const ServeOptions& options, const std::filesystem::path& folder,
                                 const Tokenizer& tokenizer, const Engine& engine,
                                 const ModelConfig& config) {
  server::ServedModel model{
      .name = options.served_name.empty() ? model_name(folder) : options.served_name,
      .tokenizer = &tokenizer,
      .engine = &engine};
  model.template_variables = template_special_tokens(folder);
  if (const auto source = load_chat_template(folder)) model.chat_template.emplace(*source);
  model.vocab_size = config.vocab_size;
  return model;
}

server::AppOptions app_options(const ServeOptions& options) {
  constexpr int64_t kMib = 1 << 20;
  server::AppOptions app;
  app.http.host = options.host;
  app.http.port = options.port;
  app.http.max_body = options.max_body_mib * kMib;
  app.http.max_connections = options.max_connections;
  app.api_keys = options.api_keys;
  app.allowed_origins = options.allowed_origins;
  app.max_waiting = options.max_waiting;
  app.request_seconds = options.request_timeout;
  app.drain_seconds = options.drain_timeout;
  app.version = REPLAYSSM_VERSION;
  app.log = [](const std::string& line) { spdlog::info("{}", line); };
  return app;
}

// Every connection needs a descriptor: as many as the system lets this user have.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

void serve(const ServeOptions& options) {
  raise_descriptor_limit();
  spdlog::default_logger()->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  const std::filesystem::path folder = find_model(options.model);
  const Tokenizer tokenizer(folder);
  const LoadedModel loaded =
      load_model(folder, options.model, speculation_of(options.speculation, options.route));
  const ModelConfig& config = loaded.model->config();
  EngineOptions engine_setup = engine_options(options, config);
  engine_setup.draft_model = loaded.draft_model.get();
  Engine engine(*loaded.model, &tokenizer, engine_setup);
  if (engine.memory_plan().total > 0) spdlog::info(to_string(engine.memory_plan()));
  server::App app(engine, served_model(options, folder, tokenizer, engine, config),
                  app_options(options));
  spdlog::info("serving model={} url=http://{}:{}/", model_name(folder), options.host, app.port());
  app.run();
  spdlog::info("stopped");
}

}  // namespace replayssm::cli
