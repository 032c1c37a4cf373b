// Which tokens of a draft the model would have chosen.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/draft.h"
#include "engine/sampler.h"

namespace replayssm {

// A window is row 0, the sequence's last token, and the draft's tokens in their order.
struct Verdict {
  std::vector<SampledToken> tokens;  // the sequence's next ones: those accepted and one more
  std::vector<int32_t> rows;         // [tokens] ascending: the row that each was chosen behind
  bool ended = false;                // the request ends with the last of them

  void reserve(int64_t most) {
    tokens.reserve(static_cast<size_t>(most));
    rows.reserve(static_cast<size_t>(most));
  }
};

// The token that the model chooses behind a row; `count` are chosen already. Throws Error for a row
// that tells none.
using ChooseToken = std::function<SampledToken(int64_t row, const std::vector<SampledToken>&)>;

// Follows the draft as long as the model chooses its tokens. A token drawn from the model's own
// distribution stays exactly that whether or not it was guessed, so that the output has the
// distribution, and with `choose` of a sequence decoded alone the tokens, of plain decoding.
// An error behind an accepted token ends the window before it: the next window meets it first.
Verdict follow_draft(const Draft& draft, const ChooseToken& choose);

// Adds the token that a drafter's logits choose: the likeliest, or, where drafts are `sampled` and
// the request draws, one of their distribution. False where the logits choose none.
bool draft_token(std::span<const float> logits, const Sequence& sequence, bool sampled,
                 Draft& draft);

// Draws where the draft was drawn too, from a distribution q with random numbers of its own: a
// token x is accepted with probability min(1, p(x) / q(x)), p being the model's; in place of the
// first that is not, one is drawn from max(0, p - q). Preserves p. `position` is that of the drawn
// token.
struct Rejection {
  bool accepted = false;
  int32_t token = 0;
};
Rejection reject_or_accept(std::span<const std::pair<int32_t, double>> p,
                           std::span<const std::pair<int32_t, double>> q, int32_t drafted,
                           uint64_t seed, int64_t position);

// Random streams (core/philox.h); stream 0 draws the model's tokens.
inline constexpr uint32_t kDraftStream = 1, kAcceptStream = 2, kSimulationStream = 3;

// How many of `drafted` tokens are accepted, drawn with mean `length` - 1 over all of them: every
// token behind an accepted one is accepted with the same probability.
class SimulatedAcceptance {
 public:
  SimulatedAcceptance(double length, int64_t drafts);
  int64_t draw(int64_t drafted, uint64_t seed, int64_t position) const;

 private:
  double probability_ = 0;
};

}  // namespace replayssm
