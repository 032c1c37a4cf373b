// The alphabet of byte-level BPE: every byte is written as one printable character.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace replayssm::text {

// The character of each byte: itself for printable Latin-1, else U+0100 onwards in order.
std::array<char32_t, 256> byte_alphabet();

// The bytes that `token` spells, or nothing when it has a character outside the alphabet.
std::optional<std::string> spelled_bytes(std::string_view token);

}  // namespace replayssm::text
