// A file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace replayssm {

// False also where it cannot be found out.
bool file_exists(const std::filesystem::path& path) noexcept;

class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  // Throws Error when the file is missing or cannot be mapped.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

  // Keeps the file mapped; when the last copy goes, the pages of [begin, end) leave the process.
  std::shared_ptr<const void> hold(size_t begin, size_t end) const;

  // Lets the pages of [begin, end) go. They are read again from the file when touched.
  void release(size_t begin, size_t end) const;

 private:
  explicit MappedFile(const std::filesystem::path& path);

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace replayssm
