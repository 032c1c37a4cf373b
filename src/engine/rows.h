// Sequences that are driven by hand, without an engine: each row owns a slot and its KV blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "engine/kv_pool.h"
#include "engine/pass_builder.h"
#include "engine/slot_pool.h"
#include "model/model.h"

namespace replayssm {

struct RowsOptions {
  Route route = Route::kOutputOnly;
  int32_t buffer_len = 16;
  DType state_dtype = DType::kFloat32;
  int64_t rows = 1;
  int64_t context = 0;                   // most tokens of a row
  int64_t max_tokens = 0;                // most tokens of a forward pass, where it is known
  int64_t max_logits = 1;                // most tokens of a forward pass whose logits are wanted
  std::optional<DType> read_dtype = {};  // of read copies
  const cpu::StateEmulation* emulation = nullptr;
};

// The next tokens of a row.
struct RowTokens {
  int64_t row = 0;
  std::span<const int32_t> tokens;
};

class Rows {
 public:
  Rows(Model& model, const RowsOptions& options);

  // Empties every row.
  void reset();
  // One forward pass over prompts. `wanted` are indices into the packed tokens; returns their
  // logits, [wanted, vocab], valid until the next pass.
  std::span<const float> prefill(std::span<const RowTokens> prompts,
                                 std::span<const int32_t> wanted);
  // One decode step: tokens[i] goes to row i. Returns [tokens, vocab].
  std::span<const float> decode(std::span<const int32_t> tokens);

  // The next token's likeliest successor of every row, without its logits.
  std::span<const int32_t> decode_greedy(std::span<const int32_t> tokens);
  // So many such steps, each with the tokens of the one before; returns the last one's. -1 stands
  // for logits that are no numbers. Where the model runs behind the host, a step begins before the
  // tokens of the one before have been read.
  std::span<const int32_t> decode_greedy(std::span<const int32_t> tokens, int64_t steps);

  // The row's next flush comes when its ring would hold more than `limit` tokens.
  void set_ring_limit(int64_t row, int32_t limit);
  int64_t state_bytes() const { return slots_.bytes(); }

 private:
  void pack(std::span<const RowTokens> windows);
  void forward(int64_t decodes, std::span<const int32_t> wanted, const PassOutput& output);
  void pack_step(std::span<const int32_t> tokens);
  Batch batch(int64_t decodes, std::span<const int32_t> wanted);
  StateView state() const;

  Model& model_;
  Route route_;
  const cpu::StateEmulation* emulation_;
  RingConfig ring_;
  SlotPool slots_;
  KvPool kv_;
  std::vector<std::vector<int32_t>> tables_;  // KV blocks of each row
  std::vector<int64_t> computed_;             // tokens that each row holds
  Array<float> logits_;
  std::vector<int32_t> likeliest_, behind_;
  // The batch at hand.
  PassBuilder pass_;
  std::vector<int32_t> wanted_;
};

}  // namespace replayssm
