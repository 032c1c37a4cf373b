// Tokens that are cut out of the text before byte-pair encoding sees it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/text/json_field.h"

namespace replayssm::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string normalized_content;  // equals content for tokens that are not normalized
  bool special = false;
  bool left_strip = false;   // takes the white space before it
  bool right_strip = false;  // takes the white space after it
  bool single_word = false;  // only matches where no word character touches it
  bool normalized = false;   // is looked for in the normalized text
};

// A piece of text, or an added token when id >= 0.
struct Piece {
  std::string_view text;
  int32_t id = -1;
};

// Finds a set of added tokens in a text: leftmost first, of those the longest.
class AddedTokenMatcher {
 public:
  // Takes those of `tokens` whose `normalized` is as given. Throws Error for two equal texts.
  // Errors name `root`, the file.
  AddedTokenMatcher(const std::vector<AddedToken>& tokens, bool normalized, const JsonField& root);

  // Appends to `pieces`. Empty pieces of text are left out.
  void split(std::string_view text, std::vector<Piece>& pieces) const;

 private:
  static constexpr int kNone = -1;
  struct Node {
    std::unordered_map<char, int> next;
    int token = kNone;
  };

  void insert(int token, std::string_view content, const JsonField& root);
  // Index of the longest token at text[at], or kNone.
  int longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  bool begins_[256] = {};  // bytes that some token begins with
};

}  // namespace replayssm::text
