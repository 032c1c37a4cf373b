#include "model/text/added_tokens.h"

#include <algorithm>

#include "core/check.h"
#include "model/text/regex.h"
#include "model/text/utf8.h"

namespace replayssm::text {
namespace {

// The beginning of the last character of `text`, which is valid UTF-8 and not empty.
size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool is_word_character(std::string_view character) {
  static const Regex kWord =
      Regex::from_oniguruma(R"(\A[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])");
  return Regex::Matcher(kWord).search(character, 0).has_value();
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word_character(text.substr(last_character(text)));
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_character(text.substr(0, decode_utf8(text, 0).length));
}

size_t without_space_at_end(std::string_view text) {
  while (!text.empty()) {
    const size_t last = last_character(text);
    if (!is_white_space(decode_utf8(text, last).code)) break;
    text = text.substr(0, last);
  }
  return text.size();
}

size_t space_at_start(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Character character = decode_utf8(text, at);
    if (!is_white_space(character.code)) break;
    at += character.length;
  }
  return at;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens, bool normalized,
                                     const JsonField& root)
    : nodes_(1) {
  for (const AddedToken& token : tokens) {
    if (token.normalized != normalized || token.normalized_content.empty()) continue;
    tokens_.push_back(token);
    insert(static_cast<int>(tokens_.size()) - 1, token.normalized_content, root);
  }
}

void AddedTokenMatcher::insert(int token, std::string_view content, const JsonField& root) {
  begins_[static_cast<unsigned char>(content.front())] = true;
  int node = 0;
  for (char byte : content) {
    const auto [entry, added] =
        nodes_[node].next.try_emplace(byte, static_cast<int>(nodes_.size()));
    node = entry->second;
    if (added) nodes_.emplace_back();
  }
  if (nodes_[node].token != kNone) {
    root.reject(concat("added_tokens: two tokens stand for the text \"", content, "\""));
  }
  nodes_[node].token = token;
}

int AddedTokenMatcher::longest_at(std::string_view text, size_t at) const {
  int found = kNone;
  int node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto next = nodes_[node].next.find(text[i]);
    if (next == nodes_[node].next.end()) break;
    node = next->second;
    if (nodes_[node].token != kNone) found = nodes_[node].token;
  }
  return found;
}

void AddedTokenMatcher::split(std::string_view text, std::vector<Piece>& pieces) const {
  size_t done = 0;  // where the text that no token took begins
  for (size_t at = 0; at < text.size();) {
    const int found = begins_[static_cast<unsigned char>(text[at])] ? longest_at(text, at) : kNone;
    if (found == kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[found];
    size_t begin = at;
    size_t end = at + token.normalized_content.size();
    at = end;  // also when the match is refused below
    if (token.single_word &&
        (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) {
      continue;
    }
    if (token.left_strip) begin = std::max(without_space_at_end(text.substr(0, begin)), done);
    if (token.right_strip) end += space_at_start(text.substr(end));
    if (done < begin) pieces.push_back({text.substr(done, begin - done)});
    pieces.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) pieces.push_back({text.substr(done)});
}

}  // namespace replayssm::text
