// Configurations made up from golden ones, and their refusals.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "model/config_parser.h"
#include "model/folders.h"

namespace replayssm::testing {

using nlohmann::json;

inline json golden(const std::string& name) {
  return read_config(repository() / "tests/golden/random" / name);
}

inline ModelConfig parse(const json& config) {
  return parse_config({"config.json", config.dump()}, std::nullopt);
}

inline std::string error_for(const json& config) {
  return error_of([&] { parse(config); });
}

// A change to one key of a golden configuration and the words that the refusal must have. A value
// of "<absent>" removes the key; a key may lead into an object with dots.
struct BadCase {
  std::string source, key;
  json value;
  std::vector<std::string> words;
};

inline void PrintTo(const BadCase& c, std::ostream* out) { *out << c.source << " " << c.key; }

inline json changed(json config, const std::string& key, const json& value) {
  const json::json_pointer place('/' + std::string(key));
  if (value == "<absent>") {
    config.erase(key);
  } else {
    config[place] = value;
  }
  return config;
}

inline void expect_refused(const BadCase& c, const json& good) {
  ASSERT_EQ(error_for(good), "");
  const std::string error = error_for(changed(good, c.key, c.value));
  EXPECT_THAT(error, ::testing::HasSubstr("config.json: "));
  EXPECT_THAT(error, ::testing::Not(::testing::HasSubstr("\n")));
  for (const std::string& word : c.words) EXPECT_THAT(error, ::testing::HasSubstr(word));
}

}  // namespace replayssm::testing
