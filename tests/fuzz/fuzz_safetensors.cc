// Any bytes as a safetensors file: either refused with an Error of one line, or every tensor lies
// inside the file, has the size that its shape says, and overlaps no other.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "model/safetensors.h"
#include "replayssm/error.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace replayssm;
  try {
    const auto entries = parse_safetensors({reinterpret_cast<const std::byte*>(data), size}, "f");
    std::vector<bool> taken(size);
    for (const TensorEntry& entry : entries) {
      require(entry.begin <= entry.end && entry.end <= size);
      uint64_t bits = static_cast<uint64_t>(entry.type.bits);
      bool empty = false;
      for (const int64_t n : entry.shape) empty |= n == 0;
      for (const int64_t n : entry.shape) bits *= empty ? 0 : static_cast<uint64_t>(n);
      require(bits == 8 * (entry.end - entry.begin));
      for (uint64_t i = entry.begin; i < entry.end; ++i) {
        require(!taken[i]);
        taken[i] = true;
      }
    }
  } catch (const Error& error) {
    require(!std::strchr(error.what(), '\n') && std::strlen(error.what()) < 1000);
  }
  return 0;
}
