#include "engine/grammar.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "core/philox.h"
#include "engine/admits.h"

namespace replayssm {
namespace {

using testing::admits;

// Brackets within brackets around x, by as many alternatives that say the same.
Grammar nested(int alternatives) {
  Grammar grammar;
  const int32_t rule = grammar.root = grammar.rule(literal("x"));
  for (int i = 0; i < alternatives; ++i)
    grammar.add_alternative(rule, {one_of("["), call(rule), one_of("]")});
  return grammar;
}

TEST(Grammar, AdmitsItsTexts) {
  Grammar grammar;  // numbers joined by signs, with blanks that may be missing
  const int32_t digits = grammar.rule({});
  grammar.add_alternative(digits, {one_of("0123456789"), call(digits)});
  const int32_t blank = grammar.rule({});
  grammar.add_alternative(blank, {one_of(" ")});
  const int32_t number = grammar.rule({between('0', '9'), call(digits), call(blank)});
  const int32_t more = grammar.rule({});
  grammar.add_alternative(more, {one_of("+-"), call(blank), call(number), call(more)});
  grammar.root = grammar.rule({call(number), call(more)});
  EXPECT_FALSE(grammar.begins_with_itself());
  for (const char* text : {"1", "12 ", "1+2", "10 - 2 +3 "}) EXPECT_TRUE(admits(grammar, text));
  for (const char* text : {"", "+1", "1+", "1  +2", "1 2", "a"})
    EXPECT_FALSE(admits(grammar, text));
}

TEST(Grammar, TellsWhatBeginsWithItself) {
  Grammar grammar;
  const int32_t empty = grammar.rule({}), first = grammar.add_rule(), second = grammar.add_rule();
  grammar.add_alternative(first, {call(empty), call(second)});
  grammar.add_alternative(second, {one_of("a"), call(first)});
  EXPECT_FALSE(grammar.begins_with_itself());
  grammar.add_alternative(second, {call(empty), call(empty), call(first), one_of("b")});
  EXPECT_TRUE(grammar.begins_with_itself());
}

// Followed one by one, the ways to read these would be two to the power of the depth.
TEST(GrammarStates, WorkIsBoundedWhereManyReadingsAreTheSame) {
  Grammar chain;
  int32_t rule = chain.rule(literal("x"));
  for (int i = 0; i < 1000; ++i) {
    const int32_t next = chain.rule({call(rule)});
    chain.add_alternative(next, {call(rule)});
    rule = next;
  }
  chain.root = rule;
  EXPECT_FALSE(chain.begins_with_itself());
  EXPECT_TRUE(admits(chain, "x"));

  Grammar behind;  // the readings differ in what comes behind them
  rule = behind.rule(literal("x"));
  for (int i = 0; i < 60; ++i) {
    const int32_t next = behind.rule({call(rule), one_of("y")});
    behind.add_alternative(next, {call(rule), one_of("y")});
    rule = next;
  }
  behind.root = rule;
  EXPECT_TRUE(admits(behind, "x" + std::string(60, 'y')));

  const Grammar brackets = nested(2);
  GrammarStates states(brackets);
  auto state = states.begin();
  for (int i = 0; i < 60; ++i) {
    state = states.advance(state, '[');
    ASSERT_FALSE(state.empty());
    EXPECT_LE(state.size(), 2048);
  }
  EXPECT_LT(states.stacks(), 600000);
  EXPECT_TRUE(admits(brackets, std::string(60, '[') + "x" + std::string(60, ']')));
  EXPECT_FALSE(admits(brackets, std::string(60, '[') + "x" + std::string(59, ']')));
}

TEST(GrammarStates, StacksHaveADepthAndNoMore) {
  const Grammar grammar = nested(1);
  for (const int depth : {500, 100000}) {
    const bool admitted = admits(grammar, std::string(depth, '[') + "x" + std::string(depth, ']'));
    EXPECT_EQ(admitted, depth == 500);
  }
}

TEST(GrammarStates, KeepsWhatItIsTold) {
  const Grammar grammar = nested(2);
  GrammarStates states(grammar);
  auto state = states.begin();
  for (int i = 0; i < 5; ++i) state = states.advance(state, '[');
  const auto size = state.size();
  const int64_t before = states.stacks();
  state = states.keep(state);
  EXPECT_EQ(state.size(), size);
  EXPECT_LT(states.stacks(), before);
  for (const char byte : std::string("x]]]]")) state = states.advance(state, byte);
  EXPECT_FALSE(GrammarStates::may_end(state));
  state = states.advance(state, ']');
  EXPECT_TRUE(GrammarStates::may_end(state));
  EXPECT_FALSE(GrammarStates::may_continue(state));
}

const Tokenizer& tokenizer() {
  static const Tokenizer instance(std::string(REPLAYSSM_SOURCE_DIR) + "/models/tiny-qwen3.5");
  return instance;
}

// A token is allowed if and only if the grammar goes on with its bytes.
TEST(GrammarConstraint, AllowsTheTokensThatGoOn) {
  const auto vocabulary = std::make_shared<VocabularyTrie>(tokenizer(), tokenizer().size());
  Grammar words;  // words of small letters with single blanks between them, and a stop
  const int32_t letters = words.add_rule();
  words.add_alternative(letters, {between('a', 'z'), call(letters)});
  words.add_alternative(letters, {one_of(" "), between('a', 'z'), call(letters)});
  words.add_alternative(letters, literal("."));
  words.root = words.rule({between('a', 'z'), call(letters)});
  const auto grammar = std::make_shared<const Grammar>(std::move(words));
  int whole = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    GrammarConstraint constraint(grammar, vocabulary, tokenizer());
    std::string text;
    for (int64_t step = 0; step < 30 && !constraint.complete(); ++step) {
      const auto allowed = constraint.allowed();
      std::vector<int32_t> ids;
      for (int32_t id = 0; id < tokenizer().size(); ++id) {
        const std::string_view bytes = tokenizer().token_bytes(id);
        const std::string next = text + std::string(bytes);
        bool goes_on = !bytes.empty() && !tokenizer().is_special(id) && next[0] != ' ';
        for (size_t i = 0; i < next.size(); ++i) {
          const bool last = i + 1 == next.size();
          goes_on = goes_on &&
                    ((next[i] >= 'a' && next[i] <= 'z') || (next[i] == ' ' && next[i - 1] != ' ') ||
                     (next[i] == '.' && last && i > 0 && next[i - 1] != ' '));
        }
        ASSERT_EQ(goes_on, allowed[id] != 0) << text << " then " << bytes;
        if (goes_on) ids.push_back(id);
      }
      const double drawn = uniform(seed, step) * static_cast<double>(ids.size());
      const int32_t id = step == 20 ? *tokenizer().token_id(".") : ids[static_cast<size_t>(drawn)];
      if (allowed[id] == 0) break;  // behind a blank
      constraint.accept(id);
      text += tokenizer().token_bytes(id);
    }
    EXPECT_EQ(constraint.may_end(), text.ends_with('.'));
    EXPECT_EQ(constraint.complete(), text.ends_with('.'));
    whole += constraint.complete();
  }
  EXPECT_GT(whole, 5);
}

// Where the readings of a text become many, some are given up before masks take long; what comes
// out is a text of the grammar all the same.
TEST(GrammarConstraint, NarrowsWhereMasksWouldTakeLong) {
  const auto vocabulary = std::make_shared<VocabularyTrie>(tokenizer(), tokenizer().size());
  Grammar ambiguous;
  const int32_t word = ambiguous.rule(literal("."));
  ambiguous.add_alternative(word, {between('a', 'z'), call(word)});
  ambiguous.add_alternative(word, {one_of(" "), call(word)});
  const int32_t rule = ambiguous.root = ambiguous.rule({call(word)});
  for (int i = 0; i < 2; ++i)
    ambiguous.add_alternative(rule, {one_of("["), call(rule), one_of("]")});
  const auto grammar = std::make_shared<const Grammar>(std::move(ambiguous));
  GrammarConstraint constraint(grammar, vocabulary, tokenizer());
  const auto began = std::chrono::steady_clock::now();
  std::string text;
  const auto say = [&](const char* token) {
    const int32_t id = *tokenizer().token_id(token);
    ASSERT_EQ(constraint.allowed()[id], 1) << text;
    constraint.accept(id);
    text += token;
  };
  for (int i = 0; i < 40; ++i) say("[");
  for (int i = 0; i < 40; ++i) say("a");
  say(".");
  for (int i = 0; i < 40; ++i) say("]");
  EXPECT_TRUE(constraint.complete());
  EXPECT_TRUE(constraint.may_end());
  EXPECT_TRUE(admits(*grammar, text));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(took.count(), 30);  // 2^40 readings
}

// What no token goes on with is over, though it is not whole.
TEST(GrammarConstraint, EndsWhereNoTokenGoesOn) {
  const auto vocabulary = std::make_shared<VocabularyTrie>(tokenizer(), tokenizer().size());
  auto endless = std::make_shared<Grammar>();
  endless->root = endless->add_rule();
  endless->add_alternative(endless->root, {one_of("["), call(endless->root), one_of("]")});
  GrammarConstraint constraint(endless, vocabulary, tokenizer());
  const int32_t bracket = *tokenizer().token_id("[");
  int64_t accepted = 0;
  while (!constraint.complete()) {
    ASSERT_LT(++accepted, 2000);
    constraint.accept(bracket);
  }
  EXPECT_FALSE(constraint.may_end());
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace replayssm
