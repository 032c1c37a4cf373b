// UTF-8, with invalid bytes read as Unicode recommends: every maximal invalid subpart is one
// U+FFFD.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace replayssm::text {

constexpr char32_t kReplacementCharacter = 0xFFFD;

struct Utf8Character {
  char32_t code = kReplacementCharacter;
  size_t length = 1;
  bool valid = false;
  bool truncated = false;  // the text ends inside what may still become a character
};

// Reads the character that starts at text[at]; at < text.size().
Utf8Character decode_utf8(std::string_view text, size_t at);

void append_utf8(std::string& out, char32_t code);

bool is_ascii(std::string_view text);

// `text` with U+FFFD in the place of what is not UTF-8.
std::string to_valid_utf8(std::string_view text);

// Length of `text` without a last character that is not complete yet.
size_t complete_utf8_prefix(std::string_view text);

// The property White_Space.
bool is_white_space(char32_t code);

}  // namespace replayssm::text
