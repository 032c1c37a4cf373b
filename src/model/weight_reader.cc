#include "model/weight_reader.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "model/dummy_weights.h"
#include "model/json_text.h"
#include "model/tensor_ops.h"

namespace replayssm {
namespace {

// Names that quantised checkpoints give to what accompanies their weights.
constexpr std::string_view kQuantisedSuffixes[] = {
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".weight_packed",
    ".weight_shape",
    ".qweight",
    ".weight_global_scale",
    ".input_global_scale",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_zero_point",
    ".absmax",
    ".quant_map",
};

void refuse_quantised(const Checkpoint& checkpoint) {
  for (const TensorEntry& entry : checkpoint.entries()) {
    const std::string_view name = entry.name;
    const std::string_view type = entry.type.name;
    const bool packed = type == "U8" || type == "I8" || type.starts_with("F8") ||
                        type.starts_with("F6") || type.starts_with("F4");
    const bool scale = std::ranges::any_of(
        kQuantisedSuffixes, [&](std::string_view suffix) { return name.ends_with(suffix); });
    if (!packed && !scale) continue;
    fail(checkpoint.path(entry), ": tensor ", in_quotes(name), " (", type,
         ") belongs to a quantised checkpoint; expected weights in BF16, F16 or F32");
  }
}

}  // namespace

WeightReader::WeightReader(const Checkpoint& checkpoint)
    : checkpoint_(&checkpoint), used_(checkpoint.entries().size()) {
  refuse_quantised(checkpoint);
}

bool WeightReader::has(const std::string& name) const {
  if (!checkpoint_)
    return name.ends_with("embeddings.weight") || name.ends_with("embed_tokens.weight");
  return checkpoint_->find(name) != nullptr;
}

bool WeightReader::has_prefix(std::string_view prefix) const {
  if (!checkpoint_) return false;
  return std::ranges::any_of(checkpoint_->entries(), [&](const TensorEntry& entry) {
    return entry.name.starts_with(prefix);
  });
}

void WeightReader::mark(const TensorEntry& entry) {
  const auto index = static_cast<size_t>(&entry - checkpoint_->entries().data());
  REPLAYSSM_CHECK(!used_[index], entry.name, " taken twice");
  used_[index] = true;
}

const TensorEntry& WeightReader::use(const std::string& name, const Shape& shape) {
  const TensorEntry* entry = checkpoint_->find(name);
  if (!entry) {
    fail(folder(), ": missing tensor ", in_quotes(name), "; expected shape ", shape_text(shape));
  }
  const std::string where = concat(checkpoint_->path(*entry), ": tensor ", in_quotes(name));
  if (entry->shape != shape) {
    fail(where, ": expected shape ", shape_text(shape), ", got ", shape_text(entry->shape));
  }
  if (!entry->type.dtype) fail(where, ": expected BF16, F16 or F32, got ", entry->type.name);
  mark(*entry);
  return *entry;
}

Tensor WeightReader::take(const std::string& name, const Shape& shape) {
  if (!checkpoint_) return dummy_tensor(name, shape);
  return checkpoint_->view(use(name, shape), 0, shape);
}

Tensor WeightReader::take_if(bool wanted, const std::string& name, const Shape& shape) {
  return wanted ? take(name, shape) : Tensor{};
}

Tensor WeightReader::take_filter(const std::string& name, int64_t channels, int64_t taps) {
  if (!checkpoint_) return dummy_tensor(name, {channels, taps});
  const TensorEntry* entry = checkpoint_->find(name);
  const Shape flat{channels, taps};
  const bool is_flat = entry && entry->shape == flat;
  return checkpoint_->view(use(name, is_flat ? flat : Shape{channels, 1, taps}), 0, flat);
}

Tensor WeightReader::take_vector(const std::string& name, int64_t elements) {
  if (!checkpoint_) return dummy_tensor(name, {elements});
  const TensorEntry* entry = checkpoint_->find(name);
  const Shape flat{elements};
  if (!entry) return take(name, flat);
  Shape shape = entry->shape;
  std::erase(shape, 1);
  const bool fits = shape == flat || (elements == 1 && shape.empty());
  return checkpoint_->view(use(name, fits ? entry->shape : flat), 0, flat);
}

std::vector<Tensor> WeightReader::take_pieces(const std::string& name, const Shape& shape,
                                              const Shape& piece) {
  const auto product = [](const Shape& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  };
  const int64_t elements = product(piece);
  const int64_t count = product(shape) / elements;
  std::vector<Tensor> pieces;
  if (!checkpoint_) {
    for (int64_t i = 0; i < count; ++i) pieces.push_back(dummy_tensor(concat(name, i), piece));
    return pieces;
  }
  const TensorEntry& entry = use(name, shape);
  for (int64_t i = 0; i < count; ++i) {
    pieces.push_back(checkpoint_->view(entry, i * elements, piece));
  }
  return pieces;
}

void WeightReader::skip(std::string_view prefix) {
  if (!checkpoint_) return;
  for (const TensorEntry& entry : checkpoint_->entries()) {
    if (!entry.name.starts_with(prefix)) continue;
    mark(entry);
    skipped_.push_back(entry.name);
  }
}

void WeightReader::skip_copy(const std::string& name, const std::string& other) {
  if (!checkpoint_) return;
  const TensorEntry* copy = checkpoint_->find(name);
  if (!copy) return;
  const TensorEntry* original = checkpoint_->find(other);
  REPLAYSSM_CHECK(original, other);
  bool equal = copy->type.name == original->type.name && copy->shape == original->shape &&
               copy->type.dtype.has_value();
  const auto elements = static_cast<int64_t>((copy->end - copy->begin) * 8) / copy->type.bits;
  constexpr int64_t kChunk = 1 << 24;  // elements in memory at a time
  for (int64_t first = 0; equal && first < elements; first += kChunk) {
    const Shape shape{std::min(kChunk, elements - first)};
    const Tensor a = checkpoint_->view(*copy, first, shape);
    const Tensor b = checkpoint_->view(*original, first, shape);
    equal = std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
  }
  if (!equal) {
    fail(checkpoint_->path(*copy), ": tensor ", in_quotes(name), " differs from ", in_quotes(other),
         ", but tie_word_embeddings is true");
  }
  mark(*copy);
  skipped_.push_back(name);
}

std::vector<std::string> WeightReader::finish() {
  const auto unused = std::ranges::count(used_, false);
  if (unused > 0) {
    const auto first = std::ranges::find(used_, false) - used_.begin();
    const TensorEntry& entry = checkpoint_->entries()[static_cast<size_t>(first)];
    fail(checkpoint_->path(entry), ": unknown tensor ", in_quotes(entry.name),
         unused > 1 ? concat(" and ", unused - 1, " more") : "", "; no part of this model uses it");
  }
  return std::move(skipped_);
}

}  // namespace replayssm
