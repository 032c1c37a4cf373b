#include "model/cuda/step_arrays.h"

#include <algorithm>
#include <span>

#include "core/check.h"
#include "model/layer_stack.h"
#include "ops/cuda/check_cuda.h"

namespace replayssm {

// Places arrays one behind another in host and device memory alike.
class StepArrays::Packer {
 public:
  Packer(std::byte* host, std::byte* device) : host_(host), device_(device) {}

  // Copies `values` to the next `count` places, of which the rest holds `filler`; returns where
  // they lie on the device.
  template <class T>
  const T* pack(std::span<const T> values, int64_t count, T filler) {
    bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    T* to = reinterpret_cast<T*>(host_ + bytes_);
    const T* there = reinterpret_cast<const T*>(device_ + bytes_);
    bytes_ += count * static_cast<int64_t>(sizeof(T));
    if (host_) std::fill(std::ranges::copy(values, to).out, to + count, filler);
    return there;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 16;

  std::byte* host_;
  std::byte* device_;
  int64_t bytes_ = 0;
};

int64_t StepArrays::bytes_of(const PassPlaces& places) {
  Packer packer(nullptr, nullptr);
  packer.pack<int32_t>({}, places.tokens, 0);
  packer.pack<int32_t>({}, places.sequences + 1, 0);
  packer.pack<int32_t>({}, places.sequences, 0);
  packer.pack<int32_t>({}, places.sequences, 0);
  packer.pack<SequencePlan>({}, places.sequences, {});
  packer.pack<int64_t>({}, places.sequences, 0);
  packer.pack<int32_t>({}, places.logits, 0);
  packer.pack<int32_t>({}, places.sequences * places.block_table_stride, 0);
  packer.pack<cuda::SamplingRow>({}, places.logits, {});
  packer.pack<int64_t>({}, places.logits, 0);
  for (const int64_t width : {int64_t{1}, int64_t{1}, places.history})
    packer.pack<int32_t>({}, places.logits * width, 0);
  packer.pack<int32_t>({}, places.sequences, 0);
  packer.pack<int32_t>({}, places.tokens, 0);
  packer.pack<int32_t>({}, places.tokens, 0);
  packer.pack<int32_t>({}, places.tokens, 0);
  packer.pack<uint64_t>({}, places.tokens, 0);
  return packer.bytes();
}

void StepArrays::reserve(const PassPlaces& places) {
  const int64_t bytes = bytes_of(places);
  if (bytes <= device_.bytes()) return;
  device_ = {};
  for (Source& source : sources_) {
    source.copied.wait();
    source.host = {};
    source.host = Buffer(bytes, pinned_);
  }
  device_ = Buffer(bytes, memory_);
}

void StepArrays::assign(const Batch& batch, std::span<const TokenDraw> draws,
                        const PassPlaces& places, cudaStream_t stream,
                        std::span<const int32_t> hidden_row) {
  const int64_t sequences = batch.sequences();
  const auto tokens = static_cast<int64_t>(batch.token_ids.size());
  const auto logits = static_cast<int64_t>(batch.logit_tokens.size());
  REPLAYSSM_CHECK(tokens <= places.tokens && sequences <= places.sequences &&
                      logits <= places.logits &&
                      batch.block_table_stride <= places.block_table_stride,
                  "tokens=", tokens, " sequences=", sequences);
  reserve(places);
  std::vector<int32_t> windows(static_cast<size_t>(sequences));
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    windows[s] = batch.query_start[s + 1] - batch.query_start[s];
    if (s >= batch.decodes) longest = std::max<int64_t>(longest, windows[s]);
  }
  const int64_t stride = places.block_table_stride;
  std::vector<int32_t> table(static_cast<size_t>(sequences * stride), -1);
  for (int64_t s = 0; s < sequences; ++s) {
    std::copy_n(batch.block_table.begin() + s * batch.block_table_stride, batch.block_table_stride,
                table.begin() + s * stride);
  }
  turn_ ^= 1;
  Source& source = sources_[turn_];
  source.copied.wait();
  Packer packer(source.host.as<>(), device_.as<>());
  arrays_ = {.tokens = places.tokens,
             .sequences = places.sequences,
             .decodes = batch.decodes == sequences ? places.sequences : batch.decodes,
             .logits = places.logits,
             .token_ids = packer.pack(batch.token_ids, places.tokens, -1),
             .query_start =
                 packer.pack(batch.query_start, places.sequences + 1, static_cast<int32_t>(tokens)),
             .slot = packer.pack(batch.slot, places.sequences, -1)};
  windows_ = packer.pack<int32_t>(windows, places.sequences, 0);
  plan_ = const_cast<SequencePlan*>(packer.pack<SequencePlan>({}, places.sequences, {}));
  arrays_.position = packer.pack(batch.position, places.sequences, int64_t{0});
  arrays_.logit_tokens = packer.pack(batch.logit_tokens, places.logits, -1);
  arrays_.block_table = packer.pack<int32_t>(table, places.sequences * stride, -1);
  arrays_.block_table_stride = stride;
  arrays_.longest_window = longest;
  arrays_.longest_step = places.window;
  if (places.sources) arrays_.source = packer.pack(batch.source, places.sequences, -1);
  if (places.kind != PassKind::kForward)
    arrays_.hidden_row = packer.pack(hidden_row, places.tokens, -1);
  if (places.trees) {
    const WindowTrees trees(batch);
    arrays_.parent = packer.pack(batch.parent, places.tokens, -1);
    arrays_.depth = packer.pack<int32_t>(trees.depth, places.tokens, 0);
    arrays_.ancestors = packer.pack<uint64_t>(trees.ancestors, places.tokens, 0);
  }
  pack_draws(draws, places, packer);
  cuda::check_cuda(
      cudaMemcpyAsync(device_.as<void>(), source.host.as<void>(),
                      static_cast<size_t>(packer.bytes()), cudaMemcpyHostToDevice, stream),
      "index arrays");
  source.copied.record(stream);
}

void StepArrays::pack_draws(std::span<const TokenDraw> draws, const PassPlaces& places,
                            Packer& packer) {
  sampling_ = nullptr;
  drawn_position_ = nullptr;
  history_ = {};
  if (!places.draws) return;
  std::vector<cuda::SamplingRow> rows;
  std::vector<int64_t> positions;
  for (const TokenDraw& draw : draws) {
    rows.push_back({.temperature = draw.temperature,
                    .top_p = draw.top_p,
                    .min_p = draw.min_p,
                    .repetition_penalty = draw.repetition_penalty,
                    .presence_penalty = draw.presence_penalty,
                    .frequency_penalty = draw.frequency_penalty,
                    .seed = draw.seed,
                    .top_k = draw.top_k});
    positions.push_back(draw.position);
  }
  sampling_ = packer.pack<cuda::SamplingRow>(rows, places.logits, {});
  drawn_position_ = packer.pack<int64_t>(positions, places.logits, 0);
  if (places.history == 0) return;
  std::vector<int32_t> tokens(draws.size() * static_cast<size_t>(places.history)), prompts, lengths;
  for (size_t row = 0; row < draws.size(); ++row) {
    const TokenDraw& draw = draws[row];
    const bool looks = draw.has_penalties();
    prompts.push_back(looks ? static_cast<int32_t>(draw.prompt_length) : 0);
    lengths.push_back(looks ? static_cast<int32_t>(draw.tokens.size()) : 0);
    REPLAYSSM_CHECK(lengths.back() <= places.history, "tokens=", lengths.back());
    std::copy_n(draw.tokens.begin(), lengths.back(),
                tokens.begin() + static_cast<int64_t>(row) * places.history);
  }
  history_ = {.tokens = packer.pack<int32_t>(tokens, places.logits * places.history, 0),
              .stride = places.history,
              .prompt_length = packer.pack<int32_t>(prompts, places.logits, 0),
              .length = packer.pack<int32_t>(lengths, places.logits, 0)};
}

}  // namespace replayssm
