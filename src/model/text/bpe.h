// Byte-pair encoding over bytes: the pair of lowest rank merges first, the leftmost of equals.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/text/json_field.h"

namespace replayssm::text {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
template <class T>
using StringMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

class Bpe {
 public:
  // `model` is the member of that name of tokenizer.json.
  explicit Bpe(const JsonField& model);
  // Ids by bytes, single bytes among them: two neighbours merge where their bytes together are a
  // token, whose id is the rank.
  explicit Bpe(StringMap<int32_t> ranks);

  // Appends the ids of `piece`, any bytes.
  void encode(std::string_view piece, std::vector<int32_t>& ids) const;

  // Ids by literal text, in the byte alphabet.
  const StringMap<int32_t>& vocabulary() const { return vocabulary_; }

 private:
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  struct Entry {
    uint64_t pair;
    Merge merge;
  };

  void read_vocabulary(const JsonField& field);
  void read_merges(const JsonField& field);
  void read_unknown(const JsonField& model);
  void insert(uint64_t pair, Merge merge);
  const Merge* find(int32_t left, int32_t right) const;
  void split_into_symbols(std::string_view piece, std::vector<int32_t>& symbols) const;
  void merge_short(std::vector<int32_t>& symbols) const;
  void merge_long(std::vector<int32_t>& symbols) const;

  StringMap<int32_t> vocabulary_;
  StringMap<int32_t> by_bytes_;  // filled where whole pieces that are tokens need no merges
  std::array<int32_t, 256> byte_ids_;
  std::optional<int32_t> unknown_id_;
  bool fuse_unknown_ = false;
  std::vector<Entry> merges_;  // open addressing, a power of two in size
};

}  // namespace replayssm::text
