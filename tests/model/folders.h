// Checkpoint folders made up by tests, and what ended up in the loaded weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/weights.h"
#include "replayssm/error.h"

namespace replayssm::testing {

// A folder that disappears with its object.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::filesystem::path repository();  // of the sources
std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& bytes);

struct StoredTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using StoredTensors = std::map<std::string, StoredTensor>;

// The format, written and read without the code under test.
std::string safetensors_bytes(const std::string& header, const std::string& data);
void write_safetensors(const std::filesystem::path& path, const StoredTensors& tensors);
StoredTensors read_safetensors(const std::filesystem::path& path);
StoredTensor float_tensor(std::vector<int64_t> shape, const std::vector<float>& values);

// A folder's files, copied, to be spoilt.
void copy_folder(const std::filesystem::path& from, const TempFolder& to);
nlohmann::json read_config(const std::filesystem::path& folder);

// The message of the Error that `run` throws; empty when it throws none.
template <class Fn>
std::string error_of(Fn&& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Every tensor that is present, by its place.
std::map<std::string, Tensor> list_tensors(const ModelWeights& weights);

}  // namespace replayssm::testing
