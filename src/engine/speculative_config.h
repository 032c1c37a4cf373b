// How drafts are made: the argument of --speculative-config.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace replayssm {

enum class DraftMethod : uint8_t { kNgram, kSuffix, kMtp, kDraftModel };

struct SpeculativeConfig {
  DraftMethod method = DraftMethod::kNgram;
  std::string model{};         // draft_model: a folder, or a bundled model's name
  int64_t tokens = 4;          // num_speculative_tokens: most tokens on a path of a draft
  int64_t tree_width = 1;      // most paths; 1 = a draft is a chain
  int64_t lookup_min = 2;      // prompt_lookup_min: fewest tokens of an n-gram
  int64_t lookup_max = 5;      // prompt_lookup_max
  bool adaptive = true;        // the depth follows acceptance and cost, down to none
  bool sampled = false;        // draft_sample_method: probabilistic, else greedy
  bool before_norm = false;    // mtp_hidden: which hidden state the head reads
  bool snapshots = false;      // the baseline: a state per token; set by --no-use-replayssm-spec
  double simulate_length = 0;  // > 0: accept counts are drawn, with this mean; set by bench spec

  // Most tokens of a window: the last token and the draft.
  int64_t max_window() const { return 1 + tokens * tree_width; }
};

inline constexpr int64_t kMostDraftTokens = 63;

// Parses and checks the JSON. Throws Error naming the key.
SpeculativeConfig parse_speculative_config(std::string_view text);

const char* method_name(DraftMethod method);

}  // namespace replayssm
