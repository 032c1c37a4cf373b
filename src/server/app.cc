#include "server/app.h"

#include <algorithm>
#include <csignal>
#include <set>
#include <utility>

#include "server/access.h"
#include "server/app_impl.h"
#include "server/assets.h"

namespace replayssm::server {
namespace {

using Clock = Generation::Clock;

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

}  // namespace

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
      engine_thread(engine, [this](EngineThread::Delivery delivery) {
        http.post([this, delivery = std::move(delivery)] { deliver(delivery); });
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
  guarded(call, [&] { dispatch(call); });
}

// What `work` throws becomes the answer.
void App::Impl::guarded(const CallPtr& call, const std::function<void()>& work) {
  try {
    work();
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

// Throws where no more can be generated.
void App::Impl::admit() const {
  if (draining) throw ApiError(503, "the server is going down");
  if (engine_thread.broken()) throw ApiError(503, "the model fails again and again");
  if (std::ssize(generations) >= options.max_waiting) {
    throw ApiError(
        503, concat("the server is overloaded: ", generations.size(), " sequences run or wait"), "",
        "overloaded");
  }
}

void App::Impl::generate(const CallPtr& call, bool chat) {
  admit();
  prepare(
      call,
      [this, chat](const std::string& body) {
        const Json json = parse_body(body);
        return chat ? chat_job(json, model) : completion_job(json, model);
      },
      [this, call](Job job) { start(call, std::move(job)); });
}

void App::Impl::start(const CallPtr& call, Job job) {
  admit();  // again: preparing may have taken a while
  std::vector<uint64_t> keys(job.requests.size());
  for (uint64_t& key : keys) key = next_key++;
  AnswerWriter writer(job.chat, (job.chat ? "chatcmpl-" : "cmpl-") + new_id(), model.name,
                      *model.tokenizer, job.logprobs, job.include_usage);
  const auto done = [this, call, keys](const Outcome& outcome) {
    for (const uint64_t key : keys) generations.erase(key);
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
    engine_thread.submit(keys[i], std::move(job.requests[i]));
  }
  call->exchange->on_abort([weak = std::weak_ptr(generation)] {
    if (const auto live = weak.lock()) live->abandon();
  });
}

void App::Impl::deliver(const EngineThread::Delivery& delivery) {
  for (const StepReport& report : delivery.steps) metrics.stepped(report);
  std::vector<std::shared_ptr<Generation>> unsent;
  for (const EngineEvent& event : delivery.events) {
    const auto at = generations.find(event.key);
    if (at == generations.end()) continue;
    const std::shared_ptr<Generation> generation = at->second;  // its end may erase it
    const bool known = generation->has_unsent();
    generation->take(event);
    if (!known && generation->has_unsent()) unsent.push_back(generation);
  }
  for (const std::shared_ptr<Generation>& generation : unsent) generation->send();
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
  for (const auto& [key, generation] : generations) {
    if (seconds_since(generation->start()) > options.request_seconds) late.insert(generation);
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
