#include "core/philox.h"

#include <gtest/gtest.h>

#include <set>

namespace replayssm {
namespace {

// Known answers of the authors' Random123 library (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, MatchesPublishedVectors) {
  using Counter = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Uniform, IsInRangeAndDiffersBySeedAndPosition) {
  std::set<double> seen;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
    for (int64_t position : {int64_t{0}, int64_t{1}, int64_t{1} << 32, int64_t{1} << 62}) {
      const double value = uniform(seed, position);
      EXPECT_GE(value, 0);
      EXPECT_LT(value, 1);
      EXPECT_EQ(value, uniform(seed, position));
      EXPECT_TRUE(seen.insert(value).second);
    }
  }
}

}  // namespace
}  // namespace replayssm
