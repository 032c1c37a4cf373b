#include "model/safetensors.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/text_file.h"
#include "model/json_text.h"
#include "model/tensor_ops.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int64_t kMaxRank = 8;

constexpr StoredType kStoredTypes[] = {
    {"F32", 32, DType::kFloat32},
    {"BF16", 16, DType::kBFloat16},
    {"F16", 16, DType::kFloat16},
    {"F64", 64, {}},
    {"I64", 64, {}},
    {"U64", 64, {}},
    {"C64", 64, {}},
    {"I32", 32, {}},
    {"U32", 32, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"I8", 8, {}},
    {"U8", 8, {}},
    {"BOOL", 8, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"F4", 4, {}},
};

// Reads one tensor's description; `where` names file and tensor in errors.
class EntryReader {
 public:
  EntryReader(const std::string& path, const std::string& name, uint64_t data_begin,
              uint64_t file_bytes)
      : where_(concat(path, ": tensor ", in_quotes(name))),
        data_begin_(data_begin),
        file_bytes_(file_bytes) {
    entry_.name = name;
  }

  TensorEntry read(const json& description) {
    if (!description.is_object()) {
      fail(where_, ": expected an object, got ", describe(description));
    }
    for (const auto& [key, value] : description.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        fail(where_, ": unknown key ", in_quotes(key));
      }
    }
    read_type(member(description, "dtype"));
    read_shape(member(description, "shape"));
    read_offsets(member(description, "data_offsets"));
    return std::move(entry_);
  }

 private:
  const json& member(const json& description, const char* key) const {
    const auto found = description.find(key);
    if (found == description.end()) fail(where_, ": missing ", key);
    return *found;
  }

  void read_type(const json& value) {
    if (!value.is_string()) fail(where_, ": dtype: expected a string, got ", describe(value));
    const auto& name = value.get_ref<const std::string&>();
    const auto* found = std::ranges::find(kStoredTypes, std::string_view(name), &StoredType::name);
    if (found == std::end(kStoredTypes)) fail(where_, ": unknown dtype ", in_quotes(name));
    entry_.type = *found;
  }

  void read_shape(const json& value) {
    if (!value.is_array() || value.size() > kMaxRank) {
      fail(where_, ": shape: expected a list of at most ", kMaxRank, " sizes, got ",
           describe(value));
    }
    uint64_t bits = static_cast<uint64_t>(entry_.type.bits);
    bool overflow = false;
    for (const json& size : value) {
      const uint64_t n = unsigned_number(size, "shape");
      overflow |= n > INT64_MAX || __builtin_mul_overflow(bits, n, &bits);
      entry_.shape.push_back(static_cast<int64_t>(n));
    }
    const bool empty = std::ranges::count(entry_.shape, 0) > 0;
    if (overflow && !empty) fail(where_, ": shape ", shape_text(entry_.shape), " overflows");
    bits = empty ? 0 : bits;
    if (bits % 8 != 0)
      fail(where_, ": shape ", shape_text(entry_.shape), " does not end on a whole byte");
    bytes_ = bits / 8;
  }

  void read_offsets(const json& value) {
    if (!value.is_array() || value.size() != 2) {
      fail(where_, ": data_offsets: expected two numbers, got ", describe(value));
    }
    const uint64_t begin = unsigned_number(value[0], "data_offsets");
    const uint64_t end = unsigned_number(value[1], "data_offsets");
    const uint64_t data_bytes = file_bytes_ - data_begin_;
    if (begin > end || end > data_bytes) {
      fail(where_, ": data_offsets [", begin, ", ", end, "] lie outside the ", data_bytes,
           " bytes of data in the file");
    }
    if (end - begin != bytes_) {
      fail(where_, ": expected ", bytes_, " bytes for ", entry_.type.name, " ",
           shape_text(entry_.shape), ", got data_offsets [", begin, ", ", end, "]");
    }
    entry_.begin = data_begin_ + begin;
    entry_.end = data_begin_ + end;
  }

  uint64_t unsigned_number(const json& value, const char* key) const {
    if (!value.is_number_unsigned()) {
      fail(where_, ": ", key, ": expected a number >= 0, got ", describe(value));
    }
    return value.get<uint64_t>();
  }

  std::string where_;
  uint64_t data_begin_, file_bytes_, bytes_ = 0;
  TensorEntry entry_;
};

void check_overlaps(std::vector<TensorEntry> const& entries, const std::string& path) {
  std::vector<const TensorEntry*> order;
  for (const TensorEntry& entry : entries) {
    if (entry.begin < entry.end) order.push_back(&entry);
  }
  std::ranges::sort(order, {}, &TensorEntry::begin);
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->begin < order[i - 1]->end) {
      fail(path, ": tensors ", in_quotes(order[i - 1]->name), " and ", in_quotes(order[i]->name),
           " overlap");
    }
  }
}

void check_metadata(const json& metadata, const std::string& path) {
  const bool texts = metadata.is_object() &&
                     std::ranges::all_of(metadata, [](const json& v) { return v.is_string(); });
  if (!texts) fail(path, ": __metadata__: expected an object of strings, got ", describe(metadata));
}

