// Context-free grammars over bytes, and what they let a model say.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/constraint.h"
#include "model/tokenizer.h"

namespace replayssm::server {

// Rules are lists of alternatives, alternatives lists of elements: a set of bytes, or a rule.
class Grammar {
 public:
  using Bytes = std::bitset<256>;
  struct Element {
    Bytes bytes{};
    int32_t rule = -1;  // >= 0: the element is this rule
  };
  using Alternative = std::vector<Element>;

  // Rules may be referred to before they have alternatives.
  int32_t add_rule() {
    rules_.emplace_back();
    return static_cast<int32_t>(rules_.size()) - 1;
  }
  void add_alternative(int32_t rule, Alternative alternative) {
    rules_[rule].push_back(std::move(alternative));
  }
  int32_t rule(Alternative alternative) {
    const int32_t index = add_rule();
    add_alternative(index, std::move(alternative));
    return index;
  }

  const std::vector<Alternative>& alternatives(int32_t rule) const { return rules_[rule]; }
  int64_t size() const { return std::ssize(rules_); }
  // Whether a rule leads to itself before any byte: such a grammar cannot be followed.
  bool begins_with_itself() const;
  int32_t root = -1;

 private:
  std::vector<std::vector<Alternative>> rules_;
};

// Elements of an alternative.
Grammar::Element one_of(std::string_view bytes);
Grammar::Element between(unsigned char first, unsigned char last);
Grammar::Element call(int32_t rule);
Grammar::Alternative literal(std::string_view text);

// Where a text stands in a grammar: every way to go on from there.
class GrammarState {
 public:
  explicit GrammarState(const Grammar& grammar);

  bool advance(unsigned char byte);  // false: no text goes on so, and the state is lost
  bool may_end() const;
  bool may_continue() const;
  // Equal keys: equal states.
  std::string key() const;

 private:
  // An element that comes next, and those behind it; innermost last.
  struct Position {
    int32_t rule, alternative, element;
    auto operator<=>(const Position&) const = default;
  };
  using Stack = std::vector<Position>;

  void expand(Stack stack);

  const Grammar* grammar_;  // begins_with_itself() is false
  std::vector<Stack> stacks_;
};

// The tokens of a vocabulary by their bytes.
class VocabularyTrie {
 public:
  VocabularyTrie(const Tokenizer& tokenizer, int64_t vocab_size);

  // 1 for the tokens that a state can go on with.
  std::vector<uint8_t> allowed(const GrammarState& state) const;

 private:
  struct Node {
    std::vector<int32_t> tokens;
    std::vector<std::pair<unsigned char, int32_t>> children;
  };
  void visit(int32_t node, const GrammarState& state, std::vector<uint8_t>& allowed) const;

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
  bool may_end() const override { return state_.may_end(); }
  bool complete() const override { return !state_.may_continue(); }

 private:
  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const VocabularyTrie> vocabulary_;
  const Tokenizer& tokenizer_;
  GrammarState state_;
  std::unordered_map<std::string, std::vector<uint8_t>> masks_;  // of states met before
};

}  // namespace replayssm::server
