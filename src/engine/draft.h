// What speculative decoding asks of a drafter.
//
// A draft is a few tokens that may follow a sequence. They are computed together with its last
// token, as one window of a forward pass, and as many are kept as the model itself would have
// chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace replayssm {

struct Sequence;  // engine/scheduler.h

struct Draft {
  std::vector<int32_t> tokens;
  // [tokens] the index of the token that each follows, before its own; -1 = the sequence's last
  // token. The likeliest path comes first. Empty: each follows the one before it.
  std::vector<int32_t> parent;
  // [tokens] the distribution that each was drawn from, ids ascending; empty: nothing was drawn.
  // Chains only.
  std::vector<std::vector<std::pair<int32_t, double>>> probability;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int32_t parent_of(int64_t i) const {
    return parent.empty() ? static_cast<int32_t>(i) - 1 : parent[i];
  }
  // [tokens] how many tokens of the draft lead to each, itself included.
  std::vector<int64_t> depths() const {
    std::vector<int64_t> depths(tokens.size(), 1);
    for (int64_t i = 0; i < size(); ++i) {
      if (const int32_t before = parent_of(i); before >= 0) depths[i] += depths[before];
    }
    return depths;
  }
};

// How much of drafts was accepted lately: of the tokens whose predecessors were.
class Acceptance {
 public:
  // `memory`: about so many of these tokens count.
  explicit Acceptance(double memory = 20) : keep_(1 - 1 / memory) {}

  void add(int64_t accepted, int64_t drafted) {
    for (int64_t i = 0; i < std::min(accepted + 1, drafted); ++i) {
      tried_ = keep_ * tried_ + 1;
      accepted_ = keep_ * accepted_ + (i < accepted ? 1 : 0);
    }
  }
  // The probability that the next one is; `typical` where little is known.
  double rate(double typical) const {
    constexpr double kDoubt = 2;  // tokens that it counts for
    return (accepted_ + kDoubt * typical) / (tried_ + kDoubt);
  }

 private:
  double keep_, accepted_ = 0, tried_ = 0;
};

// What the last pass has computed of a sequence, and the draft that is wanted behind it.
struct DraftRequest {
  Sequence* sequence = nullptr;     // with all that was accepted
  std::span<const int32_t> rows{};  // packed tokens of the pass that were kept, in order
  int64_t depth = 0;                // most tokens on a path of the draft; 0 = none is wanted
  Draft* draft = nullptr;           // empty
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  // Called once after every pass, with its sequences that go on, but for those that no draft has
  // been wanted of for several passes. KV blocks of a sequence cover its tokens and `depth` more.
  virtual void propose(std::span<const DraftRequest> requests) = 0;

  // The request has ended.
  virtual void forget(int64_t /*request*/) {}
};

}  // namespace replayssm
