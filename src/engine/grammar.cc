#include "engine/grammar.h"

#include <algorithm>
#include <ranges>
#include <unordered_set>
#include <utility>

#include "core/check.h"

namespace replayssm {

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

void Grammar::add_alternative(int32_t rule, const Alternative& alternative) {
  alternatives_[rule].push_back(static_cast<int32_t>(elements_.size()));
  elements_.insert(elements_.end(), alternative.begin(), alternative.end());
  elements_.push_back({.rule = kEnd});
}

int32_t Grammar::add(const Grammar& other) {
  const auto rules = static_cast<int32_t>(alternatives_.size());
  const auto places = static_cast<int32_t>(elements_.size());
  for (std::vector<int32_t> firsts : other.alternatives_) {
    for (int32_t& first : firsts) first += places;
    alternatives_.push_back(std::move(firsts));
  }
  for (Element element : other.elements_) {
    if (element.rule >= 0) element.rule += rules;
    elements_.push_back(element);
  }
  return other.root + rules;
}

Grammar either(Grammar one, const Grammar& other) {
  const int32_t second = one.add(other), root = one.rule({call(one.root)});
  one.add_alternative(root, {call(second)});
  one.root = root;
  return one;
}

std::vector<bool> Grammar::rules_that_may_be_empty() const {
  // Alternatives of nothing but rules may be, once all these may be.
  struct Waiting {
    int32_t rule;
    int64_t missing;
  };
  std::vector<Waiting> waiting;
  std::vector<std::vector<size_t>> users(alternatives_.size());  // in `waiting`, of each rule
  std::vector<int32_t> found;
  for (int32_t r = 0; r < std::ssize(alternatives_); ++r) {
    for (const int32_t first : alternatives_[r]) {
      int32_t end = first;
      while (elements_[end].rule >= 0) ++end;
      if (elements_[end].rule != kEnd) continue;
      for (int32_t place = first; place < end; ++place)
        users[elements_[place].rule].push_back(waiting.size());
      if (end == first) found.push_back(r);
      waiting.push_back({r, end - first});
    }
  }
  std::vector<bool> empty(alternatives_.size(), false);
  while (!found.empty()) {
    const int32_t rule = found.back();
    found.pop_back();
    if (empty[rule]) continue;
    empty[rule] = true;
    for (const size_t user : users[rule]) {
      if (--waiting[user].missing == 0) found.push_back(waiting[user].rule);
    }
  }
  return empty;
}

bool Grammar::begins_with_itself() const {
  const std::vector<bool> empty = rules_that_may_be_empty();
  // Rules that all their beginnings have been taken from lead nowhere; what is left are circles.
  const size_t count = alternatives_.size();
  std::vector<std::vector<int32_t>> begins(count);
  std::vector<int32_t> followed(count, 0);
  for (size_t r = 0; r < count; ++r) {
    for (const int32_t first : alternatives_[r]) {
      for (int32_t place = first; elements_[place].rule >= 0; ++place) {
        const int32_t next = elements_[place].rule;
        begins[r].push_back(next);
        ++followed[next];
        if (!empty[next]) break;
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

GrammarStates::GrammarStates(const Grammar& grammar) : grammar_(&grammar) {
  stacks_.push_back({.place = -1, .below = -1, .depth = 0});
}

// The stack of `place` above `below`, which is it where nothing comes at the place: what has ended
// need not be come back to, so lists do not grow stacks. None where it would be too deep.
std::optional<int32_t> GrammarStates::push(int32_t below, int32_t place) {
  constexpr int32_t kDeepest = 512;
  if (grammar_->element(place).rule == Grammar::kEnd) return below;
  const int32_t depth = stacks_[below].depth + 1;
  if (depth > kDeepest) return {};
  const uint64_t key = (static_cast<uint64_t>(below) << 32) | static_cast<uint32_t>(place);
  const auto [at, added] = numbers_.try_emplace(key, static_cast<int32_t>(stacks_.size()));
  if (added) stacks_.push_back({.place = place, .below = below, .depth = depth});
  return at->second;
}

// What stacks lead to by opening the rules that come next: stacks whose next element is a set of
// bytes, or the empty one.
GrammarStates::State GrammarStates::expand(std::vector<int32_t> stacks) {
  constexpr size_t kMost = 1 << 16;
  State found;
  std::unordered_set<int32_t> seen(stacks.begin(), stacks.end());
  while (!stacks.empty()) {
    const int32_t stack = stacks.back();
    stacks.pop_back();
    const int32_t place = stacks_[stack].place;
    if (stack == kDone || grammar_->element(place).rule == Grammar::kBytes) {
      found.push_back(stack);
      continue;
    }
    const auto behind = push(stacks_[stack].below, place + 1);
    if (!behind) continue;
    for (const int32_t first : grammar_->alternatives(grammar_->element(place).rule)) {
      const auto opened = push(*behind, first);
      if (opened && seen.size() < kMost && seen.insert(*opened).second) stacks.push_back(*opened);
    }
  }
  std::ranges::sort(found);
  return found;
}

GrammarStates::State GrammarStates::begin() {
  std::vector<int32_t> stacks;
  for (const int32_t first : grammar_->alternatives(grammar_->root))
    stacks.push_back(*push(kDone, first));
  return expand(std::move(stacks));
}

const GrammarStates::State& GrammarStates::after(int32_t stack) {
  if (!stacks_[stack].after) {
    const auto next = push(stacks_[stack].below, stacks_[stack].place + 1);
    State state = next ? expand({*next}) : State();
    stacks_[stack].after = std::move(state);
  }
  return *stacks_[stack].after;
}

GrammarStates::State GrammarStates::advance(const State& state, unsigned char byte) {
  constexpr size_t kMost = 2048;
  State next;
  int sources = 0;
  work_ += std::ssize(state);
  for (const int32_t stack : state) {
    if (stack == kDone || !grammar_->element(stacks_[stack].place).bytes.test(byte)) continue;
    const State& more = after(stack);
    next.insert(next.end(), more.begin(), more.end());
    ++sources;
  }
  if (sources > 1) {
    std::ranges::sort(next);
    next.erase(std::ranges::unique(next).begin(), next.end());
    if (next.size() > kMost) next.resize(kMost);
  }
  return next;
}

GrammarStates::State GrammarStates::keep(const State& state) {
  GrammarStates kept(*grammar_);
  State numbers;
  for (const int32_t stack : state) {
    std::vector<int32_t> places;  // the innermost first
    for (int32_t at = stack; at != kDone; at = stacks_[at].below)
      places.push_back(stacks_[at].place);
    int32_t number = kDone;
    for (const int32_t place : places | std::views::reverse) number = *kept.push(number, place);
    numbers.push_back(number);
  }
  std::ranges::sort(numbers);
  *this = std::move(kept);
  return numbers;
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

void VocabularyTrie::visit(int32_t node, GrammarStates& states, const GrammarStates::State& state,
                           std::vector<uint8_t>& allowed) const {
  for (const auto& [byte, child] : nodes_[node].children) {
    const GrammarStates::State next = states.advance(state, byte);
    if (next.empty()) continue;
    for (const int32_t token : nodes_[child].tokens) allowed[token] = 1;
    visit(child, states, next, allowed);
  }
}

std::vector<uint8_t> VocabularyTrie::allowed(GrammarStates& states,
                                             const GrammarStates::State& state) const {
  std::vector<uint8_t> allowed(vocab_size_, 0);
  visit(0, states, state, allowed);
  return allowed;
}

GrammarConstraint::GrammarConstraint(std::shared_ptr<const Grammar> grammar,
                                     std::shared_ptr<const VocabularyTrie> vocabulary,
                                     const Tokenizer& tokenizer)
    : grammar_(std::move(grammar)),
      vocabulary_(std::move(vocabulary)),
      tokenizer_(tokenizer),
      states_(*grammar_),
      state_(states_.begin()) {}

std::span<const uint8_t> GrammarConstraint::allowed() {
  constexpr size_t kMostMasks = 64;
  constexpr int64_t kMostWork = 8 << 20;  // tens of milliseconds
  if (const auto at = masks_.find(state_); at != masks_.end()) return at->second;
  if (masks_.size() >= kMostMasks) masks_.clear();
  const int64_t before = states_.work();
  const auto& mask = masks_.emplace(state_, vocabulary_->allowed(states_, state_)).first->second;
  narrows_ = states_.work() - before > kMostWork;
  return mask;
}

void GrammarConstraint::accept(int32_t token) {
  constexpr int64_t kMostStacks = 1 << 17;
  for (const char byte : tokenizer_.token_bytes(token)) {
    state_ = states_.advance(state_, static_cast<unsigned char>(byte));
    REPLAYSSM_CHECK(!state_.empty(), "token ", token, " was not allowed");
  }
  // Many readings of the text so far, and each takes time at every token: the half must do.
  if (std::exchange(narrows_, false)) state_.resize((state_.size() + 1) / 2);
  if (states_.stacks() < kMostStacks) return;
  state_ = states_.keep(state_);
  masks_.clear();
}

bool GrammarConstraint::complete() {
  if (!GrammarStates::may_continue(state_)) return true;
  const std::span<const uint8_t> next = allowed();
  return !may_end() && std::ranges::find(next, 1) == next.end();
}

}  // namespace replayssm
