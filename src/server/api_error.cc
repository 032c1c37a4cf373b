#include "server/api_error.h"

#include "server/json_fields.h"

namespace replayssm::server {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 404: return "not_found_error";
    case 500: return "server_error";
    case 503:
    case 504: return "service_unavailable_error";
    default: return "invalid_request_error";
  }
}

}  // namespace

std::string error_body(const ApiError& error) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return to_text({{"error",
                   {{"message", error.what()},
                    {"type", type_of(error.status)},
                    {"param", or_null(error.param)},
                    {"code", or_null(error.code)}}}});
}

http::Response error_response(const ApiError& error) {
  http::Response response{.status = error.status, .body = error_body(error)};
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

}  // namespace replayssm::server
