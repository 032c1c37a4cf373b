// Small text files, such as a model's JSON.
#pragma once

#include <filesystem>
#include <string>

namespace replayssm {

// The whole of a regular file. Throws Error when it cannot be read or is implausibly large.
std::string read_text_file(const std::filesystem::path& path);

}  // namespace replayssm
