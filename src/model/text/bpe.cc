#include "model/text/bpe.h"

#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <utility>

#include "core/check.h"
#include "model/text/byte_alphabet.h"
#include "model/text/utf8.h"

namespace replayssm::text {
namespace {

constexpr int32_t kNoId = -1;
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
constexpr uint64_t kNoPair = ~uint64_t{0};
constexpr uint32_t kNowhere = ~uint32_t{0};
constexpr size_t kShortPiece = 48;  // up to here a scan for the lowest rank beats a queue

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

uint64_t scramble(uint64_t key) {
  key *= 0x9E3779B97F4A7C15;
  return key ^ key >> 32;
}

// Places in a piece, the lowest first. Those that come in order, as merges along a piece make them,
// cost no search: a long run of one character takes linear time.
class Places {
 public:
  bool empty() const { return next_ == in_order_.size() && others_.empty(); }
  void push(uint32_t place) {
    if (in_order_.empty() || place >= in_order_.back()) {
      in_order_.push_back(place);
    } else {
      others_.push(place);
    }
  }
  uint32_t pop() {
    if (others_.empty() || (next_ < in_order_.size() && in_order_[next_] < others_.top())) {
      return in_order_[next_++];
    }
    const uint32_t place = others_.top();
    others_.pop();
    return place;
  }

 private:
  std::vector<uint32_t> in_order_;
  size_t next_ = 0;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> others_;
};

// The two halves of a merge, from "a b" or ["a", "b"].
std::pair<std::string_view, std::string_view> halves(const JsonField& merges, size_t index) {
  const nlohmann::json& merge = merges.value()[index];
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  merges[index].reject("expected a merge, \"a b\" or [\"a\", \"b\"]");
}

}  // namespace

Bpe::Bpe(const JsonField& model) {
  if (model.has("type") && model["type"].as_string() != "BPE") {
    model["type"].reject(
        concat("expected \"BPE\", got the unsupported \"", model["type"].as_string(), "\""));
  }
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.has(affix) && !model[affix].as_string().empty()) {
      model[affix].reject("unsupported for a byte-level tokenizer");
    }
  }
  if (model.has("dropout") && model["dropout"].value() != 0) {
    model["dropout"].reject("unsupported: encoding would be random");
  }
  read_vocabulary(model["vocab"]);
  read_merges(model["merges"]);
  read_unknown(model);
  if (model.flag("ignore_merges", false)) {
    for (const auto& [token, id] : vocabulary_) {
      if (std::optional<std::string> bytes = spelled_bytes(token)) {
        by_bytes_.emplace(*std::move(bytes), id);
      }
    }
  }
}

Bpe::Bpe(StringMap<int32_t> ranks) : by_bytes_(std::move(ranks)) {
  const std::array<char32_t, 256> alphabet = byte_alphabet();
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_[byte] =
        by_bytes_.find(std::string_view(std::string(1, static_cast<char>(byte))))->second;
  }
  struct Split {
    int32_t left, right, merged;
  };
  std::vector<Split> splits;
  for (const auto& [bytes, id] : by_bytes_) {
    std::string token;
    for (const char c : bytes) append_utf8(token, alphabet[static_cast<unsigned char>(c)]);
    vocabulary_.emplace(std::move(token), id);
    const std::string_view whole = bytes;
    for (size_t at = 1; at < whole.size(); ++at) {
      const auto left = by_bytes_.find(whole.substr(0, at));
      const auto right = by_bytes_.find(whole.substr(at));
      if (left == by_bytes_.end() || right == by_bytes_.end()) continue;
      splits.push_back({left->second, right->second, id});
    }
  }
  merges_.resize(std::bit_ceil(2 * splits.size() + 2), {kNoPair, {}});
  for (const Split& split : splits) {
    insert(pair_of(split.left, split.right), {split.merged, split.merged});
  }
}

void Bpe::read_vocabulary(const JsonField& field) {
  if (!field.value().is_object() || field.value().empty()) {
    field.reject("expected an object of tokens and ids");
  }
  vocabulary_.reserve(field.value().size());
  std::unordered_map<int32_t, std::string_view> seen;
  seen.reserve(field.value().size());
  for (const auto& [token, value] : field.value().items()) {
    const int32_t id = JsonField(value, field.path()).as_id();
    const auto [other, added] = seen.emplace(id, token);
    if (!added)
      field.reject(concat("\"", other->second, "\" and \"", token, "\" have the id ", id));
    vocabulary_.emplace(token, id);
  }
}

void Bpe::read_merges(const JsonField& field) {
  const size_t count = field.size();
  merges_.resize(std::bit_ceil(2 * count + 2), {kNoPair, {}});
  const auto id_of = [&](std::string_view token, size_t index) {
    const auto found = vocabulary_.find(token);
    if (found == vocabulary_.end()) {
      field[index].reject(concat("\"", token, "\" is not in the vocabulary"));
    }
    return found->second;
  };
  std::string merged;
  size_t comments = 0;
  for (size_t index = 0; index < count; ++index) {
    const nlohmann::json& value = field.value()[index];
    if (value.is_string() && value.get_ref<const std::string&>().starts_with("#version")) {
      ++comments;
      continue;
    }
    const auto [left, right] = halves(field, index);
    const int32_t left_id = id_of(left, index);
    const int32_t right_id = id_of(right, index);
    merged.assign(left).append(right);
    insert(pair_of(left_id, right_id),
           {static_cast<int32_t>(index - comments), id_of(merged, index)});
  }
}

