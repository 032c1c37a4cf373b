// Characters and strings as Python's str sees them. Texts are valid UTF-8; lengths and positions
// with "character" in the name count code points, the others bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm::jinja {

bool is_space(char32_t code);
bool is_alpha(char32_t code);
bool is_decimal(char32_t code);
bool is_digit(char32_t code);
bool is_numeric(char32_t code);
bool is_upper(char32_t code);  // or titlecase
bool is_lower(char32_t code);

// Characters of names in templates.
bool is_name_start(char32_t code);
size_t name_length(std::string_view text);

size_t white_space_at_start(std::string_view text);
size_t white_space_at_end(std::string_view text);  // length without it

// \r\n and \r as \n.
std::string normalize_newlines(std::string_view text);

// Simple case mappings, and the capital SS of the sharp s.
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string swap_case(std::string_view text);
std::string title_case(std::string_view text);  // str.title, not the filter

size_t character_count(std::string_view text);
// The byte at which character `index` begins; the size of the text when there are fewer.
size_t character_offset(std::string_view text, size_t index);
std::vector<std::string> characters(std::string_view text);

}  // namespace replayssm::jinja
