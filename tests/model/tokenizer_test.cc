#include "model/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace replayssm {
namespace {

const std::filesystem::path kSource = REPLAYSSM_SOURCE_DIR;

class BundledTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(BundledTokenizer, EncodesAndDecodesAsRecorded) {
  const Tokenizer tokenizer(kSource / "models" / GetParam());
  std::ifstream file(kSource / "tests/golden" / (std::string(GetParam()) + ".tokenizer.json"));
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_GT(cases.size(), 10u);
  for (const nlohmann::json& record : cases) {
    const auto ids = record["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(record["text"].get<std::string>(), false), ids) << record;
    EXPECT_EQ(tokenizer.decode(ids, false), record["decoded"].get<std::string>()) << record;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, BundledTokenizer,
                         testing::Values("tiny-nemotron-h", "tiny-qwen3.5"));

}  // namespace
}  // namespace replayssm
