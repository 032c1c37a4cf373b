#include "server/app.h"

#include <algorithm>
#include <csignal>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "replay/cursor.h"
#include "replayssm/error.h"
#include "server/access.h"
#include "server/answer.h"
#include "server/api_error.h"
#include "server/assets.h"
#include "server/engine_thread.h"
#include "server/generation.h"
#include "server/metrics.h"
#include "server/work_thread.h"

namespace replayssm::server {
namespace {

using Clock = Generation::Clock;

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

// A request on its way to its answer.
struct Call {
  http::Request request;
  http::ExchangePtr exchange;
  Clock::time_point start = Clock::now();
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace

struct App::Impl {
  Impl(Engine& used_engine, ServedModel used_model, const AppOptions& used_options);

  using Handler = void (Impl::*)(const CallPtr&);
  struct Place {
    const char* method;
    const char* path;
    Handler handler;
    bool guarded;
  };
  static const std::vector<Place>& places();

  void handle(http::Request request, http::ExchangePtr exchange);
  void dispatch(const CallPtr& call);
  http::Headers headers(const Call& call) const;
  void reply(const CallPtr& call, http::Response response, const std::string& more = {});
  void reply(const CallPtr& call, const ApiError& error) { reply(call, error_response(error)); }
  void log(const Call& call, int status, const std::string& more);
  template <class Work, class Then>
  void prepare(const CallPtr& call, Work work, Then then);

  void complete(const CallPtr& call) { generate(call, false); }
  void chat(const CallPtr& call) { generate(call, true); }
  void generate(const CallPtr& call, bool chat);
  void start(const CallPtr& call, Job job);
  void models(const CallPtr& call);
  void tokenize_text(const CallPtr& call);
  void detokenize_ids(const CallPtr& call);
  void health(const CallPtr& call);
  void version(const CallPtr& call);
  void show_metrics(const CallPtr& call);
  void status(const CallPtr& call);
  void set_route(const CallPtr& call);
  Json model_entry() const;
  Json status_of(const Engine& engine) const;

  void deliver(const std::vector<EngineEvent>& events, const StepReport& report);
  void signalled(int signal);
  void sweep();
  void drain();

