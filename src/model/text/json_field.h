// JSON read with a path, so that every error names the member that is wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace replayssm::text {

// Throws Error with the byte of the first mistake.
nlohmann::json parse_json_file(const std::filesystem::path& path);

// A value and the path that led to it. Accessors throw Error such as
// "x/tokenizer.json: model.merges: expected an array, got string".
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  bool has(std::string_view key) const;  // present and not null
  JsonField operator[](std::string_view key) const;
  JsonField operator[](size_t index) const;
  size_t size() const;  // of an array

  const std::string& as_string() const;
  bool as_bool() const;
  int32_t as_id() const;                                 // an integer from 0 to 2^31 - 2
  bool flag(std::string_view key, bool fallback) const;  // an optional boolean member

  // Throws Error: "<path>: <message>".
  [[noreturn]] void reject(const std::string& message) const;

 private:
  [[noreturn]] void reject_type(const char* expected) const;

  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace replayssm::text
