#include "engine/stop.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace replayssm {
namespace {

struct Case {
  std::vector<std::string> stop;
  std::string text;
  std::string result;
  bool matched;
};

const std::vector<Case> kCases = {
    {{}, "anything", "anything", false},
    {{"stop"}, "do not sto", "do not sto", false},
    {{"stop"}, "it stops here", "it ", true},
    {{"stop"}, "ststop", "st", true},
    {{"aab"}, "aaaab", "aa", true},
    {{"\n\n", "END"}, "a\nEND\n\n", "a\n", true},
    {{"END", "\n\n"}, "a\n\nEND", "a", true},
    {{"ab", "xaby"}, "xaby", "x", true},  // the one that completes first
    {{"b", "xab"}, "xab", "", true},      // both complete on the same byte
    {{"abab", "ba"}, "abab", "a", true},
    {{"é"}, "cafè olé!", "cafè ol", true},
    {{"x"}, "x", "", true},
    {{"x"}, "", "", false},
};

// Cuts the text where `cuts` has bits set.
std::string feed(StopMatcher& matcher, const std::string& text, uint32_t cuts) {
  std::string result, piece;
  for (size_t i = 0; i < text.size(); ++i) {
    piece += text[i];
    if ((cuts >> i & 1) == 0) continue;
    result += matcher.push(piece);
    piece.clear();
  }
  result += matcher.push(piece);
  return result;
}

TEST(StopMatcher, GivesTheSameForEveryCutOfTheText) {
  for (const Case& c : kCases) {
    const size_t bits = c.text.empty() ? 0 : c.text.size() - 1;
    for (uint32_t cuts = 0; cuts < 1U << bits; ++cuts) {
      StopMatcher matcher(c.stop);
      std::string result = feed(matcher, c.text, cuts);
      if (!matcher.matched()) result += matcher.finish();
      ASSERT_EQ(result, c.result) << c.text << " cut at " << cuts;
      ASSERT_EQ(matcher.matched(), c.matched) << c.text << " cut at " << cuts;
      ASSERT_EQ(matcher.push("more"), c.matched ? "" : "more") << c.text;
    }
  }
}

// Nothing is held back longer than needed: what is held is the start of some stop string.
TEST(StopMatcher, HoldsOnlyWhatMayBecomeAStopString) {
  StopMatcher matcher({"<|end|>", "</s>"});
  EXPECT_EQ(matcher.push("a < b"), "a < b");
  EXPECT_EQ(matcher.push(" <"), " ");
  EXPECT_EQ(matcher.push("|e"), "");
  EXPECT_EQ(matcher.push("x<"), "<|ex");
  EXPECT_EQ(matcher.push("/"), "");
  EXPECT_EQ(matcher.finish(), "</");
}

}  // namespace
}  // namespace replayssm
