// The bytes of HTTP answers.
#pragma once

#include <string>
#include <string_view>

#include "server/http.h"

namespace replayssm::http {

// Status line, headers and body; of an answer to HEAD without the body.
std::string whole_answer(const Response& response, bool keep_alive, bool head);
// Status line and headers in front of pieces, chunked or up to the connection's end.
std::string stream_head(const Response& response, bool keep_alive, bool chunked);
std::string chunk(std::string_view piece);

}  // namespace replayssm::http
