// Any bytes as tokenizer.json, and what follows a NUL as a text: either refused with an Error of
// one line, or a tokenizer that encodes to ids of its own, decodes them, and streams what it
// decodes.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "model/tokenizer.h"
#include "replayssm/error.h"

namespace {

using namespace replayssm;

void require(bool condition) {
  if (!condition) std::abort();
}

// In memory where the system has a place for that: a disk would take most of the time.
std::filesystem::path scratch() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code error;
  return std::filesystem::is_directory(memory, error) ? memory
                                                      : std::filesystem::temp_directory_path();
}

class Folder {
 public:
  Folder() : path_(scratch() / ("fuzz_tokenizer_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void use(const Tokenizer& tokenizer, std::string_view text) {
  for (const bool special : {false, true}) {
    const std::vector<int32_t> ids = tokenizer.encode(text, special);
    for (const int32_t id : ids) require(id >= 0);
    StreamDecoder stream(tokenizer, special);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    streamed += stream.flush();
    require(streamed == tokenizer.decode(ids, special));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  std::ofstream(folder.path() / "tokenizer.json", std::ios::binary) << input.substr(0, split);
  try {
    const Tokenizer tokenizer(folder.path());
    use(tokenizer, split == input.npos ? "ab <s>" : input.substr(split + 1));
  } catch (const Error& error) {
    require(!std::strchr(error.what(), '\n'));
  }
  return 0;
}
