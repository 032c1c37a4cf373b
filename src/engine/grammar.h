// Context-free grammars over bytes, and what they let a model say.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/constraint.h"
#include "model/tokenizer.h"

namespace replayssm {

// Rules are lists of alternatives, alternatives lists of elements: a set of bytes, or a rule.
class Grammar {
 public:
  using Bytes = std::bitset<256>;
  struct Element {
    Bytes bytes{};
    int32_t rule = kBytes;  // >= 0: the element is this rule
  };
  static constexpr int32_t kBytes = -1, kEnd = -2;  // kEnd: behind an alternative's last element
  using Alternative = std::vector<Element>;

  // Rules may be referred to before they have alternatives.
  int32_t add_rule() {
    alternatives_.emplace_back();
    return static_cast<int32_t>(alternatives_.size()) - 1;
  }
  void add_alternative(int32_t rule, const Alternative& alternative);
  int32_t rule(const Alternative& alternative) {
    const int32_t index = add_rule();
    add_alternative(index, alternative);
    return index;
  }

  // Adds another grammar's rules; its root's number here.
  int32_t add(const Grammar& other);

  // Places of the first elements of a rule's alternatives; the others follow, up to one of kEnd.
  const std::vector<int32_t>& alternatives(int32_t rule) const { return alternatives_[rule]; }
  const Element& element(int32_t place) const { return elements_[place]; }
  int64_t size() const { return std::ssize(elements_) + std::ssize(alternatives_); }
  // Whether a rule leads to itself before any byte: such a grammar cannot be followed.
  bool begins_with_itself() const;
  int32_t root = -1;

 private:
  std::vector<bool> rules_that_may_be_empty() const;

  std::vector<std::vector<int32_t>> alternatives_;
  std::vector<Element> elements_;
};

// Elements of an alternative.
Grammar::Element one_of(std::string_view bytes);
Grammar::Element between(unsigned char first, unsigned char last);
Grammar::Element call(int32_t rule);
Grammar::Alternative literal(std::string_view text);

// What one grammar or the other admits.
Grammar either(Grammar one, const Grammar& other);

// Where texts stand in a grammar. A state is every way to go on: stacks of places, what comes next
// and what comes behind the rules around it. Equal stacks are kept once, under one number.
// Whatever a grammar is, work and memory are bounded: stacks that are too deep, and those beyond a
// number of them, are dropped. Fewer texts are admitted then, none that should not be.
class GrammarStates {
 public:
  using State = std::vector<int32_t>;  // ascending; equal ones: equal states

  explicit GrammarStates(const Grammar& grammar);  // one that does not begin with itself

  State begin();
  State advance(const State& state, unsigned char byte);  // empty: no text goes on so
  static bool may_end(const State& state) { return !state.empty() && state.front() == kDone; }
  static bool may_continue(const State& state) { return !state.empty() && state.back() != kDone; }

  int64_t stacks() const { return std::ssize(stacks_); }
  int64_t work() const { return work_; }  // stacks looked at so far
  // Forgets all stacks but those of a state, whose numbers change.
  State keep(const State& state);

 private:
  static constexpr int32_t kDone = 0;  // the empty stack: the text is whole

  struct Stack {
    int32_t place, below, depth;
    std::optional<State> after{};  // what its next element's bytes lead to, once that was asked
  };

  std::optional<int32_t> push(int32_t below, int32_t place);
  State expand(std::vector<int32_t> stacks);
  const State& after(int32_t stack);

  const Grammar* grammar_;
  std::vector<Stack> stacks_;
  int64_t work_ = 0;
  std::unordered_map<uint64_t, int32_t> numbers_;  // of (below, place)
};

// The tokens of a vocabulary by their bytes.
class VocabularyTrie {
 public:
  VocabularyTrie(const Tokenizer& tokenizer, int64_t vocab_size);

  // 1 for the tokens that a state can go on with.
  std::vector<uint8_t> allowed(GrammarStates& states, const GrammarStates::State& state) const;

 private:
  struct Node {
    std::vector<int32_t> tokens;
    std::vector<std::pair<unsigned char, int32_t>> children;
  };
  void visit(int32_t node, GrammarStates& states, const GrammarStates::State& state,
             std::vector<uint8_t>& allowed) const;

  std::vector<Node> nodes_;
  int64_t vocab_size_;
};

// Holds an output to a grammar.
class GrammarConstraint final : public TokenConstraint {
 public:
  GrammarConstraint(std::shared_ptr<const Grammar> grammar,
                    std::shared_ptr<const VocabularyTrie> vocabulary, const Tokenizer& tokenizer);

  std::span<const uint8_t> allowed() override;
  void accept(int32_t token) override;
  bool may_end() const override { return GrammarStates::may_end(state_); }
  bool complete() override;

 private:
  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const VocabularyTrie> vocabulary_;
  const Tokenizer& tokenizer_;
  GrammarStates states_;
  GrammarStates::State state_;
  bool narrows_ = false;                                        // the last mask took too long
  std::map<GrammarStates::State, std::vector<uint8_t>> masks_;  // of states met before
};

}  // namespace replayssm
