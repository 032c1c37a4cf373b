#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "core/check.h"
#include "core/philox.h"

namespace replayssm {
namespace {

struct Candidate {
  int32_t id = 0;
  double value = 0;  // a logit, later a weight: its probability times a common factor
};

// Likelier first; ties go to the lower id.
bool before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

void check_range(const char* name, bool valid, const char* range, double value) {
  if (!valid) fail(name, ": expected ", range, ", got ", value);
}

// Index of the largest logit. Throws where there is none.
int32_t argmax(std::span<const float> logits) {
  REPLAYSSM_CHECK(!logits.empty(), "no logits");
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) fail("logits: the one of token ", i, " is NaN");
    if (logits[i] > logits[best]) best = i;
  }
  if (!std::isfinite(logits[best])) fail("logits: the largest is ", logits[best]);
  return static_cast<int32_t>(best);
}

std::vector<Candidate> all_candidates(std::span<const float> logits) {
  std::vector<Candidate> candidates(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) candidates[i] = {static_cast<int32_t>(i), logits[i]};
  return candidates;
}

bool changes_logits(const SamplingParams& params) {
  return !params.logit_bias.empty() || params.repetition_penalty != 1 ||
         params.presence_penalty != 0 || params.frequency_penalty != 0;
}

void change_logits(const SamplingParams& params, std::span<const int32_t> prompt,
                   std::span<const int32_t> output, std::vector<Candidate>& candidates) {
  std::unordered_map<int32_t, int64_t> output_count;  // 0 for tokens of the prompt alone
  for (const int32_t id : prompt) output_count.try_emplace(id, 0);
  for (const int32_t id : output) ++output_count[id];
  for (const auto& [id, count] : output_count) {
    REPLAYSSM_CHECK(id >= 0 && static_cast<size_t>(id) < candidates.size(), "id=", id);
    double& logit = candidates[id].value;
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    logit -= params.frequency_penalty * static_cast<double>(count);
    if (count > 0) logit -= params.presence_penalty;
  }
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= 0 && static_cast<size_t>(id) < candidates.size()) candidates[id].value += bias;
  }
}

// Keeps the `count` likeliest, in any order.
void keep_likeliest(std::vector<Candidate>& candidates, size_t count) {
  if (count >= candidates.size()) return;
  const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(candidates.begin(), end, candidates.end(), before);
  candidates.resize(count);
}

// Sorts only as many as it takes: top_p is usually reached by a small part of a vocabulary.
void keep_top_p(std::vector<Candidate>& candidates, double top_p) {
  double total = 0;
  for (const Candidate& candidate : candidates) total += candidate.value;
  for (size_t width = 256;; width *= 8) {
    const size_t sorted = std::min(width, candidates.size());
    const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
    if (end != candidates.end()) {
      std::nth_element(candidates.begin(), end, candidates.end(), before);
    }
    std::sort(candidates.begin(), end, before);
    double reached = 0;
    size_t count = 0;
    while (count < sorted && reached < top_p * total) reached += candidates[count++].value;
    if (reached < top_p * total && sorted < candidates.size()) continue;
    candidates.resize(count);
    return;
  }
}

// Replaces logits by weights relative to the likeliest, whose weight is 1.
void to_weights(std::vector<Candidate>& candidates, double temperature) {
  double largest = candidates.front().value;
  for (const Candidate& candidate : candidates) largest = std::max(largest, candidate.value);
  for (Candidate& candidate : candidates) {
    candidate.value = std::exp((candidate.value - largest) / temperature);
  }
}

// Takes out all other tokens.
void forbid(std::span<const uint8_t> allowed, std::vector<Candidate>& candidates) {
  bool any = false;
  for (Candidate& candidate : candidates) {
    const auto id = static_cast<size_t>(candidate.id);
    const bool stays = id < allowed.size() && allowed[id] != 0 && std::isfinite(candidate.value);
    if (!stays) candidate.value = -std::numeric_limits<double>::infinity();
    any = any || stays;
  }
  if (!any) fail("no token may come next");
}

// The tokens that may be drawn, by ascending id, with their weights.
std::vector<Candidate> drawable(std::span<const float> logits, const SamplingParams& params,
                                std::span<const int32_t> prompt, std::span<const int32_t> output,
                                std::span<const uint8_t> allowed = {}) {
  std::vector<Candidate> candidates = all_candidates(logits);
  if (!allowed.empty()) forbid(allowed, candidates);
  if (changes_logits(params)) change_logits(params, prompt, output, candidates);
  if (params.top_k > 0) keep_likeliest(candidates, static_cast<size_t>(params.top_k));
  to_weights(candidates, params.temperature);
  if (params.top_p < 1) keep_top_p(candidates, params.top_p);
  if (params.min_p > 0) {
    std::erase_if(candidates, [&](const Candidate& c) { return c.value < params.min_p; });
  }
  // The limits leave them in any order.
  if (params.top_k > 0 || params.top_p < 1) std::ranges::sort(candidates, {}, &Candidate::id);
  return candidates;
}

