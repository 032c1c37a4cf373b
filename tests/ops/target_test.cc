// The choice of an instruction set. What it changes is tested through the program, which can make
// it.
#include "ops/cpu/target.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::ThrowsMessage;

TEST(CpuTarget, IsOneOfThoseThatAreHere) {
  const std::vector<std::string> names = target_names();
  ASSERT_FALSE(names.empty());
  EXPECT_THAT((std::vector<std::string>{"avx512", "avx2", "baseline"}), IsSupersetOf(names));
  EXPECT_EQ(target_name(), names.front());
}

TEST(CpuTarget, RefusesOthersByNamingThese) {
  const std::string before = target_name();
  EXPECT_THAT([] { limit_target("mmx"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("(" + before), HasSubstr("got 'mmx'"))));
  EXPECT_THROW(limit_target(""), Error);
  EXPECT_EQ(target_name(), before);
}

}  // namespace
}  // namespace replayssm::cpu
