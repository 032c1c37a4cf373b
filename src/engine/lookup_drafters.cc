#include "engine/lookup_drafters.h"

#include <algorithm>
#include <queue>

#include "engine/scheduler.h"

namespace replayssm {
namespace {

// An earlier place whose last tokens are the text's.
struct Match {
  int64_t end = 0;     // index of the token behind them
  int64_t length = 0;  // of them, at most lookup_max
};

// The longest matches first, later ones before earlier ones.
std::vector<Match> find_matches(std::span<const int32_t> text, const SpeculativeConfig& config) {
  const auto size = static_cast<int64_t>(text.size());
  std::vector<Match> matches;
  int64_t longest = 0;
  for (int64_t end = size - 1; end > 0; --end) {
    int64_t length = 0;
    while (length < config.lookup_max && length < end &&
           text[end - 1 - length] == text[size - 1 - length]) {
      ++length;
    }
    if (length < config.lookup_min) continue;
    if (config.tree_width == 1 && length <= longest) continue;
    longest = std::max(longest, length);
    matches.push_back({end, length});
    if (config.tree_width == 1 && length == config.lookup_max) break;
    constexpr size_t kMost = 64;
    if (matches.size() == kMost) break;
  }
  std::ranges::stable_sort(matches, std::greater<>(), &Match::length);
  return matches;
}

// What follows a place; at the end of the text it follows itself.
std::vector<int32_t> continuation(std::span<const int32_t> text, int64_t from, int64_t count) {
  std::vector<int32_t> path;
  for (int64_t i = from; i < from + count; ++i) {
    const int64_t behind = i - static_cast<int64_t>(text.size());
    path.push_back(behind < 0 ? text[i] : path[behind]);
  }
  return path;
}

int64_t paths_of(const Draft& draft) {
  int64_t leaves = draft.size();
  for (int64_t i = 0; i < draft.size(); ++i) {
    const int32_t parent = draft.parent_of(i);
    const bool first =
        std::ranges::count(draft.parent.begin(), draft.parent.begin() + i, parent) == 0;
    if (parent >= 0 && first) --leaves;
  }
  return leaves;
}

}  // namespace

void add_path(std::span<const int32_t> tokens, Draft& draft) {
  int32_t parent = -1;
  for (const int32_t token : tokens) {
    int64_t at = parent + 1;
    while (at < draft.size() && !(draft.parent[at] == parent && draft.tokens[at] == token)) ++at;
    if (at == draft.size()) {
      draft.tokens.push_back(token);
      draft.parent.push_back(parent);
    }
    parent = static_cast<int32_t>(at);
  }
}

void NgramDrafter::propose(std::span<const DraftRequest> requests) {
  for (const DraftRequest& request : requests) {
    if (request.depth == 0) continue;
    const std::span<const int32_t> text = request.sequence->tokens;
    Draft& draft = *request.draft;
    for (const Match& match : find_matches(text, config_)) {
      const std::vector<int32_t> path = continuation(text, match.end, request.depth);
      if (config_.tree_width == 1) {
        draft.tokens = path;
        break;
      }
      Draft more = draft;
      add_path(path, more);
      if (paths_of(more) <= config_.tree_width) draft = std::move(more);
    }
  }
}

void SuffixDrafter::propose(std::span<const DraftRequest> requests) {
  // A continuation, as likely as the counts say.
  struct Node {
    double probability = 0;
    int32_t state = 0, token = 0, parent = -1;
    int64_t depth = 0;
    bool operator<(const Node& other) const { return probability < other.probability; }
  };
  for (const DraftRequest& request : requests) {
    SuffixAutomaton& text = texts_[request.sequence->id];
    const auto& tokens = request.sequence->tokens;
    while (text.size() < std::ssize(tokens)) text.append(tokens[text.size()]);
    if (request.depth == 0) continue;
    const int32_t suffix = text.repeated_suffix();
    if (suffix == 0 || text.length(suffix) < config_.lookup_min) continue;
    Draft& draft = *request.draft;
    std::priority_queue<Node> open;
    const auto expand = [&](int32_t state, int32_t parent, double probability, int64_t depth) {
      if (depth == request.depth) return;
      int64_t total = 0;
      for (const auto& [token, next] : text.next(state)) total += text.count(next);
      if (total == 0) return;
      for (const auto& [token, next] : text.next(state)) {
        const auto share = static_cast<double>(text.count(next)) / static_cast<double>(total);
        open.push({probability * share, next, token, parent, depth + 1});
      }
    };
    expand(suffix, -1, 1, 0);
    const int64_t most = request.depth * config_.tree_width;
    constexpr double kLeast = 0.1;  // less likely ones cost more than they bring
    while (!open.empty() && draft.size() < most && open.top().probability >= kLeast) {
      const Node node = open.top();
      open.pop();
      // A chain goes on behind its last token alone.
      if (config_.tree_width == 1 && node.parent + 1 != draft.size()) continue;
      const auto at = static_cast<int32_t>(draft.size());
      draft.tokens.push_back(node.token);
      draft.parent.push_back(node.parent);
      expand(node.state, at, node.probability, node.depth);
    }
    if (config_.tree_width == 1) draft.parent.clear();
  }
}

}  // namespace replayssm
