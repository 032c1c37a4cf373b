// From logits to the next token.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace replayssm {

struct SamplingParams {
  double temperature = 0;         // 0 = greedy
  int32_t top_k = 0;              // 0 = all
  double top_p = 1;               // (0, 1]
  double min_p = 0;               // [0, 1]
  double repetition_penalty = 1;  // > 0; over prompt and output
  double presence_penalty = 0;    // over the output
  double frequency_penalty = 0;   // over the output
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> logit_bias{};  // added to the logits of these tokens
  int32_t logprobs = -1;  // -1 = none, n = the sampled token and the n likeliest
};

// Throws Error naming the parameter and its range.
void validate(const SamplingParams& params);

struct SampledToken {
  int32_t id = 0;
  float logprob = 0;  // of the unmodified distribution; with logprobs >= 0
  std::vector<std::pair<int32_t, float>> top_logprobs{};
};

// Draws the token at `position` (tokens before it in the sequence). Random numbers depend on seed
// and position alone, so the text does not depend on batch or slot. `prompt` and `output` are what
// the penalties look at. Ties go to the lower id. A row without a finite maximum, or with a NaN, is
// an Error.
//
// In this order: tokens that are not `allowed` go (empty: all are; else 1 or 0 by id, and ids
// behind its end are not; no token left is an Error); penalties and biases change the logits;
// temperature divides them; top-k keeps the k largest; top-p the smallest set of the likeliest
// whose probability, among those left, reaches top_p; min-p those at least min_p times as likely as
// the likeliest. One token is drawn from the rest.
SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                    std::span<const int32_t> prompt, std::span<const int32_t> output,
                    int64_t position, std::span<const uint8_t> allowed = {});

// A token that was chosen otherwise, with the logprobs that `params` asks for.
SampledToken described(int32_t id, std::span<const float> logits, const SamplingParams& params);

// What sample() draws from: tokens with their probabilities, ids ascending. temperature is not 0.
std::vector<std::pair<int32_t, double>> distribution(std::span<const float> logits,
                                                     const SamplingParams& params,
                                                     std::span<const int32_t> prompt,
                                                     std::span<const int32_t> output);

// The token of a distribution, or of weights with any sum, that a number in [0, 1) falls on.
int32_t draw_from(std::span<const std::pair<int32_t, double>> weights, double random);

// Natural logarithm of the sum of exponentials. Throws like sample().
double log_sum_exp(std::span<const float> logits);

}  // namespace replayssm
