#include "model/jinja/unicode.h"

#include <utf8proc.h>

#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

utf8proc_category_t category(char32_t code) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code));
}

template <class Visit>  // called with every code point
void for_each_character(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    visit(character.code);
    at += character.length;
  }
}

void append_upper(std::string& out, char32_t code) {
  if (code == 0xDF) {
    out += "SS";
  } else {
    text::append_utf8(out, utf8proc_toupper(static_cast<utf8proc_int32_t>(code)));
  }
}

void append_title(std::string& out, char32_t code) {
  if (code == 0xDF) {
    out += "Ss";
  } else {
    text::append_utf8(out, utf8proc_totitle(static_cast<utf8proc_int32_t>(code)));
  }
}

void append_lower(std::string& out, char32_t code) {
  text::append_utf8(out, utf8proc_tolower(static_cast<utf8proc_int32_t>(code)));
}

bool is_combining(char32_t code) {
  const utf8proc_category_t kind = category(code);
  return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_MC ||
         kind == UTF8PROC_CATEGORY_PC;
}

}  // namespace

bool is_space(char32_t code) {
  return text::is_white_space(code) || (code >= 0x1C && code <= 0x1F);
}

bool is_alpha(char32_t code) {
  const utf8proc_category_t kind = category(code);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
}

bool is_decimal(char32_t code) { return category(code) == UTF8PROC_CATEGORY_ND; }

// Decimal digits and the superscripts of Latin-1 and U+2070; other digit types are not told apart
// from numbers here.
bool is_digit(char32_t code) {
  return is_decimal(code) || code == 0xB2 || code == 0xB3 || code == 0xB9 || code == 0x2070 ||
         (code >= 0x2074 && code <= 0x2079) || (code >= 0x2080 && code <= 0x2089);
}

bool is_numeric(char32_t code) {
  const utf8proc_category_t kind = category(code);
  return kind >= UTF8PROC_CATEGORY_ND && kind <= UTF8PROC_CATEGORY_NO;
}

bool is_upper(char32_t code) {
  const utf8proc_category_t kind = category(code);
  return kind == UTF8PROC_CATEGORY_LU || kind == UTF8PROC_CATEGORY_LT;
}

bool is_lower(char32_t code) {
  return category(code) == UTF8PROC_CATEGORY_LL || code == 0xAA || code == 0xBA;
}

bool is_name_start(char32_t code) {
  return is_alpha(code) || code == '_' || category(code) == UTF8PROC_CATEGORY_NL;
}

size_t name_length(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    if (!is_alpha(character.code) && !is_numeric(character.code) && !is_combining(character.code)) {
      break;
    }
    at += character.length;
  }
  return at;
}

size_t white_space_at_start(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    if (!is_space(character.code)) break;
    at += character.length;
  }
  return at;
}

size_t white_space_at_end(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t last = end - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (!is_space(text::decode_utf8(text, last).code)) break;
    end = last;
  }
  return end;
}

std::string normalize_newlines(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r') {
      out.push_back(text[i]);
    } else {
      out.push_back('\n');
      if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
    }
  }
  return out;
}

std::string to_upper(std::string_view text) {
  std::string out;
  for_each_character(text, [&](char32_t code) { append_upper(out, code); });
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  for_each_character(text, [&](char32_t code) { append_lower(out, code); });
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  bool first = true;
  for_each_character(text, [&](char32_t code) {
    first ? append_title(out, code) : append_lower(out, code);
    first = false;
  });
  return out;
}

std::string swap_case(std::string_view text) {
  std::string out;
  for_each_character(text, [&](char32_t code) {
    is_upper(code) ? append_lower(out, code) : append_upper(out, code);
  });
  return out;
}

std::string title_case(std::string_view text) {
  std::string out;
  bool in_word = false;
  for_each_character(text, [&](char32_t code) {
    in_word ? append_lower(out, code) : append_title(out, code);
    in_word = is_upper(code) || is_lower(code);
  });
  return out;
}

size_t character_count(std::string_view text) {
  size_t count = 0;
  for (char byte : text) count += (static_cast<unsigned char>(byte) & 0xC0) != 0x80;
  return count;
}

size_t character_offset(std::string_view text, size_t index) {
  for (size_t at = 0; at < text.size(); ++at) {
    if ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) continue;
    if (index-- == 0) return at;
  }
  return text.size();
}

std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = text::decode_utf8(text, at).length;
    out.emplace_back(text.substr(at, length));
    at += length;
  }
  return out;
}

}  // namespace replayssm::jinja
