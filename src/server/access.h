// Who may ask: API keys, and pages of other origins.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http.h"

namespace replayssm::server {

// Whether an Authorization header carries one of the keys, in a time that tells nothing about them.
bool is_authorized(std::string_view authorization, const std::vector<std::string>& keys);

// What lets a page of this origin read an answer; nothing where it may not.
http::Headers cors_headers(const std::string& origin, const std::vector<std::string>& allowed);

// A client's own request id where it is fit to be logged and sent back, else a new one.
std::string request_id(const std::string& proposed);
std::string new_id();  // 24 random hexadecimal digits

}  // namespace replayssm::server
