#include "core/check.h"

#include <string_view>

namespace replayssm::detail {

std::string describe(const char* expression, const std::source_location& where) {
  std::string_view file = where.file_name();
  file.remove_prefix(file.find_last_of('/') + 1);
  return concat(file, ":", where.line(), ": ", expression);
}

}  // namespace replayssm::detail
