#include "model/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "model/text/utf8.h"

namespace replayssm::text {
namespace {

int combining_class(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

std::vector<utf8proc_int32_t> decompose(std::string_view text) {
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Character character = decode_utf8(text, at);
    at += character.length;
    std::array<utf8proc_int32_t, 8> buffer;  // a canonical decomposition has at most 4 characters
    int boundary_class = UTF8PROC_BOUNDCLASS_START;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(character.code), buffer.data(), buffer.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary_class);
    REPLAYSSM_CHECK(count >= 0 && count <= static_cast<utf8proc_ssize_t>(buffer.size()),
                    utf8proc_errmsg(count));
    codes.insert(codes.end(), buffer.begin(), buffer.begin() + count);
  }
  return codes;
}

// utf8proc's own ordering is quadratic in a run of marks.
void order_marks(std::vector<utf8proc_int32_t>& codes) {
  for (auto at = codes.begin(); at != codes.end();) {
    if (combining_class(*at) == 0) {
      ++at;
      continue;
    }
    const auto end =
        std::find_if(at, codes.end(), [](auto code) { return combining_class(code) == 0; });
    std::stable_sort(at, end,
                     [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    at = end;
  }
}

}  // namespace

std::string normalize_nfc(std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  std::vector<utf8proc_int32_t> codes = decompose(text);
  order_marks(codes);
  const utf8proc_ssize_t count =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  REPLAYSSM_CHECK(count >= 0, utf8proc_errmsg(count));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(out, static_cast<char32_t>(codes[i]));
  return out;
}

}  // namespace replayssm::text
