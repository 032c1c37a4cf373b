#include "engine/verify.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/philox.h"
#include "engine/scheduler.h"

namespace replayssm {
namespace {

// Of ascending ids.
double probability_of(std::span<const std::pair<int32_t, double>> weights, int32_t id) {
  const auto at = std::ranges::lower_bound(weights, id, {}, &std::pair<int32_t, double>::first);
  return at != weights.end() && at->first == id ? at->second : 0;
}

// The draft's token behind a row that is `id`; -1 where there is none.
int64_t child_of(const Draft& draft, int64_t row, int32_t id) {
  for (int64_t i = row; i < draft.size(); ++i) {  // parents come before their children
    if (draft.parent_of(i) == row - 1 && draft.tokens[i] == id) return i;
  }
  return -1;
}

}  // namespace

Verdict follow_draft(const Draft& draft, const ChooseToken& choose) {
  Verdict verdict;
  verdict.reserve(1 + draft.size());
  for (int64_t row = 0; row >= 0;) {
    SampledToken token;
    try {
      token = choose(row, verdict.tokens);
    } catch (const Error&) {
      if (row == 0) throw;
      break;
    }
    verdict.rows.push_back(static_cast<int32_t>(row));
    verdict.tokens.push_back(std::move(token));
    const int64_t child = child_of(draft, row, verdict.tokens.back().id);
    row = child < 0 ? -1 : child + 1;
  }
  return verdict;
}

bool draft_token(std::span<const float> logits, const Sequence& sequence, bool sampled,
                 Draft& draft) try {
  const SamplingParams& sampling = sequence.sampling;
  if (!sampled || sampling.temperature == 0) {
    draft.tokens.push_back(sample(logits, {}, {}, {}, 0).id);
    return true;
  }
  auto q = distribution(logits, sampling, sequence.prompt(), sequence.output());
  const int64_t position = sequence.size() + draft.size();
  draft.tokens.push_back(draw_from(q, uniform(sampling.seed, position, kDraftStream)));
  draft.probability.push_back(std::move(q));
  return true;
} catch (const Error&) {
  return false;
}

Rejection reject_or_accept(std::span<const std::pair<int32_t, double>> p,
                           std::span<const std::pair<int32_t, double>> q, int32_t drafted,
                           uint64_t seed, int64_t position) {
  const double ratio = probability_of(p, drafted) / probability_of(q, drafted);
  if (uniform(seed, position, kAcceptStream) < ratio) return {true, drafted};
  std::vector<std::pair<int32_t, double>> rest;
  for (const auto& [id, value] : p) {
    const double more = value - probability_of(q, id);
    if (more > 0) rest.emplace_back(id, more);
  }
  // Rounding alone can leave nothing, where p and q are the same.
  const double random = uniform(seed, position);
  return {false, rest.empty() ? draw_from(p, random) : draw_from(rest, random)};
}

SimulatedAcceptance::SimulatedAcceptance(double length, int64_t drafts) {
  const auto mean = [&](double p) {
    double sum = 0, reached = 1;
    for (int64_t i = 0; i < drafts; ++i) sum += reached *= p;
    return sum;
  };
  double low = 0, high = 1;
  constexpr int kBisections = 60;
  for (int i = 0; i < kBisections; ++i) {
    probability_ = (low + high) / 2;
    (mean(probability_) < length - 1 ? low : high) = probability_;
  }
}

int64_t SimulatedAcceptance::draw(int64_t drafted, uint64_t seed, int64_t position) const {
  const double random = uniform(seed, position, kSimulationStream);
  int64_t accepted = 0;
  for (double reached = probability_; accepted < drafted && random < reached; ++accepted)
    reached *= probability_;
  return accepted;
}

}  // namespace replayssm
