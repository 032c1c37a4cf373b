#include "core/buffer.h"

#include "core/check.h"

namespace replayssm {

Buffer::Buffer(int64_t bytes, Memory& memory) : memory_(&memory) {
  REPLAYSSM_CHECK(bytes >= 0, "bytes=", bytes);
  if (bytes == 0) return;
  data_ = memory.allocate(bytes);
  bytes_ = bytes;
}

Buffer::~Buffer() {
  if (data_) memory_->release(data_, bytes_);
}

}  // namespace replayssm
