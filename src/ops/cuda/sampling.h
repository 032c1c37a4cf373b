// From logits to tokens on CUDA devices: what engine/sampler.h does, for a batch of rows. The rules
// of dense.h hold.
#pragma once

#include "ops/cuda/dense.h"

namespace replayssm::cuda {

// How a row is sampled: the fields of SamplingParams (engine/sampler.h), in device memory.
struct SamplingRow {
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  uint64_t seed = 0;
  int32_t top_k = 0;
};

// What penalties look at: row r's tokens, its prompt first.
struct SamplingHistory {
  const int32_t* tokens = nullptr;         // [rows or slots, stride]
  int64_t stride = 0;                      //
  const int32_t* slot = nullptr;           // [rows] row r's tokens are those of slot[r]; null: r's
  const int32_t* prompt_length = nullptr;  // [rows]
  const int32_t* length = nullptr;         // [rows] prompt and output
};

// What a token id tells where there is none.
inline constexpr int32_t kNoToken = -1;
inline constexpr int64_t kMaxVocab = int64_t{1} << 22;

struct SampleParams {
  InRows logits{};  // [rows, vocab]
  int64_t rows = 0;
  int64_t vocab = 0;
  const SamplingRow* sampling = nullptr;  // [rows]; null: greedy
  const int64_t* position = nullptr;      // [rows] tokens before the drawn one; with `sampling`
  SamplingHistory history{};              // tokens null: no row has penalties
  int32_t* token = nullptr;               // [rows]; kNoToken for a row without a finite maximum
  void* workspace = nullptr;              // sample_workspace_bytes, aligned to 16, zeroed once
};
int64_t sample_workspace_bytes(int64_t rows, int64_t vocab, bool penalties);

// Ties go to the lower id. Random numbers are those of engine/sampler.h, and so are the tokens,
// except where sums in another order fall on another side: where a set of tokens has top_p to
// within vocab 2^-45, or the drawn number lies that close to where a token's share begins.
void sample(const SampleParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