  Engine& engine;
  ServedModel model;
  AppOptions options;
  Metrics metrics;
  std::map<uint64_t, std::shared_ptr<Generation>> generations;  // by key of each of its sequences
  std::map<uint64_t, Clock::time_point> started;                // the same
  uint64_t next_key = 1;
  int64_t created = 0;
  bool draining = false;
  Clock::time_point drain_start{}, last_answer{};
  http::Server http;
  EngineThread engine_thread;
  WorkThread work;
};

const std::vector<App::Impl::Place>& App::Impl::places() {
  static const std::vector<Place> all = {
      {"POST", "/v1/completions", &Impl::complete, true},
      {"POST", "/v1/chat/completions", &Impl::chat, true},
      {"GET", "/v1/models", &Impl::models, true},
      {"POST", "/tokenize", &Impl::tokenize_text, true},
      {"POST", "/detokenize", &Impl::detokenize_ids, true},
      {"GET", "/health", &Impl::health, false},
      {"GET", "/version", &Impl::version, false},
      {"GET", "/metrics", &Impl::show_metrics, false},
      {"GET", "/replayssm/status", &Impl::status, true},
      {"POST", "/replayssm/route", &Impl::set_route, true},
  };
  return all;
}

App::Impl::Impl(Engine& used_engine, ServedModel used_model, const AppOptions& used_options)
    : engine(used_engine),
      model(std::move(used_model)),
      options(used_options),
      metrics(used_engine),
      created(std::chrono::duration_cast<std::chrono::seconds>(
                  std::chrono::system_clock::now().time_since_epoch())
                  .count()),
      http(options.http,
           {.handle =
                [this](http::Request request, http::ExchangePtr exchange) {
                  handle(std::move(request), std::move(exchange));
                },
            .refused =
                [this](int status, const std::string& why) {
                  options.log(concat("refused status=", status, " why=\"", why, "\""));
                  metrics.answered("other", status);
                  return error_response(ApiError(status, why));
                },
            .signalled = [this](int signal) { signalled(signal); }}),
      engine_thread(engine, [this](std::vector<EngineEvent> events, const StepReport& report) {
        http.post([this, events = std::move(events), report] { deliver(events, report); });
      }) {
  http.post([this] { sweep(); });
}

http::Headers App::Impl::headers(const Call& call) const {
  http::Headers headers = cors_headers(call.request.origin, options.allowed_origins);
  headers.emplace_back("X-Request-Id", call.request.id);
  return headers;
}

void App::Impl::log(const Call& call, int status, const std::string& more) {
  std::string path;
  append_quoted(path, call.request.path.substr(0, 200));
  options.log(concat("request id=", call.request.id, " peer=", call.request.peer,
                     " method=", call.request.method, " path=", path, " status=", status,
                     " seconds=", seconds_since(call.start), more));
  const bool known = std::ranges::any_of(
      places(), [&](const Place& place) { return place.path == call.request.path; });
  metrics.answered(known ? call.request.path : "other", status);
}

void App::Impl::reply(const CallPtr& call, http::Response response, const std::string& more) {
  const http::Headers own = headers(*call);
  response.headers.insert(response.headers.end(), own.begin(), own.end());
  const int status = response.status;
  call->exchange->reply(std::move(response));
  log(*call, status, more);
}

void App::Impl::handle(http::Request request, http::ExchangePtr exchange) {
  const auto call = std::make_shared<Call>();
  call->request = std::move(request);
  call->exchange = std::move(exchange);
  call->request.id = request_id(call->request.id);
  try {
    dispatch(call);
  } catch (const ApiError& error) {
    reply(call, error);
  } catch (const std::exception& error) {
    reply(call, ApiError(500, error.what()));
  }
}

void App::Impl::dispatch(const CallPtr& call) {
  const http::Request& request = call->request;
  if (request.method == "OPTIONS") {
    const http::Headers allowed = {
        {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
        {"Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-Id"},
        {"Access-Control-Max-Age", "600"}};
    return reply(call, {.status = 204, .headers = allowed});
  }
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  if (const Asset* asset = find_asset(request.path); asset && method == "GET") {
    return reply(
        call, {.content_type = std::string(asset->content_type), .body = std::string(asset->text)});
  }
  constexpr std::string_view kModels = "/v1/models/";
  const std::string path = request.path.starts_with(kModels) ? "/v1/models" : request.path;
  const auto at = std::ranges::find(places(), path, &Place::path);
  const bool asset = find_asset(path) != nullptr;
  if (at == places().end() && !asset) {
    throw ApiError(404, concat("there is nothing at ", request.path.substr(0, 200)));
  }
  if (asset || at->method != method) {
    http::Response response = error_response(
        ApiError(405, concat(path, ": expected ", asset ? "GET" : at->method, ", got ", method)));
    response.headers.emplace_back("Allow", asset ? "GET" : at->method);
    return reply(call, std::move(response));
  }
  if (at->guarded && !is_authorized(request.authorization, options.api_keys)) {
    throw ApiError(401, "the API key is missing or not one of the server's", "", "invalid_api_key");
  }
  if (method == "POST" && !request.content_type.empty() &&
      !request.content_type.starts_with("application/json")) {
    throw ApiError(415, "Content-Type: expected application/json");
  }
  (this->*at->handler)(call);
}

// Runs `work` on the body, here or, where it may take long, on the work thread, and then `then`
// with its result here.
template <class Work, class Then>
void App::Impl::prepare(const CallPtr& call, Work work_on, Then then) {
  constexpr size_t kSmall = 16 << 10;
  if (call->request.body.size() <= kSmall) return then(work_on(call->request.body));
  work.push([this, call, work_on, then] {
    std::function<void()> next;
    try {
      auto result =
          std::make_shared<decltype(work_on(call->request.body))>(work_on(call->request.body));
      next = [result, then] { then(std::move(*result)); };
    } catch (const ApiError& error) {
      next = [this, call, error] { reply(call, error); };
    } catch (const std::exception& error) {
      next = [this, call, what = std::string(error.what())] { reply(call, ApiError(500, what)); };
    }
    http.post(std::move(next));
  });
}

void App::Impl::generate(const CallPtr& call, bool chat) {
  if (draining) throw ApiError(503, "the server is going down");
  if (engine_thread.broken()) throw ApiError(503, "the model fails again and again");
  if (std::ssize(generations) >= options.max_waiting) {
    throw ApiError(
        503, concat("the server is overloaded: ", generations.size(), " sequences run or wait"), "",
        "overloaded");
  }
  prepare(
      call,
      [this, chat](const std::string& body) {
        const Json json = parse_body(body);
        return chat ? chat_job(json, model) : completion_job(json, model);
      },
      [this, call](Job job) { start(call, std::move(job)); });
}

void App::Impl::start(const CallPtr& call, Job job) {
  std::vector<uint64_t> keys;
  for (size_t i = 0; i < job.requests.size(); ++i) keys.push_back(next_key++);
  AnswerWriter writer(job.chat, (job.chat ? "chatcmpl-" : "cmpl-") + new_id(), model.name,
                      *model.tokenizer, job.logprobs, job.include_usage);
  const auto done = [this, call, keys](const Outcome& outcome) {
    for (const uint64_t key : keys) {
      generations.erase(key);
      started.erase(key);
    }
    log(*call, outcome.status,
        concat(" prompt=", outcome.usage.prompt_tokens, " cached=", outcome.usage.cached_tokens,
               " output=", outcome.usage.completion_tokens, " ttft=", outcome.first_token_seconds,
               " finish=", outcome.finish));
  };
  const auto generation = std::make_shared<Generation>(
      job, keys, std::move(writer),
      Generation::Setup{.exchange = call->exchange,
                        .headers = headers(*call),
                        .start = call->start,
                        .metrics = &metrics,
                        .cancel = [this](uint64_t key) { engine_thread.cancel(key); },
                        .done = done});
  for (size_t i = 0; i < keys.size(); ++i) {
    generations[keys[i]] = generation;
    started[keys[i]] = call->start;
    engine_thread.submit(keys[i], std::move(job.requests[i]));
  }
  call->exchange->on_abort([weak = std::weak_ptr(generation)] {
    if (const auto live = weak.lock()) live->abandon();
  });
}

void App::Impl::deliver(const std::vector<EngineEvent>& events, const StepReport& report) {
  metrics.stepped(report);
  for (const EngineEvent& event : events) {
    const auto at = generations.find(event.key);
    if (at == generations.end()) continue;
    const std::shared_ptr<Generation> generation = at->second;  // its end may erase it
    generation->take(event);
  }
}

Json App::Impl::model_entry() const {
  return {{"id", model.name},
          {"object", "model"},
          {"created", created},
          {"owned_by", "replayssm"},
          {"max_model_len", model.engine->max_model_len()}};
}

void App::Impl::models(const CallPtr& call) {
  constexpr std::string_view kPrefix = "/v1/models/";
  const std::string& path = call->request.path;
  if (path.starts_with(kPrefix)) {
    if (path.substr(kPrefix.size()) != model.name) {
      throw ApiError(404, "there is no such model; /v1/models lists what there is", "model",
                     "model_not_found");
    }
    return reply(call, {.body = to_text(model_entry())});
  }
  reply(call, {.body = to_text({{"object", "list"}, {"data", Json::array({model_entry()})}})});
}

void App::Impl::tokenize_text(const CallPtr& call) {
  prepare(
      call, [this](const std::string& body) { return tokenize(parse_body(body), model); },
      [this, call](const std::vector<int32_t>& ids) {
        reply(call, {.body = to_text({{"count", ids.size()},
                                      {"max_model_len", model.engine->max_model_len()},
                                      {"tokens", ids}})});
      });
}

void App::Impl::detokenize_ids(const CallPtr& call) {
  prepare(
      call, [this](const std::string& body) { return detokenize(parse_body(body), model); },
      [this, call](const std::string& text) {
        reply(call, {.body = to_text({{"prompt", text}})});
      });
}

void App::Impl::health(const CallPtr& call) {
  const bool well = !draining && !engine_thread.broken();
  const char* state = draining ? "draining" : well ? "ready" : "broken";
  reply(call, {.status = well ? 200 : 503, .body = to_text({{"status", state}})});
}

void App::Impl::version(const CallPtr& call) {
  reply(call, {.body = to_text({{"version", options.version}})});
}

void App::Impl::show_metrics(const CallPtr& call) {
  metrics.connections(http.connections());
  reply(call, {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics.text()});
}

Json App::Impl::status_of(const Engine& running) const {
  const RingConfig& ring = running.slots().ring();
  Json requests = Json::array();
  for (const RunningRequest& request : running.running_requests()) {
    requests.push_back({{"prompt_tokens", request.prompt_tokens},
                        {"tokens", request.tokens},
                        {"computed", request.computed},
                        {"prefilling", request.prefilling},
                        {"slot", request.slot},
                        {"checkpoint_tokens", request.cursor.ring_start - (ring.conv_kernel - 1)},
                        {"ring_start", request.cursor.ring_start},
                        {"ring_count", request.cursor.ring_count},
                        {"ring_limit", request.cursor.ring_limit}});
  }
  return {{"route", route_name(running.route())},
          {"buffer_len", ring.buffer_len},
          {"ring_rows", ring_rows(ring.buffer_len, ring.max_window)},
          {"state_bytes", running.slots().slot_bytes()},
          {"running", std::move(requests)},
          {"waiting", running.waiting()}};
}

void App::Impl::status(const CallPtr& call) {
  engine_thread.between_steps([this, call](Engine& running) {
    http.post([this, call, shown = status_of(running)]() mutable {
      Json seconds = Json::object();
      for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
        seconds[route_name(route)] = metrics.step_seconds(route);
      }
      shown["model"] = model.name;
      shown["decode_step_seconds"] = std::move(seconds);
      reply(call, {.body = to_text(shown)});
    });
  });
}

void App::Impl::set_route(const CallPtr& call) {
  const Json body = parse_body(call->request.body);
  const auto name = Fields(body).text("route").value_or("");
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    if (name != route_name(route)) continue;
    return engine_thread.between_steps([this, call, route](Engine& running) {
      std::string why;
      try {
        running.set_route(route);
      } catch (const Error& error) {
        why = error.what();
      }
      http.post([this, call, route, why] {
        if (!why.empty()) return reply(call, ApiError(400, why, "route"));
        reply(call, {.body = to_text({{"route", route_name(route)}})});
      });
    });
  }
  bad_field("route", "expected conventional, state_and_output or output_only");
}

void App::Impl::signalled(int signal) {
  if (draining) return http.stop();  // a second one does not wait
  options.log(concat("draining signal=", signal, " sequences=", generations.size()));
  draining = true;
  drain_start = last_answer = Clock::now();
  http.close_listener();
}

// Gives up requests that have run too long; ends the program when it has drained.
void App::Impl::sweep() {
  constexpr double kPause = 0.5, kDrainingPause = 0.02;
  std::set<std::shared_ptr<Generation>> late;
  for (const auto& [key, start] : started) {
    if (seconds_since(start) > options.request_seconds) late.insert(generations.at(key));
  }
  for (const auto& generation : late) {
    generation->fail(
        ApiError(504, concat("the request took more than ", options.request_seconds, " seconds")));
  }
  if (draining) drain();
  http.after(draining ? kDrainingPause : kPause, [this] { sweep(); });
}

void App::Impl::drain() {
  constexpr double kGrace = 2;  // for answers that are on their way
  const double seconds = seconds_since(drain_start);
  if (seconds > options.drain_seconds && !generations.empty()) {
    std::set<std::shared_ptr<Generation>> rest;
    for (const auto& [key, generation] : generations) rest.insert(generation);
    for (const auto& generation : rest) generation->fail(ApiError(503, "the server is going down"));
  }
  if (!generations.empty()) {
    last_answer = Clock::now();
  } else if (http.connections() == 0 || seconds_since(last_answer) > kGrace) {
    http.stop();
  }
}

App::App(Engine& engine, ServedModel model, const AppOptions& options)
    : impl_(std::make_unique<Impl>(engine, std::move(model), options)) {}
App::~App() = default;

uint16_t App::port() const { return impl_->http.port(); }
void App::run() { impl_->http.run(); }
void App::stop() {
  impl_->http.post([this] { impl_->signalled(SIGTERM); });
}

}  // namespace replayssm::server
