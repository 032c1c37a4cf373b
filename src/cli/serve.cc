#include "cli/serve.h"

#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <future>
#include <nlohmann/json.hpp>

#include "cli/setup.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "model/chat_template.h"
#include "server/app.h"

namespace replayssm::cli {
namespace {

constexpr double kGib = 1 << 30;

EngineOptions serving_options(const ServeOptions& options, const LoadedModel& loaded) {
  const auto bytes = [](double gib) { return static_cast<int64_t>(gib * kGib); };
  EngineOptions engine = engine_options(options, loaded);
  engine.kv_blocks = options.kv_blocks;
  engine.prefix_cache_bytes = options.prefix_caching ? bytes(options.prefix_cache_gib) : 0;
  engine.prefix_interval = options.prefix_interval;
  engine.swap_bytes = bytes(options.swap_gib);
  return engine;
}

server::ServedModel served_model(const ServeOptions& options, const std::filesystem::path& folder,
                                 const Tokenizer& tokenizer, const Engine& engine,
                                 const ModelConfig& config) {
  server::ServedModel model{
      .name = options.served_name.empty() ? model_name(folder) : options.served_name,
      .tokenizer = &tokenizer,
      .engine = &engine};
  model.template_variables = template_special_tokens(folder);
  if (const auto source = load_chat_template(folder)) {
    model.chat_template.emplace(*source);
    model.tool_notation = server::tool_notation(*source);
  }
  model.vocab_size = config.vocab_size;
  model.vocabulary = std::async(std::launch::deferred, [&tokenizer, size = config.vocab_size] {
    return std::make_shared<const VocabularyTrie>(tokenizer, size);
  });
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
  const LoadedModel loaded = load_model(folder, options);
  const ModelConfig& config = loaded.model->config();
  Engine engine(*loaded.model, &tokenizer, serving_options(options, loaded));
  if (engine.memory_plan().total > 0) spdlog::info(to_string(engine.memory_plan()));
  server::App app(engine, served_model(options, folder, tokenizer, engine, config),
                  app_options(options));
  spdlog::info("serving model={} url=http://{}:{}/", model_name(folder), options.host, app.port());
  app.run();
  spdlog::info("stopped");
}

}  // namespace replayssm::cli
