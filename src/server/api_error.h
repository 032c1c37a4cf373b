// What a client did wrong, in OpenAI's shape.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "core/check.h"
#include "server/http.h"

namespace replayssm::server {

struct ApiError : std::runtime_error {
  ApiError(int http_status, const std::string& message, std::string bad_param = {},
           std::string error_code = {})
      : std::runtime_error(message),
        status(http_status),
        param(std::move(bad_param)),
        code(std::move(error_code)) {}

  int status;
  std::string param, code;
};

// A field of the body that cannot be used.
template <class... Args>
[[noreturn]] void bad_field(const std::string& name, const Args&... args) {
  throw ApiError(400, concat(name, ": ", args...), name);
}

// {"error": {...}}
std::string error_body(const ApiError& error);
http::Response error_response(const ApiError& error);

}  // namespace replayssm::server
