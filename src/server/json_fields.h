// Bodies of requests: strict about types and ranges of what is read, silent about the rest.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace replayssm::server {

using Json = nlohmann::ordered_json;

// The object that a body must be. Throws ApiError for anything else, for invalid UTF-8, and for
// nesting and objects beyond any request's.
Json parse_body(std::string_view body);

// JSON within a text; discarded where there is none that a body could be.
Json parse_embedded(std::string_view text);

// As one line of valid JSON, whatever bytes the texts have.
std::string to_text(const Json& value);

// `text` as a JSON string, quotes included. It must be UTF-8.
void append_quoted(std::string& out, std::string_view text);

// Members of an object; null counts as absent. Each throws ApiError naming the member.
class Fields {
 public:
  explicit Fields(const Json& object, std::string where = "")
      : object_(object), where_(std::move(where)) {}

  const Json* find(const char* name) const;
  std::optional<double> number(const char* name, double low, double high) const;
  std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) const;
  std::optional<bool> boolean(const char* name) const;
  std::optional<std::string> text(const char* name) const;
  const Json* object(const char* name) const;
  std::string name_of(const char* name) const { return where_ + name; }

 private:
  const Json& object_;
  std::string where_;
};

}  // namespace replayssm::server
