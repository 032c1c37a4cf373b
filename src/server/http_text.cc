#include "server/http_text.h"

#include <array>
#include <charconv>

namespace replayssm::http {
namespace {

const char* reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 204: return "No Content";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 413: return "Content Too Large";
    case 415: return "Unsupported Media Type";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return "Status";
  }
}

std::string head_of(const Response& response, bool keep_alive) {
  std::string text = "HTTP/1.1 " + std::to_string(response.status) + " " + reason(response.status);
  text += "\r\nServer: replayssm\r\n";
  if (response.status != 204) text += "Content-Type: " + response.content_type + "\r\n";
  for (const auto& [name, value] : response.headers) text += name + ": " + value + "\r\n";
  if (!keep_alive) text += "Connection: close\r\n";
  return text;
}

}  // namespace

std::string whole_answer(const Response& response, bool keep_alive, bool head) {
  std::string text = head_of(response, keep_alive);
  if (response.status != 204) {
    text += "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
  }
  text += "\r\n";
  if (!head && response.status != 204) text += response.body;
  return text;
}

std::string stream_head(const Response& response, bool keep_alive, bool chunked) {
  std::string text = head_of(response, keep_alive) + "Cache-Control: no-cache\r\n";
  if (chunked) text += "Transfer-Encoding: chunked\r\n";
  return text + "\r\n";
}

std::string chunk(std::string_view piece) {
  constexpr int kHexadecimal = 16;
  std::array<char, 20> size;
  const auto end = std::to_chars(size.begin(), size.end(), piece.size(), kHexadecimal).ptr;
  std::string text(size.begin(), end);
  text.reserve(text.size() + piece.size() + 4);
  text += "\r\n";
  text += piece;
  text += "\r\n";
  return text;
}

}  // namespace replayssm::http
