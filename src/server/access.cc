#include "server/access.h"

#include <algorithm>
#include <cctype>
#include <random>

namespace replayssm::server {
namespace {

bool same(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^
                  static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  }
  return difference == 0;
}

}  // namespace

bool is_authorized(std::string_view authorization, const std::vector<std::string>& keys) {
  if (keys.empty()) return true;
  constexpr std::string_view kScheme = "Bearer ";
  if (!authorization.starts_with(kScheme)) return false;
  authorization.remove_prefix(kScheme.size());
  bool found = false;
  for (const std::string& key : keys) found = same(authorization, key) || found;
  return found;
}

http::Headers cors_headers(const std::string& origin, const std::vector<std::string>& allowed) {
  if (origin.empty()) return {};
  const bool all = std::ranges::count(allowed, "*") > 0;
  if (!all && std::ranges::count(allowed, origin) == 0) return {};
  return {{"Access-Control-Allow-Origin", all ? "*" : origin},
          {"Vary", "Origin"},
          {"Access-Control-Expose-Headers", "X-Request-Id"}};
}

std::string new_id() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  static constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr int kLength = 24;
  std::string id;
  for (int i = 0; i < kLength; ++i) id += kDigits[random() % kDigits.size()];
  return id;
}

std::string request_id(const std::string& proposed) {
  constexpr size_t kLongest = 64;
  const auto fit = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  if (!proposed.empty() && proposed.size() <= kLongest && std::ranges::all_of(proposed, fit))
    return proposed;
  return new_id();
}

}  // namespace replayssm::server
