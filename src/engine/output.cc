#include "engine/output.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm {

std::string OutputText::finish() {
  std::string text = stop_.push(decoder_.flush());
  if (!stop_.matched()) text += stop_.finish();
  return text;
}

void validate_stop_strings(const std::vector<std::string>& stop) {
  for (const std::string& text : stop) {
    if (text.empty()) fail("stop: expected a text, got an empty one");
    constexpr unsigned kContinuation = 0x80, kMask = 0xc0;
    if ((static_cast<unsigned char>(text[0]) & kMask) == kContinuation) {
      fail("stop: expected UTF-8, got a text that begins within a character");
    }
  }
}

RequestOutput finish_token(int64_t request, SampledToken token, int64_t count,
                           const FinishRule& rule, OutputText* text) {
  RequestOutput output{.request = request, .token = std::move(token)};
  const bool stop_id = std::ranges::count(rule.stop_ids, output.token.id) > 0;
  if (text && !stop_id) output.text = text->push(output.token.id);
  if (stop_id || (text && text->stopped())) {
    output.finish = FinishReason::kStop;
  } else if (count >= rule.max_tokens) {
    output.finish = FinishReason::kLength;
  }
  if (text && output.finish != FinishReason::kNone) {
    output.text += text->finish();
    if (text->stopped()) output.finish = FinishReason::kStop;
  }
  return output;
}

}  // namespace replayssm
