// Typed, range-checked access to one object of a configuration file. Every refusal names the file,
// the key, what was expected and what was got.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace replayssm {

class ConfigReader {
 public:
  // Spellings of one key. All that are present must agree.
  using Names = std::initializer_list<std::string_view>;

  struct Range {
    int64_t low, high;
  };

  // `scope` stands before keys in messages ("text_config."). A key that is also in `outer` must
  // agree with it, and is found there when missing here.
  ConfigReader(const nlohmann::json& object, std::string file, std::string scope = {},
               const ConfigReader* outer = nullptr)
      : object_(&object), outer_(outer), file_(std::move(file)), scope_(std::move(scope)) {}

  // null counts as absent.
  bool has(std::string_view name) const { return find({name}) != nullptr; }
  const nlohmann::json* find(Names names) const;

  int64_t integer(Names names, Range range) const;  // required
  int64_t integer(Names names, Range range, int64_t fallback) const;
  double number(Names names, double low, double high, double fallback) const;
  bool flag(Names names, bool fallback) const;
  std::string text(Names names, std::string_view fallback) const;
  const nlohmann::json* list(Names names) const;  // null when absent

  // The object under `name`, read with the same rules.
  std::optional<ConfigReader> object(std::string_view name) const;

  // Refuses the file unless the key has one of the `known` texts or is absent.
  void expect_text(Names names, Names known) const;

  [[noreturn]] void refuse(std::string_view name, std::string_view expected,
                           std::string_view got) const;

  const nlohmann::json& raw() const { return *object_; }
  const std::string& file() const { return file_; }

 private:
  struct Found {
    std::string key;  // with its scope
    const nlohmann::json* value = nullptr;
  };

  void collect(Names names, Found& found) const;
  Found look_up(Names names) const;
  [[noreturn]] void refuse_value(const Found& found, std::string_view expected) const;

  const nlohmann::json* object_;
  const ConfigReader* outer_;
  std::string file_, scope_;
};

// A JSON number, or transformers' {"__float__": "Infinity"}. Empty for anything else.
std::optional<double> json_number(const nlohmann::json& value);

}  // namespace replayssm
