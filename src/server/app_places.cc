// What is answered besides texts.
#include "replay/cursor.h"
#include "replayssm/error.h"
#include "server/app_impl.h"

namespace replayssm::server {

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
      call,
      [this](const std::string& body) {
        const std::vector<int32_t> ids = tokenize(parse_body(body), model);
        return to_text({{"count", ids.size()},
                        {"max_model_len", model.engine->max_model_len()},
                        {"tokens", ids}});
      },
      [this, call](std::string text) { reply(call, {.body = std::move(text)}); });
}

void App::Impl::detokenize_ids(const CallPtr& call) {
  prepare(
      call,
      [this](const std::string& body) {
        return to_text({{"prompt", detokenize(parse_body(body), model)}});
      },
      [this, call](std::string text) { reply(call, {.body = std::move(text)}); });
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

}  // namespace replayssm::server
