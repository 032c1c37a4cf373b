#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/check.h"

namespace replayssm {
namespace {

struct Held {
  std::shared_ptr<const MappedFile> file;
  size_t begin, end;

  Held(std::shared_ptr<const MappedFile> f, size_t b, size_t e)
      : file(std::move(f)), begin(b), end(e) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { file->release(begin, end); }
};

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

bool file_exists(const std::filesystem::path& path) noexcept {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status{};
  if (file.fd < 0 || fstat(file.fd, &status) != 0) {
    fail(path_, ": cannot be opened: ", std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) fail(path_, ": not a regular file");
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) fail(path_, ": cannot be mapped: ", std::strerror(errno));
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  return std::shared_ptr<const MappedFile>(new MappedFile(path));
}

std::shared_ptr<const void> MappedFile::hold(size_t begin, size_t end) const {
  return std::make_shared<const Held>(shared_from_this(), begin, end);
}

// Rounds outwards: a neighbour's page that goes too is only read again from the page cache.
void MappedFile::release(size_t begin, size_t end) const {
  if (begin >= end) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = begin / page * page;
  madvise(const_cast<std::byte*>(data_) + first, end - first, MADV_DONTNEED);
}

}  // namespace replayssm
