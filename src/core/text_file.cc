#include "core/text_file.h"

#include <fstream>
#include <system_error>

#include "core/check.h"

namespace replayssm {

std::string read_text_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) fail(path.string(), ": no such file");
  if (!std::filesystem::is_regular_file(status)) fail(path.string(), ": not a regular file");
  constexpr uintmax_t kMaxFileBytes = uintmax_t{64} << 20;
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) fail(path.string(), ": cannot be read: ", error.message());
  if (bytes > kMaxFileBytes) {
    fail(path.string(), ": expected at most ", kMaxFileBytes, " bytes, got ", bytes);
  }
  std::string text(bytes, '\0');
  std::ifstream in(path, std::ios::binary);
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  if (!in) fail(path.string(), ": cannot be read");
  return text;
}

}  // namespace replayssm