void Bpe::read_unknown(const JsonField& model) {
  if (model.has("unk_token")) {
    const auto found = vocabulary_.find(model["unk_token"].as_string());
    if (found == vocabulary_.end()) model["unk_token"].reject("is not in the vocabulary");
    unknown_id_ = found->second;
  }
  fuse_unknown_ = model.flag("fuse_unk", false);

  const std::array<char32_t, 256> alphabet = byte_alphabet();
  bool complete = true;
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(character, alphabet[byte]);
    const auto found = vocabulary_.find(character);
    byte_ids_[byte] = found == vocabulary_.end() ? kNoId : found->second;
    complete = complete && byte_ids_[byte] != kNoId;
  }
  if (!complete && model.flag("byte_fallback", false)) {
    model["byte_fallback"].reject("unsupported for a vocabulary that lacks single bytes");
  }
}

void Bpe::insert(uint64_t pair, Merge merge) {
  const size_t mask = merges_.size() - 1;
  size_t slot = scramble(pair) & mask;
  while (merges_[slot].pair != kNoPair && merges_[slot].pair != pair) slot = (slot + 1) & mask;
  merges_[slot] = {pair, merge};  // of two equal pairs the later counts
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t mask = merges_.size() - 1;
  for (size_t slot = scramble(pair) & mask; merges_[slot].pair != kNoPair;
       slot = (slot + 1) & mask) {
    if (merges_[slot].pair == pair) return &merges_[slot].merge;
  }
  return nullptr;
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids) const {
  if (!by_bytes_.empty()) {
    const auto whole = by_bytes_.find(piece);
    if (whole != by_bytes_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  std::vector<int32_t> symbols;
  split_into_symbols(piece, symbols);
  if (symbols.size() <= kShortPiece) {
    merge_short(symbols);
  } else {
    merge_long(symbols);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

// Bytes without a token are the unknown token, or nothing when there is none.
void Bpe::split_into_symbols(std::string_view piece, std::vector<int32_t>& symbols) const {
  symbols.reserve(piece.size());
  bool after_unknown = false;
  for (char c : piece) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    if (id != kNoId) {
      symbols.push_back(id);
    } else if (unknown_id_ && !(fuse_unknown_ && after_unknown)) {
      symbols.push_back(*unknown_id_);
    }
    after_unknown = id == kNoId;
  }
}

void Bpe::merge_short(std::vector<int32_t>& symbols) const {
  Merge next[kShortPiece];  // the merge of symbols i and i + 1
  const auto look_up = [&](size_t i) {
    const Merge* merge = find(symbols[i], symbols[i + 1]);
    next[i] = merge != nullptr ? *merge : Merge{kNoRank, kNoId};
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) look_up(i);

  while (symbols.size() > 1) {
    const size_t pairs = symbols.size() - 1;
    size_t best = 0;
    for (size_t i = 1; i < pairs; ++i) {
      if (next[i].rank < next[best].rank) best = i;
    }
    if (next[best].rank == kNoRank) return;
    symbols[best] = next[best].id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    for (size_t i = best + 1; i + 1 < pairs; ++i) next[i] = next[i + 1];
    if (best > 0) look_up(best - 1);
    if (best + 1 < symbols.size()) look_up(best);
  }
}

void Bpe::merge_long(std::vector<int32_t>& symbols) const {
  REPLAYSSM_CHECK(symbols.size() < kNowhere, symbols.size());
  std::map<int32_t, Places> queue;  // by rank, of the left halves
  const auto end = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> before(end), after(end);
  for (uint32_t i = 0; i < end; ++i) {
    before[i] = i == 0 ? kNowhere : i - 1;
    after[i] = i + 1 == end ? kNowhere : i + 1;
  }
  const auto merge_at = [&](uint32_t left) -> const Merge* {
    if (left == kNowhere || symbols[left] == kNoId || after[left] == kNowhere) return nullptr;
    return find(symbols[left], symbols[after[left]]);
  };
  const auto enqueue = [&](uint32_t left) {
    if (const Merge* merge = merge_at(left)) queue[merge->rank].push(left);
  };
  for (uint32_t i = 0; i < end; ++i) enqueue(i);

  while (!queue.empty()) {
    const auto lowest = queue.begin();
    if (lowest->second.empty()) {
      queue.erase(lowest);
      continue;
    }
    const uint32_t left = lowest->second.pop();
    const Merge* merge = merge_at(left);
    if (merge == nullptr || merge->rank != lowest->first) continue;  // has changed meanwhile
    const uint32_t right = after[left];
    symbols[left] = merge->id;
    symbols[right] = kNoId;
    after[left] = after[right];
    if (after[left] != kNowhere) before[after[left]] = left;
    enqueue(before[left]);
    enqueue(left);
  }
  std::erase(symbols, kNoId);
}

}  // namespace replayssm::text
