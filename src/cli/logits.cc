#include "cli/logits.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "cli/setup.h"
#include "core/check.h"
#include "engine/rows.h"

namespace replayssm::cli {
namespace {

using Table = std::vector<std::vector<float>>;  // one row of logits per position

// Prefills the ids in pieces and collects the logits of ascending, distinct positions.
Table compute(Model& model, const LogitsOptions& options, const std::vector<int64_t>& positions) {
  const auto length = static_cast<int64_t>(options.ids.size());
  const int64_t piece = std::min(options.limits.batched_tokens(), length);
  const int64_t vocab = model.config().vocab_size;
  Rows rows(model, {.state_dtype = state_dtype(options.state, model.config()),
                    .context = length,
                    .max_logits = std::min(piece, static_cast<int64_t>(positions.size()))});
  Table table;
  for (int64_t begin = 0; begin < length; begin += piece) {
    const int64_t end = std::min(length, begin + piece);
    std::vector<int32_t> wanted;
    for (const int64_t position : positions) {
      if (position >= begin && position < end) {
        wanted.push_back(static_cast<int32_t>(position - begin));
      }
    }
    const RowTokens tokens{0, std::span(options.ids).subspan(begin, end - begin)};
    const std::span<const float> logits = rows.prefill({&tokens, 1}, wanted);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto row = logits.subspan(i * vocab, vocab);
      table.emplace_back(row.begin(), row.end());
    }
  }
  return table;
}

std::string describe(int64_t position, const std::vector<float>& logits) {
  constexpr size_t kTop = 5;
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(std::min(kTop, order.size()));
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  std::string line = fmt::format("position {}:", position);
  for (auto id = order.begin(); id != end; ++id)
    line += fmt::format("  {} {:.5f}", *id, logits[*id]);
  return line + "\n";
}

}  // namespace

void logits(const LogitsOptions& options) {
  const auto length = static_cast<int64_t>(options.ids.size());
  std::vector<int64_t> positions = options.positions;
  if (positions.empty()) positions.push_back(length - 1);
  std::ranges::sort(positions);
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  if (positions.back() >= length) {
    fail("--positions: expected positions below ", length, ", the number of ids, got ",
         positions.back());
  }
  const auto folder = find_model(options.model);
  const LoadedModel loaded = load_model(folder, options.model);
  const ModelConfig& config = loaded.model->config();
  check_ids(options.ids, config, "--ids");
  if (config.max_positions > 0 && length > config.max_positions) {
    fail("--ids: expected at most ", config.max_positions, " ids, the model's limit, got ", length);
  }
  const Table table = compute(*loaded.model, options, positions);
  if (options.json) {
    const nlohmann::ordered_json result{{"model", model_name(folder)},
                                        {"ids", options.ids},
                                        {"positions", positions},
                                        {"logits", table}};
    print(result.dump() + "\n");
    return;
  }
  for (size_t i = 0; i < positions.size(); ++i) print(describe(positions[i], table[i]));
}

}  // namespace replayssm::cli
