#include "model/text/utf8.h"

#include <algorithm>

namespace replayssm::text {
namespace {

struct Lead {
  size_t length;               // 0: not a lead byte
  unsigned char low, high;     // range of the second byte
  unsigned char payload_mask;  // bits of the lead byte that belong to the character
};

Lead classify(unsigned char byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF, 0x1F};
  if (byte == 0xE0) return {3, 0xA0, 0xBF, 0x0F};
  if (byte == 0xED) return {3, 0x80, 0x9F, 0x0F};  // no surrogates
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF, 0x0F};
  if (byte == 0xF0) return {4, 0x90, 0xBF, 0x07};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF, 0x07};
  if (byte == 0xF4) return {4, 0x80, 0x8F, 0x07};
  return {0, 0, 0, 0};
}

}  // namespace

Utf8Character decode_utf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return {first, 1, true, false};

  const Lead lead = classify(first);
  if (lead.length == 0) return {};
  char32_t code = first & lead.payload_mask;
  for (size_t i = 1; i < lead.length; ++i) {
    if (at + i == text.size()) return {kReplacementCharacter, i, false, true};
    const unsigned char next = byte(at + i);
    const unsigned char low = i == 1 ? lead.low : 0x80;
    const unsigned char high = i == 1 ? lead.high : 0xBF;
    if (next < low || next > high) return {kReplacementCharacter, i, false, false};
    code = code << 6 | (next & 0x3F);
  }
  return {code, lead.length, true, false};
}

void append_utf8(std::string& out, char32_t code) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

std::string to_valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  size_t copied = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character character = decode_utf8(text, at);
    if (!character.valid) {
      out.append(text, copied, at - copied);
      append_utf8(out, kReplacementCharacter);
      copied = at + character.length;
    }
    at += character.length;
  }
  out.append(text, copied, text.size() - copied);
  return out;
}

size_t complete_utf8_prefix(std::string_view text) {
  // A character has at most 4 bytes, so an incomplete one begins in the last 3.
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const size_t at = text.size() - back;
    if (decode_utf8(text, at).truncated) return at;
  }
  return text.size();
}

bool is_white_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

}  // namespace replayssm::text
