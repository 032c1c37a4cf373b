#include "core/buffer.h"

#include <sys/mman.h>

#include "core/check.h"

namespace replayssm {

Buffer::Buffer(int64_t bytes) {
  REPLAYSSM_CHECK(bytes >= 0, "bytes=", bytes);
  if (bytes == 0) return;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail("out of memory: ", bytes, " bytes refused by the system");
  constexpr int64_t kHugePage = 2 << 20;
  if (bytes >= kHugePage) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  data_ = data;
  bytes_ = bytes;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace replayssm
