// Checkpoint folders in the safetensors format: one file, or shards with an index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/mapped_file.h"
#include "model/tensor.h"

namespace replayssm {

// An element type that the format knows.
struct StoredType {
  std::string_view name;
  int bits = 0;
  std::optional<DType> dtype;  // empty = the engine does not compute with it
};

struct TensorEntry {
  std::string name;
  StoredType type;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes of the file
  size_t file = 0;
};

// Reads and validates the header of a whole file's bytes. Throws Error naming `path` (and the
// tensor) for anything malformed, out of range, overlapping or contradictory.
std::vector<TensorEntry> parse_safetensors(std::span<const std::byte> file,
                                           const std::string& path);

class Checkpoint {
 public:
  // Maps the folder's files and reads their headers. Throws Error also for an index that disagrees
  // with its shards.
  explicit Checkpoint(const std::filesystem::path& folder);

  const std::string& folder() const { return folder_; }
  std::span<const TensorEntry> entries() const { return entries_; }
  const TensorEntry* find(const std::string& name) const;
  const std::string& path(const TensorEntry& entry) const { return files_[entry.file]->path(); }

  // `shape` elements of a tensor from element `first` on, in the file's memory. Copied where the
  // file's layout would misalign them.
  Tensor view(const TensorEntry& entry, int64_t first, std::vector<int64_t> shape) const;

 private:
  void add_file(const std::filesystem::path& path);
  void add_shards(const std::filesystem::path& index);

  std::string folder_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<TensorEntry> entries_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace replayssm
