#include "cli/text_windows.h"

#include <algorithm>

#include "cli/setup.h"
#include "core/check.h"
#include "model/tokenizer.h"

namespace replayssm::cli {

int64_t TextWindows::scored_tokens() const {
  int64_t tokens = 0;
  for (const auto& window : windows) tokens += static_cast<int64_t>(window.size()) - 1;
  return tokens;
}

TextWindows read_windows(const AccuracyOptions& options, const std::filesystem::path& folder,
                         const ModelConfig& config) {
  if (config.max_positions > 0 && options.window > config.max_positions) {
    fail("--window: expected at most ", config.max_positions, ", the model's limit, got ",
         options.window);
  }
  TextWindows text;
  text.ids = Tokenizer(folder).encode(read_text(options.text, "--text"), false);
  const auto limit = static_cast<size_t>(options.max_tokens);
  if (options.max_tokens > 0 && text.ids.size() > limit) text.ids.resize(limit);
  if (text.ids.size() < 2)
    fail("--text ", options.text, ": expected at least 2 tokens, got ", text.ids.size());
  check_ids(text.ids, config, "--text " + options.text);
  for (std::span<const int32_t> rest = text.ids; rest.size() >= 2;) {
    const size_t length = std::min(rest.size(), static_cast<size_t>(options.window));
    text.windows.push_back(rest.first(length));
    rest = rest.subspan(length);
  }
  return text;
}

}  // namespace replayssm::cli