template <class Weights, class Id, class Value>
int32_t draw(const Weights& weights, double random, Id id, Value value) {
  double total = 0;
  for (const auto& weight : weights) total += value(weight);
  const double target = random * total;
  double reached = 0;
  int32_t last = -1;  // taken where rounding leaves the sum below the target
  for (const auto& weight : weights) {
    if (value(weight) == 0) continue;
    reached += value(weight);
    last = id(weight);
    if (reached > target) break;
  }
  return last;
}

int32_t choose(std::span<const float> logits, const SamplingParams& params,
               std::span<const int32_t> prompt, std::span<const int32_t> output, int64_t position,
               std::span<const uint8_t> allowed) {
  const int32_t likeliest = argmax(logits);
  if (params.temperature == 0) {
    if (!changes_logits(params) && allowed.empty()) return likeliest;
    std::vector<Candidate> candidates = all_candidates(logits);
    if (!allowed.empty()) forbid(allowed, candidates);
    change_logits(params, prompt, output, candidates);
    return std::min_element(candidates.begin(), candidates.end(), before)->id;
  }
  const auto id = [](const Candidate& c) { return c.id; };
  const auto value = [](const Candidate& c) { return c.value; };
  return draw(drawable(logits, params, prompt, output, allowed), uniform(params.seed, position), id,
              value);
}

}  // namespace

void validate(const SamplingParams& params) {
  const auto in = [](double value, double low, double high) {
    return value >= low && value <= high;
  };
  const auto finite = [](double value) { return std::isfinite(value); };
  check_range("temperature", finite(params.temperature) && params.temperature >= 0, "at least 0",
              params.temperature);
  check_range("top_k", params.top_k >= 0, "at least 0", params.top_k);
  check_range("top_p", params.top_p > 0 && params.top_p <= 1, "above 0, at most 1", params.top_p);
  check_range("min_p", in(params.min_p, 0, 1), "0 to 1", params.min_p);
  check_range("repetition_penalty",
              finite(params.repetition_penalty) && params.repetition_penalty > 0, "above 0",
              params.repetition_penalty);
  check_range("presence_penalty", in(params.presence_penalty, -2, 2), "-2 to 2",
              params.presence_penalty);
  check_range("frequency_penalty", in(params.frequency_penalty, -2, 2), "-2 to 2",
              params.frequency_penalty);
  for (const auto& [id, bias] : params.logit_bias) {
    check_range("logit_bias", in(bias, -100, 100), "-100 to 100", bias);
  }
  check_range("logprobs", params.logprobs >= -1, "at least 0, or -1 for none", params.logprobs);
}

std::vector<std::pair<int32_t, double>> distribution(std::span<const float> logits,
                                                     const SamplingParams& params,
                                                     std::span<const int32_t> prompt,
                                                     std::span<const int32_t> output) {
  argmax(logits);  // throws where there is none
  const std::vector<Candidate> candidates = drawable(logits, params, prompt, output);
  double total = 0;
  for (const Candidate& candidate : candidates) total += candidate.value;
  std::vector<std::pair<int32_t, double>> result;
  result.reserve(candidates.size());
  for (const Candidate& candidate : candidates) {
    if (candidate.value > 0) result.emplace_back(candidate.id, candidate.value / total);
  }
  return result;
}

int32_t draw_from(std::span<const std::pair<int32_t, double>> weights, double random) {
  return draw(
      weights, random, [](const auto& w) { return w.first; },
      [](const auto& w) { return w.second; });
}

double log_sum_exp(std::span<const float> logits) {
  const double largest = logits[argmax(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                    std::span<const int32_t> prompt, std::span<const int32_t> output,
                    int64_t position, std::span<const uint8_t> allowed) {
  return described(choose(logits, params, prompt, output, position, allowed), logits, params);
}

SampledToken described(int32_t id, std::span<const float> logits, const SamplingParams& params) {
  SampledToken token{.id = id};
  if (params.logprobs < 0) return token;
  const double normalizer = log_sum_exp(logits);
  const auto logprob = [&](int32_t id) { return static_cast<float>(logits[id] - normalizer); };
  token.logprob = logprob(token.id);
  std::vector<Candidate> top = all_candidates(logits);
  keep_likeliest(top, static_cast<size_t>(params.logprobs));
  std::sort(top.begin(), top.end(), before);
  for (const Candidate& candidate : top) {
    token.top_logprobs.emplace_back(candidate.id, logprob(candidate.id));
  }
  return token;
}

}  // namespace replayssm
