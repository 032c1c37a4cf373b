// Files that are part of the program.
#pragma once

#include <string_view>

namespace replayssm::server {

struct Asset {
  std::string_view path, content_type, text;
};

// By the path they are served at; null where there is none.
const Asset* find_asset(std::string_view path);

}  // namespace replayssm::server
