// Cuts text into the pieces that byte-pair encoding works in.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/text/json_field.h"
#include "model/text/regex.h"

namespace replayssm::text {

enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

class PreTokenizer {
 public:
  // `field` is the member pre_tokenizer of tokenizer.json.
  explicit PreTokenizer(const JsonField& field);
  // The matches of `pattern` and what lies between them.
  explicit PreTokenizer(Regex pattern);

  // Cuts texts for one caller. Pieces live as long as this and the texts.
  class Session {
   public:
    explicit Session(const PreTokenizer& pre_tokenizer);
    std::vector<std::string_view> split(std::string_view text);

   private:
    const PreTokenizer* pre_tokenizer_;
    std::vector<std::optional<Regex::Matcher>> matchers_;  // one per step
    std::deque<std::string> prefixed_;                     // texts that got a space in front
  };

 private:
  struct Step {
    std::optional<Regex> pattern;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;
    bool add_prefix_space = false;
  };

  void read(const JsonField& field);
  void read_split(const JsonField& field);
  void read_byte_level(const JsonField& field);

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace replayssm::text
