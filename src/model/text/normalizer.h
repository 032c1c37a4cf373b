// Normalisation form C.
#pragma once

#include <string>
#include <string_view>

namespace replayssm::text {

// `text` is valid UTF-8. Takes time linear in the text, times the logarithm of the longest run of
// combining marks.
std::string normalize_nfc(std::string_view text);

}  // namespace replayssm::text
