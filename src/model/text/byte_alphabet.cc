#include "model/text/byte_alphabet.h"

#include "model/text/utf8.h"

namespace replayssm::text {
namespace {

constexpr size_t kAlphabetEnd =
    0x144;  // 256 + the 68 bytes without a printable character of their own

bool is_printable_latin1(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

std::array<int, kAlphabetEnd> inverse_alphabet() {
  std::array<int, kAlphabetEnd> bytes;
  bytes.fill(-1);
  const std::array<char32_t, 256> characters = byte_alphabet();
  for (int byte = 0; byte < 256; ++byte) bytes[characters[byte]] = byte;
  return bytes;
}

}  // namespace

std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> characters{};
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    characters[byte] = is_printable_latin1(byte) ? static_cast<char32_t>(byte) : next++;
  }
  return characters;
}

std::optional<std::string> spelled_bytes(std::string_view token) {
  static const std::array<int, kAlphabetEnd> kBytes = inverse_alphabet();
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const Utf8Character character = decode_utf8(token, at);
    if (character.code >= kAlphabetEnd || kBytes[character.code] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kBytes[character.code]));
    at += character.length;
  }
  return bytes;
}

}  // namespace replayssm::text
