// Any text as config.json, and what follows a NUL as generation_config.json: either refused with an
// Error of one line, or a configuration whose sizes are in range.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "model/config_parser.h"
#include "replayssm/error.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace replayssm;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t split = text.find('\0');
  std::optional<ConfigText> generation;
  if (split != text.npos) generation = ConfigText{"g", text.substr(split + 1)};
  try {
    const ModelConfig c = parse_config({"c", text.substr(0, split)}, generation);
    require(c.vocab_size > 0 && c.hidden_size > 0 && c.conv_kernel > 0);
    require(!c.layers.empty() && c.layers.size() <= 4096);
    if (c.count(Mixer::kMamba2)) require(c.mamba2.heads % c.mamba2.groups == 0);
    if (c.mamba2.norm_groups) require(c.mamba2.heads % c.mamba2.norm_groups == 0);
    if (c.count(Mixer::kGatedDelta)) {
      require(c.gated_delta.value_heads % c.gated_delta.key_heads == 0);
    }
    if (c.count(Mixer::kKimiDelta)) require(c.kimi_delta.heads > 0 && c.kimi_delta.head_dim > 0);
    if (c.count(Mixer::kLatentAttention)) {
      require(c.latent_attention.heads > 0 && c.latent_attention.cached() > 1);
    }
    for (const float scale : c.mamba2.projection_scale) require(scale > 0 && scale < 1e7f);
    require(c.logit_scale > 0 && c.residual_scale > 0 && c.embedding_scale > 0);
    if (c.count(Mixer::kAttention)) require(c.attention.heads % c.attention.kv_heads == 0);
    require(c.norm_eps > 0 && c.mamba2.dt_min >= 0 && c.mamba2.dt_max > c.mamba2.dt_min);
    for (const int32_t id : c.eos_ids) require(id >= 0 && id < c.vocab_size);
    require(c.bos_id >= -1 && c.bos_id < c.vocab_size);
  } catch (const Error& error) {
    require(!std::strchr(error.what(), '\n') && std::strlen(error.what()) < 1000);
  }
  return 0;
}
