// The server's members; behind app.h.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/answer.h"
#include "server/api_error.h"
#include "server/app.h"
#include "server/engine_thread.h"
#include "server/generation.h"
#include "server/metrics.h"
#include "server/work_thread.h"

namespace replayssm::server {

// A request on its way to its answer.
struct Call {
  http::Request request;
  http::ExchangePtr exchange;
  Generation::Clock::time_point start = Generation::Clock::now();
};
using CallPtr = std::shared_ptr<Call>;

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
  void guarded(const CallPtr& call, const std::function<void()>& work);
  void admit() const;
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

  void deliver(const EngineThread::Delivery& delivery);
  void signalled(int signal);
  void sweep();
  void drain();

  Engine& engine;
  ServedModel model;
  AppOptions options;
  Metrics metrics;
  std::map<uint64_t, std::shared_ptr<Generation>> generations;  // by key of each of its sequences
  uint64_t next_key = 1;
  int64_t created = 0;
  bool draining = false;
  Generation::Clock::time_point drain_start{}, last_answer{};
  http::Server http;
  EngineThread engine_thread;
  WorkThread work, huge_work;
};

// Whether working on a body may take long: it is long itself, or asks for a grammar.
inline bool is_long(std::string_view body) {
  constexpr size_t kSmall = 16 << 10;
  return body.size() > kSmall || body.find("response_format") != std::string_view::npos ||
         body.find("tool_choice") != std::string_view::npos;
}

// Runs `work_on` on the body, here or, where it may take long, on a thread for it, and then `then`
// with its result here. Bodies that may take seconds have a thread of their own.
template <class Work, class Then>
void App::Impl::prepare(const CallPtr& call, Work work_on, Then then) {
  constexpr size_t kHuge = 1 << 20;
  const size_t size = call->request.body.size();
  if (!is_long(call->request.body)) return then(work_on(call->request.body));
  (size > kHuge ? huge_work : work).push([this, call, work_on, then] {
    std::function<void()> next;
    try {
      auto result =
          std::make_shared<decltype(work_on(call->request.body))>(work_on(call->request.body));
      next = [result, then] { then(std::move(*result)); };
    } catch (...) {
      next = [error = std::current_exception()] { std::rethrow_exception(error); };
    }
    http.post([this, call, next] { guarded(call, next); });
  });
}

}  // namespace replayssm::server
