#include "server/grammar.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm::server {

Grammar::Element one_of(std::string_view bytes) {
  Grammar::Element element;
  for (const char byte : bytes) element.bytes.set(static_cast<unsigned char>(byte));
  return element;
}

Grammar::Element between(unsigned char first, unsigned char last) {
  Grammar::Element element;
  for (unsigned byte = first; byte <= last; ++byte) element.bytes.set(byte);
  return element;
}

Grammar::Element call(int32_t rule) { return {.bytes = {}, .rule = rule}; }

Grammar::Alternative literal(std::string_view text) {
  Grammar::Alternative elements;
  for (size_t i = 0; i < text.size(); ++i) elements.push_back(one_of(text.substr(i, 1)));
  return elements;
}

bool Grammar::begins_with_itself() const {
  const size_t count = rules_.size();
  std::vector<bool> empty(count, false);  // may be nothing
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t r = 0; r < count; ++r) {
      const auto is_empty = [&](const Element& e) { return e.rule >= 0 && empty[e.rule]; };
      const bool now = std::ranges::any_of(rules_[r], [&](const Alternative& alternative) {
        return std::ranges::all_of(alternative, is_empty);
      });
      changed = changed || (now && !empty[r]);
      empty[r] = empty[r] || now;
    }
  }
  // Rules that all their beginnings have been taken from lead nowhere; what is left are circles.
  std::vector<std::vector<int32_t>> begins(count);
  std::vector<int32_t> followed(count, 0);
  for (size_t r = 0; r < count; ++r) {
    for (const Alternative& alternative : rules_[r]) {
      for (const Element& element : alternative) {
        if (element.rule < 0) break;
        begins[r].push_back(element.rule);
        ++followed[element.rule];
        if (!empty[element.rule]) break;
      }
    }
  }
  std::vector<int32_t> free;
  for (size_t r = 0; r < count; ++r) {
    if (followed[r] == 0) free.push_back(static_cast<int32_t>(r));
  }
  size_t taken = 0;
  for (; !free.empty(); ++taken) {
    const int32_t rule = free.back();
    free.pop_back();
    for (const int32_t next : begins[rule]) {
      if (--followed[next] == 0) free.push_back(next);
    }
  }
  return taken < count;
}

GrammarState::GrammarState(const Grammar& grammar) : grammar_(&grammar) {
  for (size_t a = 0; a < grammar.alternatives(grammar.root).size(); ++a)
    expand({{grammar.root, static_cast<int32_t>(a), 0}});
}

// Adds a stack whose next element is a set of bytes, or nothing at all: rules are opened, what has
// ended is closed.
void GrammarState::expand(Stack stack) {
  while (!stack.empty()) {
    const Position top = stack.back();
    const auto& alternative = grammar_->alternatives(top.rule)[top.alternative];
    if (top.element == std::ssize(alternative)) {
      stack.pop_back();
      continue;
    }
    const int32_t rule = alternative[top.element].rule;
    if (rule < 0) break;
    ++stack.back().element;
    // What has nothing behind it need not be come back to: lists do not grow the stack.
    if (stack.back().element == std::ssize(alternative)) stack.pop_back();
    const auto count = std::ssize(grammar_->alternatives(rule));
    for (int64_t a = 0; a < count; ++a) {
      Stack opened = stack;
      opened.push_back({rule, static_cast<int32_t>(a), 0});
      expand(std::move(opened));
    }
    return;
  }
  if (std::ranges::find(stacks_, stack) == stacks_.end()) stacks_.push_back(std::move(stack));
}

bool GrammarState::advance(unsigned char byte) {
  const std::vector<Stack> before = std::exchange(stacks_, {});
  for (const Stack& stack : before) {
    if (stack.empty()) continue;
    const Position& top = stack.back();
    if (!grammar_->alternatives(top.rule)[top.alternative][top.element].bytes.test(byte)) continue;
    Stack next = stack;
    ++next.back().element;
    expand(std::move(next));
  }
  return !stacks_.empty();
}

bool GrammarState::may_end() const { return std::ranges::any_of(stacks_, &Stack::empty); }
bool GrammarState::may_continue() const {
  return std::ranges::any_of(stacks_, [](const Stack& stack) { return !stack.empty(); });
}

std::string GrammarState::key() const {
  std::string key;
  for (const Stack& stack : stacks_) {
    key.append(reinterpret_cast<const char*>(stack.data()), stack.size() * sizeof(Position));
    key.append(sizeof(Position), '\xff');
  }
  return key;
}

VocabularyTrie::VocabularyTrie(const Tokenizer& tokenizer, int64_t vocab_size)
    : nodes_(1), vocab_size_(vocab_size) {
  for (int32_t id = 0; id < std::min(vocab_size, tokenizer.size()); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (bytes.empty() || tokenizer.is_special(id)) continue;
    int32_t node = 0;
    for (const char c : bytes) {
      const auto byte = static_cast<unsigned char>(c);
      const auto at = std::ranges::find(nodes_[node].children, byte,
                                        [](const auto& child) { return child.first; });
      if (at != nodes_[node].children.end()) {
        node = at->second;
        continue;
      }
      const auto added = static_cast<int32_t>(nodes_.size());
      nodes_[node].children.emplace_back(byte, added);
      nodes_.emplace_back();
      node = added;
    }
    nodes_[node].tokens.push_back(id);
  }
}

void VocabularyTrie::visit(int32_t node, const GrammarState& state,
                           std::vector<uint8_t>& allowed) const {
  for (const auto& [byte, child] : nodes_[node].children) {
    GrammarState next = state;
    if (!next.advance(byte)) continue;
    for (const int32_t token : nodes_[child].tokens) allowed[token] = 1;
    visit(child, next, allowed);
  }
}

std::vector<uint8_t> VocabularyTrie::allowed(const GrammarState& state) const {
  std::vector<uint8_t> allowed(vocab_size_, 0);
  visit(0, state, allowed);
  return allowed;
}

GrammarConstraint::GrammarConstraint(std::shared_ptr<const Grammar> grammar,
                                     std::shared_ptr<const VocabularyTrie> vocabulary,
                                     const Tokenizer& tokenizer)
    : grammar_(std::move(grammar)),
      vocabulary_(std::move(vocabulary)),
      tokenizer_(tokenizer),
      state_(*grammar_) {}

std::span<const uint8_t> GrammarConstraint::allowed() {
  constexpr size_t kMostMasks = 64;
  std::string key = state_.key();
  if (const auto at = masks_.find(key); at != masks_.end()) return at->second;
  if (masks_.size() >= kMostMasks) masks_.clear();
  return masks_.emplace(std::move(key), vocabulary_->allowed(state_)).first->second;
}

void GrammarConstraint::accept(int32_t token) {
  for (const char byte : tokenizer_.token_bytes(token))
    REPLAYSSM_CHECK(state_.advance(static_cast<unsigned char>(byte)), "token ", token,
                    " was not allowed");
}

}  // namespace replayssm::server