// The index's weight_map: tensor name -> shard.
std::unordered_map<std::string, std::string> read_index(const std::filesystem::path& index) {
  const std::string file = index.string();
  const json root = parse_json_object(read_text_file(index), file);
  const auto map = root.find("weight_map");
  if (map == root.end() || !map->is_object()) {
    fail(file, ": weight_map: expected an object, got ",
         map == root.end() ? "nothing" : describe(*map));
  }
  std::unordered_map<std::string, std::string> shard_of;
  for (const auto& [name, shard] : map->items()) {
    const std::string text = shard.is_string() ? shard.get<std::string>() : "";
    const std::filesystem::path path(text);
    if (text.empty() || path != path.filename() || path.extension() != ".safetensors") {
      fail(file, ": weight_map: ", in_quotes(name),
           ": expected the name of a .safetensors file, got ", describe(shard));
    }
    shard_of.emplace(name, text);
  }
  if (shard_of.empty()) fail(file, ": weight_map is empty");
  return shard_of;
}

}  // namespace

std::vector<TensorEntry> parse_safetensors(std::span<const std::byte> file,
                                           const std::string& path) {
  if (file.size() < kLengthBytes) {
    fail(path, ": truncated: expected at least ", kLengthBytes, " bytes, got ", file.size());
  }
  uint64_t header_bytes = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  }
  const uint64_t room = file.size() - kLengthBytes;
  if (header_bytes > kMaxHeaderBytes || header_bytes > room) {
    fail(path, ": header length: expected at most ", std::min(room, kMaxHeaderBytes), ", got ",
         header_bytes, " (truncated, or not a safetensors file)");
  }
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                                header_bytes);
  std::vector<TensorEntry> entries;
  parse_json_object(header, path, [&](const std::string& name, json&& value) {
    if (name == "__metadata__") return check_metadata(value, path);
    EntryReader reader(path, name, kLengthBytes + header_bytes, file.size());
    entries.push_back(reader.read(value));
  });
  check_overlaps(entries, path);
  return entries;
}

Checkpoint::Checkpoint(const std::filesystem::path& folder) : folder_(folder.string()) {
  const std::filesystem::path single = folder / "model.safetensors";
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  if (file_exists(index)) {
    add_shards(index);
  } else if (file_exists(single)) {
    add_file(single);
  } else if (file_exists(folder / "pytorch_model.bin") ||
             file_exists(folder / "pytorch_model.bin.index.json")) {
    fail(folder_, ": holds pytorch_model.bin only; expected model.safetensors (convert it first)");
  } else {
    fail(folder_, ": expected model.safetensors or model.safetensors.index.json, found neither");
  }
  by_name_.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
}

void Checkpoint::add_file(const std::filesystem::path& path) {
  files_.push_back(MappedFile::open(path));
  std::vector<TensorEntry> found = parse_safetensors(files_.back()->bytes(), path.string());
  for (TensorEntry& entry : found) entry.file = files_.size() - 1;
  std::ranges::move(found, std::back_inserter(entries_));
  files_.back()->release(0, files_.back()->bytes().size());
}

void Checkpoint::add_shards(const std::filesystem::path& index) {
  auto shard_of = read_index(index);
  std::vector<std::string> shards;
  shards.reserve(shard_of.size());
  for (const auto& [name, shard] : shard_of) shards.push_back(shard);
  std::ranges::sort(shards);
  const auto repeated = std::ranges::unique(shards);
  shards.erase(repeated.begin(), repeated.end());
  const std::filesystem::path folder = index.parent_path();
  if (file_exists(folder / "model.safetensors") &&
      !std::ranges::binary_search(shards, "model.safetensors")) {
    fail(index.string(), ": does not name model.safetensors, which lies beside it");
  }
  for (const std::string& shard : shards) {
    if (!file_exists(folder / shard)) {
      fail(index.string(), ": missing shard ", in_quotes(shard));
    }
    add_file(folder / shard);
  }
  for (const TensorEntry& entry : entries_) {
    const auto found = shard_of.find(entry.name);
    const std::string shard = std::filesystem::path(path(entry)).filename().string();
    if (found == shard_of.end() || found->second != shard) {
      fail(index.string(), ": disagrees with ", in_quotes(shard), ", which holds tensor ",
           in_quotes(entry.name));
    }
    shard_of.erase(found);
  }
  if (!shard_of.empty()) {
    fail(index.string(), ": tensor ", in_quotes(shard_of.begin()->first), " is not in shard ",
         in_quotes(shard_of.begin()->second));
  }
}

const TensorEntry* Checkpoint::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

Tensor Checkpoint::view(const TensorEntry& entry, int64_t first, std::vector<int64_t> shape) const {
  REPLAYSSM_CHECK(entry.type.dtype, entry.name, " is ", entry.type.name);
  Tensor tensor{
      .dtype = *entry.type.dtype, .shape = std::move(shape), .data = nullptr, .storage = {}};
  const uint64_t begin = entry.begin + static_cast<uint64_t>(first * dtype_bytes(tensor.dtype));
  const uint64_t end = begin + static_cast<uint64_t>(tensor.bytes());
  REPLAYSSM_CHECK(first >= 0 && end <= entry.end, entry.name, " from ", first);
  const MappedFile& file = *files_[entry.file];
  tensor.data = file.bytes().data() + begin;
  tensor.storage = file.hold(begin, end);
  return begin % static_cast<uint64_t>(dtype_bytes(tensor.dtype)) == 0 ? tensor : copied(tensor);
}

}  // namespace replayssm
