#include "model/config_reader.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "model/json_text.h"

namespace replayssm {

using nlohmann::json;

std::optional<double> json_number(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_object() || value.size() != 1) return std::nullopt;
  const auto tagged = value.find("__float__");
  if (tagged == value.end() || !tagged->is_string()) return std::nullopt;
  const auto& text = tagged->get_ref<const std::string&>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "Infinity") return kInfinity;
  if (text == "-Infinity") return -kInfinity;
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  return std::nullopt;
}

void ConfigReader::collect(Names names, Found& found) const {
  for (const std::string_view name : names) {
    const auto here = object_->find(name);
    if (here == object_->end() || here->is_null()) continue;
    const std::string key = scope_ + std::string(name);
    if (!found.value) {
      found = {key, &*here};
    } else if (*found.value != *here) {
      fail(file_, ": ", found.key, " (", describe(*found.value), ") and ", key, " (",
           describe(*here), ") disagree");
    }
  }
  if (outer_) outer_->collect(names, found);
}

ConfigReader::Found ConfigReader::look_up(Names names) const {
  Found found;
  collect(names, found);
  return found;
}

void ConfigReader::refuse(std::string_view name, std::string_view expected,
                          std::string_view got) const {
  fail(file_, ": ", scope_, name, ": expected ", expected, ", got ", got);
}

void ConfigReader::refuse_value(const Found& found, std::string_view expected) const {
  fail(file_, ": ", found.key, ": expected ", expected, ", got ", describe(*found.value));
}

const json* ConfigReader::find(Names names) const { return look_up(names).value; }

int64_t ConfigReader::integer(Names names, Range range) const {
  const Found found = look_up(names);
  const std::string expected = concat("an integer from ", range.low, " to ", range.high);
  if (!found.value) refuse(*names.begin(), expected, "nothing");
  const json& value = *found.value;
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
  if (!fits) refuse_value(found, expected);
  const auto number = value.get<int64_t>();
  if (number < range.low || number > range.high) refuse_value(found, expected);
  return number;
}

int64_t ConfigReader::integer(Names names, Range range, int64_t fallback) const {
  return find(names) ? integer(names, range) : fallback;
}

double ConfigReader::number(Names names, double low, double high, double fallback) const {
  const Found found = look_up(names);
  if (!found.value) return fallback;
  const std::optional<double> number = json_number(*found.value);
  if (!number || !(*number >= low && *number <= high)) {
    refuse_value(found, concat("a number from ", low, " to ", high));
  }
  return *number;
}

bool ConfigReader::flag(Names names, bool fallback) const {
  const Found found = look_up(names);
  if (!found.value) return fallback;
  if (!found.value->is_boolean()) refuse_value(found, "true or false");
  return found.value->get<bool>();
}

std::string ConfigReader::text(Names names, std::string_view fallback) const {
  const Found found = look_up(names);
  if (!found.value) return std::string(fallback);
  if (!found.value->is_string()) refuse_value(found, "a string");
  return found.value->get<std::string>();
}

const json* ConfigReader::list(Names names) const {
  const Found found = look_up(names);
  if (found.value && !found.value->is_array()) refuse_value(found, "a list");
  return found.value;
}

std::optional<ConfigReader> ConfigReader::object(std::string_view name) const {
  const Found found = look_up({name});
  if (!found.value) return std::nullopt;
  if (!found.value->is_object()) refuse_value(found, "an object");
  return ConfigReader(*found.value, file_, found.key + ".");
}

void ConfigReader::expect_text(Names names, Names known) const {
  const Found found = look_up(names);
  if (!found.value) return;
  const bool fits = found.value->is_string() &&
                    std::ranges::count(known, found.value->get_ref<const std::string&>()) > 0;
  if (fits) return;
  std::string expected;
  for (const std::string_view word : known) {
    expected += (expected.empty() ? "" : " or ") + in_quotes(word);
  }
  refuse_value(found, expected);
}

}  // namespace replayssm
