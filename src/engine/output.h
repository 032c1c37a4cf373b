// From a request's tokens to its text and its end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/stop.h"
#include "model/tokenizer.h"

namespace replayssm {

// Text of a growing output: whole characters, cut at the first stop string.
class OutputText {
 public:
  OutputText(const Tokenizer& tokenizer, std::vector<std::string> stop)
      : decoder_(tokenizer), stop_(std::move(stop)) {}

  std::string push(int32_t id) { return stop_.push(decoder_.push(id)); }
  std::string finish();
  bool stopped() const { return stop_.matched(); }

 private:
  StreamDecoder decoder_;
  StopMatcher stop_;
};

// When an output ends.
struct FinishRule {
  std::vector<int32_t> stop_ids{};  // the token ends the output and is not part of its text
  int64_t max_tokens = 0;
};

// Throws Error for stop strings that could never match or would cut a character.
void validate_stop_strings(const std::vector<std::string>& stop);

// Records that the output's token number `count` (from 1) is `token`. `text` may be null.
RequestOutput finish_token(int64_t request, SampledToken token, int64_t count,
                           const FinishRule& rule, OutputText* text);

}  // namespace replayssm
